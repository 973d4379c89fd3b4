"""The guides run, and their notebooks are what their sources say."""

import contextlib
import io
import runpy
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted((ROOT / "guides").glob("*.py"))

pytestmark = pytest.mark.backend_free


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_notebook_is_its_source(guide):
    source = jupytext.read(guide)
    notebook = jupytext.read(guide.with_suffix(".ipynb"))
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in source.cells
    ], f"{guide.stem}: run make guides"
    # Whoever opens a guide computes its outputs.
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_runs(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(guide))
    assert printed.getvalue()


def test_there_are_guides():
    assert {path.stem for path in GUIDES} == {
        path.stem for path in (ROOT / "guides").glob("*.ipynb")
    }
    assert GUIDES
