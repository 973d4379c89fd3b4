"""The package needs what pyproject.toml says, and no more."""

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement

import keras_moe
from tests.forks import run_python

# Refuses the libraries that are its arguments, and imports every folder of keras_moe.
PROGRAM = """
import importlib, pathlib, sys

class Refusal:
    blocked = set(sys.argv[1].split(","))

    def find_spec(self, name, path=None, target=None):
        if name in self.blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusal())
import keras_moe
for path in sorted(pathlib.Path(keras_moe.__file__).parent.glob("*/__init__.py")):
    importlib.import_module(f"keras_moe.{path.parent.name}")
    print(path.parent.name)
"""


def _canonical(name):
    return name.lower().replace("_", "-")


def _required(name, extras, seen):
    """Adds the distributions that a distribution needs, and what these need."""
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": x}) for x in ("", *extras)):
            continue
        entry = (_canonical(requirement.name), frozenset(requirement.extras))
        if entry not in seen:
            seen.add(entry)
            try:
                _required(requirement.name, requirement.extras, seen)
            except importlib.metadata.PackageNotFoundError:
                continue


def test_importing_needs_no_extra_but_a_backend():
    required = set()
    _required("keras-moe", {"jax"}, required)
    names = {name for name, _ in required} | {"keras-moe"}
    assert {"keras", "keras-hub", "jaxlib"} <= names
    modules = importlib.metadata.packages_distributions()
    blocked = [
        module
        for module, distributions in modules.items()
        if names.isdisjoint(map(_canonical, distributions))
    ]
    assert {"torch", "matplotlib", "jinja2", "markupsafe", "sklearn"} <= set(blocked)
    done = run_python("-c", PROGRAM, ",".join(blocked), KERAS_BACKEND="jax")
    assert done.returncode == 0, done.stderr
    folders = Path(keras_moe.__file__).parent.glob("*/__init__.py")
    assert done.stdout.split() == sorted(path.parent.name for path in folders)
