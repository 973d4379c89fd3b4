"""The programs of an installed wheel, far from the repository."""

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A virtual environment with the wheel, and this one's libraries but no other."""
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder))
    assert Path(wheel).stat().st_size < 10e6
    venv.create(folder / "venv")
    scripts = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    # This environment's pip: to install another one takes longer than the tests.
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python"]
    install = [*pip, "install", "--no-index", "--no-deps", "--no-compile", wheel]
    subprocess.run(install, check=True, capture_output=True)
    (purelib,) = (folder / "venv").rglob("site-packages")
    # A path file of a path file is not read: an editable keras_moe stays away.
    libraries = {str(Path(module.__file__).parents[1]) for module in (keras, pytest)}
    (purelib / "libraries.pth").write_text("\n".join(sorted(libraries)))
    return scripts


@pytest.fixture
def run(installed, tmp_path):
    def run(program, *arguments):
        # JAX, whose import takes half as long as PyTorch's.
        environment = {**os.environ, "COLUMNS": "160", "KERAS_BACKEND": "jax"}
        environment.pop("PYTHONPATH", None)
        command = [installed / program, *map(str, arguments)]
        options = {"capture_output": True, "text": True, "cwd": tmp_path}
        return subprocess.run(command, env=environment, **options)

    return run


PROGRAM = """
import importlib, sys
import keras_moe

for name in sys.argv[1:]:
    importlib.import_module(name)
print(keras_moe.__file__)
from keras_moe import models

print(models.from_preset("vmoe_digits").count_params())
model = models.from_preset("limoe_emoji", load_weights=False)
assert type(model).__name__ == "ContrastiveModel"
models.from_preset("limoe_emoji")
"""


def contents(folder):
    """The sizes of the files below a folder, by path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.stat().st_size for path in files}


def test_every_module_preset_and_recipe_is_there(run, installed, tmp_path):
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "keras_moe" / "cli").rglob("*.py"))
        # This is a program.
        if path.name != "__main__.py"
    ]
    program = tmp_path / "everything.py"
    program.write_text(PROGRAM)
    done = run("python", program, *modules)
    place, parameters = done.stdout.splitlines()
    assert Path(place).is_relative_to(installed.parent)
    for folder in ("presets", "recipes"):
        packed, own = contents(Path(place).with_name(folder)), contents(ROOT / folder)
        assert packed == own
        assert own
    assert int(parameters) > 0
    # Weights under another licence than the library's have their own package.
    assert not (ROOT / "presets" / "limoe_emoji").exists()
    assert "Expected the package keras-moe-emoji" in done.stderr


def test_packages_to_publish_are_whole(tmp_path):
    from hatchling.builders.sdist import SdistBuilder

    def packed(folder):
        (path,) = SdistBuilder(str(folder)).build(directory=str(tmp_path))
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path, filter="data")
        return Path(path.removesuffix(".tar.gz"))

    folder = packed(ROOT)
    readmes = [path for path in folder.rglob("README.md") if "presets" not in str(path)]
    assert readmes == [folder / "README.md", folder / "tests/data/golden/README.md"]
    assert (folder / "tests" / "cli" / Path(__file__).name).is_file()
    # A long description is shown far from the files that the README links to.
    links = re.findall(r"\]\(([^)]+)\)", (folder / "PKG-INFO").read_text("utf-8"))
    assert len(links) > 20
    assert all(link.startswith(("https://", "#")) for link in links)
    assert any(link.endswith("/raw/main/docs/images/experts.png") for link in links)
    folder = packed(ROOT / "packages" / "keras-moe-emoji")
    assert "ShareAlike 4.0 International" in (folder / "LICENSE").read_text("utf-8")
    assert "Requires-Dist: keras-moe<" in (folder / "PKG-INFO").read_text("utf-8")


def test_a_program_works(run):
    done = run("keras-moe", "describe", "vmoe_digits", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["parameters"] > 0
