"""The package needs what pyproject.toml says, and no more."""

import ast
import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

import keras_moe
from tests.forks import ROOT, run_python
from tests.test_import_walls import imported_modules

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


def _declared():
    """The distributions that pyproject.toml names, in whichever extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(x) for x in sum(extras, project["dependencies"])]


def test_everything_that_is_imported_is_declared():
    imported = {}
    for path in Path(keras_moe.__file__).parent.rglob("*.py"):
        parents = ["keras_moe", *path.relative_to(ROOT / "keras_moe").parts[:-1]]
        for _, name in imported_modules(ast.parse(path.read_text()), parents):
            imported.setdefault(name.split(".")[0], path)
    assert {"h5py", "ml_dtypes", "orbax", "markupsafe"} <= set(imported)
    declared = {_canonical(requirement.name) for requirement in _declared()}
    distributions = importlib.metadata.packages_distributions()
    # Parts of JAX and of PyTorch.
    known = {"keras_moe", "jaxlib", "jax_plugins", "triton"}
    known.update(sys.stdlib_module_names)
    for module in imported.keys() - known:
        names = map(_canonical, distributions.get(module, [module]))
        assert not declared.isdisjoint(names), f"{imported[module]} imports {module}"


def test_every_requirement_has_two_bounds():
    for requirement in _declared():
        if requirement.name == "keras-moe":
            continue
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators in ({">=", "<"}, {"=="}), requirement


# What an environment with one backend may lack: tests import it where they need it.
NOT_EVERYWHERE = {
    *("jax", "tensorflow", "torch", "flax", "keras_cv", "lm_eval", "onnx"),
    *("onnxruntime", "onnxscript", "open_clip", "orbax", "timm", "transformers"),
}


def test_tests_are_collected_with_any_one_backend():
    tests = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")]
    files = {".".join(path.with_suffix("").parts): path for path in tests}
    waiting = {x for x in files if x.split(".")[-1].startswith(("test_", "conftest"))}
    reached = set()
    while waiting:
        module = waiting.pop()
        reached.add(module)
        path = files[module]
        top = [
            statement
            for statement in ast.parse((ROOT / path).read_text()).body
            if isinstance(statement, (ast.Import, ast.ImportFrom))
        ]
        for _, name in imported_modules(ast.Module(top), list(path.parts[:-1])):
            assert name.split(".")[0] not in NOT_EVERYWHERE, f"{path} imports {name}"
            modules = {name, name.rpartition(".")[0]} & files.keys()
            waiting |= modules - reached
    assert {"tests.published", "tests.training.runs"} <= reached
