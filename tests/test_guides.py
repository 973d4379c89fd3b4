"""The guides run, and their notebooks are what their sources say."""

import contextlib
import io
import os
import re
import runpy
import shutil
import tomllib
from pathlib import Path
from unittest import mock

import keras
import nbformat
import pytest

from keras_moe import data
from keras_moe.models import registry
from keras_moe.routers import ROUTERS
from tests.forks import ROOT
from tools import guides

GUIDES = sorted((ROOT / "guides").glob("*.py"))
# The backend that runs each guide in the suite. Most compile more than they compute,
# and take 1.6 to 3 times as long on JAX as on PyTorch; the comparison of models takes
# as long on both, and the guide on paper trains nothing.
BACKENDS = {
    "fine_tune_another_resolution": "torch", "limoe_captions_to_pruning": "torch",
    "moepp_compute": "torch", "mumoe_experts": "torch", "six_routers": "torch",
    "training_at_scale": "tensorflow", "upcycling": "torch",
    "vmoe_in_ten_minutes": "torch", "when_experts_help": "jax", "your_own": "torch",
}  # fmt: skip
each_guide = pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)


@each_guide
def test_a_notebook_is_its_source(guide, tmp_path, monkeypatch):
    source = guides.read_source(guide)
    notebook = nbformat.read(guide.with_suffix(".ipynb"), 4)
    assert [(cell.id, cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.id, cell.cell_type, cell.source) for cell in source.cells
    ], f"{guide.stem}: run make guides"
    assert not guides.is_stale(guide.stem), f"{guide.stem}: run make guides"
    assert guides.complaints(notebook) == []
    # Making it again changes no byte, whatever the times of files.
    monkeypatch.setattr(guides, "GUIDES", tmp_path)
    monkeypatch.setattr(guides, "run", None)
    made = Path(
        shutil.copyfile(guide.with_suffix(".ipynb"), tmp_path / f"{guide.stem}.ipynb")
    )
    shutil.copyfile(guide, tmp_path / guide.name)
    os.utime(made, (0, 0))
    assert guides.main([guide.stem]) == 0
    assert made.read_bytes() == guide.with_suffix(".ipynb").read_bytes()


@each_guide
def test_pictures_have_texts(guide):
    notebook = nbformat.read(guide.with_suffix(".ipynb"), 4)
    cells = [x for x in guides.code_cells(notebook) if guides.picture_text(x.source)]
    assert cells
    for cell in cells:
        text = guides.picture_text(cell.source)
        [picture] = [x for x in cell.outputs if "image/png" in x.get("data", {})]
        assert picture.metadata["image/png"] == {"alt": text}
        assert cell.metadata["mystnb"]["image"] == {"alt": text}
        assert text.endswith(".")
        assert 10 < len(text.split()) < 70
    texts = [guides.picture_text(cell.source) for cell in cells]
    assert len(set(texts)) == len(texts)


@each_guide
def test_a_guide_installs_what_it_needs_first(guide):
    first = guides.code_cells(guides.read_source(guide))[0].source
    extras = re.search(r'^EXTRAS = "([\w,]+)"$', first, re.M).group(1)
    assert f"{first}\n" == guides.SET_UP.format(extras=extras)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(extras.split(",")) <= set(settings["project"]["optional-dependencies"])
    assert "jax" in extras.split(",")


def few(load):
    """Loads some of the examples: how good models become is the notebooks' to show."""

    def loaded(split, *arguments, **options):
        every = load(split, *arguments, **options)
        step = 2 if split == "train" else 3
        parts = [part[::step] for part in every]
        return type(every)(parts) if type(every) is tuple else type(every)(*parts)

    return loaded


@pytest.mark.every_backend
@pytest.mark.parametrize(
    "name", [name for name, x in BACKENDS.items() if x == keras.backend.backend()]
)
# As small as here they cut captions off, and have more experts than are used.
@pytest.mark.filterwarnings("ignore:.* captions have more", "ignore:Expected threshold")
def test_a_guide_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_MOE_GUIDE_SMALL", "1")
    for loads in ("load_digits", "load_emoji"):
        monkeypatch.setattr(data, loads, few(getattr(data, loads)))
    printed = io.StringIO()
    # A guide may register classes of its own, which no other test is to meet.
    known = (ROUTERS, registry._BACKBONES, registry._TASKS, registry._PRESETS)
    with contextlib.ExitStack() as stack:
        for names in (*known, keras.saving.get_custom_objects()):
            stack.enter_context(mock.patch.dict(names))
        stack.enter_context(contextlib.redirect_stdout(printed))
        runpy.run_path(str(ROOT / "guides" / f"{name}.py"))
    assert printed.getvalue()


def test_every_guide_has_a_notebook_a_backend_and_a_line():
    names = {path.stem for path in GUIDES}
    assert names == {path.stem for path in (ROOT / "guides").glob("*.ipynb")}
    assert names == set(BACKENDS)
    index = (ROOT / "docs" / "guides.md").read_text(encoding="utf-8")
    # Once in the table and once in the contents.
    links = re.findall(r"\.\./guides/(\w+)\.ipynb", index)
    assert sorted(links) == sorted(names)
    contents = re.search(r"```\{toctree\}(.*?)```", index, re.S).group(1)
    assert re.findall(r"^guides/(\w+)$", contents, re.M) == links


def test_a_notebook_whose_code_changed_is_older_than_its_source(tmp_path, monkeypatch):
    monkeypatch.setattr(guides, "GUIDES", tmp_path)
    source = tmp_path / "one.py"
    prose, code = "# %% [markdown]\n# # A title\n", "\n# %%\nprint(1)\n"
    source.write_text(prose + code)
    assert guides.is_stale("one")

    def run(notebook):
        guides.code_cells(notebook)[0].outputs = [
            nbformat.v4.new_output("stream", name=name, text=text)
            for name, text in (("stderr", "a warning"), ("stdout", "\x1b[1m1\x1b[0m\n"))
        ]

    monkeypatch.setattr(guides, "run", run)
    assert guides.main(["one"]) == 0
    assert not guides.is_stale("one")
    cell = guides.code_cells(nbformat.read(tmp_path / "one.ipynb", 4))[0]
    assert [x.text for x in cell.outputs] == ["1\n"]
    monkeypatch.setattr(guides, "run", None)
    source.write_text(prose + code.replace("1", "2"))
    assert guides.main(["one", "--check"]) == 1


@pytest.mark.parametrize(("source", "outputs", "complaint"), [
    ("x", [], "no output"),
    ("def f():\n    print(1)", [], None),
    ("x = 1", [("stderr", "a warning")], "an error"),
    ("print(p)", [("stdout", "saved /tmp/tmpa1/x.png")], "a path"),
    ("print(p)", [("stdout", "<A object at 0x7f00>")], "an address"),
    ("print(p)", [("stdout", "a" * guides.LARGEST)], "KB"),
])  # fmt: skip
def test_outputs_that_must_not_be_committed(source, outputs, complaint):
    cell = nbformat.v4.new_code_cell(source)
    cell.outputs = [
        nbformat.v4.new_output("stream", name=name, text=text) for name, text in outputs
    ]
    lines = guides.complaints(nbformat.v4.new_notebook(cells=[cell]))
    assert len(lines) == (complaint is not None)
    assert all(complaint in line for line in lines)
