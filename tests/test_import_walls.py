"""Imports point one way: the picture in CONTRIBUTING.md, enforced."""

import ast
import json
import sys
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

from tests.forks import run_python

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "keras_moe"

# The parts of keras_moe that a folder may import, besides its own modules.
CORE = ("ops", "losses", "routers", "layers")
ALLOWED = {
    # Access to a backend, for all.
    "_backends": (),
    "ops": (),
    "losses": ("ops",),
    "routers": ("ops", "losses"),
    "layers": ("ops", "losses", "routers"),
    "models": CORE,
    "distribution": (*CORE, "models"),
    "data": (),
    # Routing records, the input of analysis, are defined beside the routing ops.
    "evaluation": ("ops",),
    "analysis": ("ops",),
    "report": ("ops", "analysis", "evaluation"),
    "training": (*CORE, "models", "distribution", "data", "evaluation", "analysis"),
}
# Programs import everything, and nothing imports them.
ALLOWED["cli"] = (*ALLOWED["training"], "training", "report")
# The only places, below keras_moe, that may import a library.
BACKENDS = ("_backends/", "data/", "ops/kernels/")
ONLY_IN = {
    **dict.fromkeys(("jax", "jaxlib", "onnxscript", "tensorflow", "torch"), BACKENDS),
    "filelock": ("_files.py",),
    "triton": ("_triton_first.py",),
    "keras_hub": ("models/", "_compat.py"),
    "matplotlib": ("analysis/plots/", "report/"),
    # Tables; the folders are those of what is printed.
    "rich": (
        *("_tables.py", "analysis/", "cli/", "data/", "distribution/"),
        *("evaluation/", "models/", "training/"),
    ),
    "tools": (),
    "guides": (),
}
# The rooms of models, each of which may import those before it.
ROOMS = [
    "saving", "preprocessing", "conversion", "loading", "base", "backbones", "tasks",
]  # fmt: skip
# What families share; a family's file imports no other family's.
SHARED = ("base", "config", "tower", "_pairs")
# The only file that may import what Keras and KerasHub do not publish.
PRIVATE = {"keras": "_compat.py", "keras_hub": "_compat.py"}
CORE_LIBRARIES = {"keras", "numpy", PACKAGE, *sys.stdlib_module_names}


def imported_modules(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Yields the line and name (`a.b` for `from a import b`) of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            called = node.func
            name = getattr(called, "attr", getattr(called, "id", None))
            target = node.args[0]
            if name in ("import_module", "__import__", "import_extra") and isinstance(
                target, ast.Constant
            ):
                yield node.lineno, str(target.value)


def find_violations(package: Path) -> list[str]:
    """Returns one line for every import below a package that crosses a wall."""
    violations = {}
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        folder = place.parts[0] if len(place.parts) > 1 else None
        if folder is not None and folder not in ALLOWED:
            violations[f"{place}: the folder {folder} has no entry in ALLOWED"] = None
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        parents = [package.name, *place.parts[:-1]]
        for line, name in imported_modules(tree, parents):
            if reason := why_forbidden(package, place, folder, name):
                violations[f"{place}:{line}: {reason}"] = None
    return list(violations)


def why_forbidden(
    package: Path, place: Path, folder: str | None, name: str
) -> str | None:
    """Returns why a module must not import a name, or None if it may."""
    library, *rest = name.split(".")
    if rest[:1] == ["src"] and place.as_posix() != PRIVATE.get(library, place):
        return f"{library}.src may be imported by {PRIVATE[library]} only"
    if library in ONLY_IN and not place.as_posix().startswith(
        tuple(ONLY_IN[library]) or ("/",)
    ):
        allowed = " and ".join(ONLY_IN[library]) or "nothing"
        return f"{library} may be imported by {allowed} only"
    in_kernels = place.parts[:2] == ("ops", "kernels")
    if (
        folder in (*CORE, None)
        and not in_kernels
        and library not in CORE_LIBRARIES
        and library not in ONLY_IN
    ):
        return f"imports {library}; only keras and numpy are allowed here"

    if library == package.name and rest[:1] == ["cli"] and folder != "cli":
        return "nothing may import cli"
    # The root ties the other folders together and may see them all.
    if library != package.name or not rest or folder is None:
        return None
    target = rest[0]
    if (
        (package / target).is_dir()
        and target != folder
        and target not in (*ALLOWED[folder], "_backends")
    ):
        return f"{folder} must not import {target}"
    if folder == target == "models" and len(place.parts) > 2 and len(rest) > 1:
        mine, other = place.parts[1], rest[1]
        later = ROOMS[ROOMS.index(mine) + 1 :]
        if other in later:
            return f"models/{mine} must not import models/{other}"
        shared = (*SHARED, place.stem)
        if mine == other == "backbones" and not {*rest[2:3]} <= {*shared}:
            return f"a family must not import the family {rest[2]}"
    return None


def find_circles(package: Path) -> list[frozenset[str]]:
    """Returns the sets of files below a package that import each other in a circle."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        parts = [package.name, *place.with_suffix("").parts]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = place
    imported = {}
    for name, place in files.items():
        source = (package / place).read_text(encoding="utf-8")
        parents = [package.name, *place.parts[:-1]]
        targets = (target for _, target in imported_modules(ast.parse(source), parents))
        modules = {_module_of(target, files) for target in targets}
        imported[name] = modules - {None, name}
    reached = {name: _reached_from(name, imported) for name in files}
    circles = {
        frozenset(
            files[other].as_posix()
            for other in files
            if other in reached[name] and name in reached[other]
        )
        for name in files
    }
    return sorted((circle for circle in circles if circle), key=sorted)


def _module_of(name: str, modules: Container[str]) -> str | None:
    """Returns the module that a name is, or is in, if it is among those known."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def _reached_from(name: str, imported: dict[str, set[str]]) -> set[str]:
    reached, waiting = set(), [name]
    while waiting:
        new = imported[waiting.pop()] - reached
        reached |= new
        waiting.extend(new)
    return reached


def test_imports_point_one_way_and_in_no_circle():
    assert find_violations(ROOT / PACKAGE) == []
    assert find_circles(ROOT / PACKAGE) == []


@pytest.mark.parametrize(("place", "source", "expected"), [
    ("ops/a.py", "from ..layers import MoE", "ops must not import layers"),
    ("ops/deep/a.py", "from ...routers import b", "ops must not import routers"),
    ("layers/a.py", "import keras_moe.models", "layers must not import models"),
    ("layers/a.py", "def f():\n    import torch", "torch may be imported by"),
    ("ops/a.py", "__import__('torch')", "torch may be imported by"),
    ("ops/a.py", "importlib.import_module('jax')", "jax may be imported by"),
    ("models/a.py", "import keras_hub.src.a", "keras_hub.src may be imported by"),
    ("layers/a.py", "from keras import src", "keras.src may be imported by _comp"),
    ("losses/a.py", "import scipy", "imports scipy; only keras and numpy"),
    ("training/a.py", "import guides", "guides may be imported by nothing"),
    ("models/base/a.py", "from .. import tasks", "models/base must not import mod"),
    ("models/loading/a.py", "import keras_moe.models.base",
     "models/loading must not import models/base"),
    ("models/backbones/clip.py", "from keras_moe.models.backbones.limoe import A",
     "a family must not import the family limoe"),
    ("unknown/a.py", "import keras", "the folder unknown has no entry"),
    ("training/a.py", "from ..cli import main", "nothing may import cli"),
])  # fmt: skip
def test_the_checker_sees_a_planted_violation(tmp_path, place, source, expected):
    (violation,) = find_violations(_plant(tmp_path, {place: source}))
    assert expected in violation
    assert violation.startswith(place)


def find_unmarked(package: Path) -> list[str]:
    """Returns modules without an underscore whose names no folder above exports."""
    trees = {
        path.relative_to(package): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }
    exported = {
        place.parent: {
            constant.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and "__all__" in map(ast.unparse, node.targets)
            for constant in ast.walk(node.value)
            if isinstance(constant, ast.Constant)
        }
        for place, tree in trees.items()
        if place.name == "__init__.py"
    }
    # A command's file has `add_arguments` and `run`; `main` is the program itself.
    exported[Path("cli")] = {"add_arguments", "main"}
    return [
        place.as_posix()
        for place, tree in trees.items()
        if not any(part.startswith("_") for part in place.parts)
        and exported.keys().isdisjoint({place.parent / place.stem})
        and not _defined(tree) & set().union(*map(exported.get, place.parents[:-1]))
    ]


def _defined(tree: ast.Module) -> set[str]:
    """Returns the names that a module's statements define."""
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = getattr(node, "targets", None) or [node.target]
            names |= {ast.unparse(target) for target in targets}
    return names


def test_what_exports_nothing_has_an_underscore(tmp_path):
    assert find_unmarked(ROOT / PACKAGE) == []
    sources = {
        "ops/__init__.py": "__all__ = ['topk']",
        "ops/topk.py": "def topk(): pass",
        "ops/sorting.py": "def topk_sorted(): pass",
        "ops/_rows.py": "",
    }
    assert find_unmarked(_plant(tmp_path, sources)) == ["ops/sorting.py"]


def _plant(tmp_path: Path, sources: dict[str, str]) -> Path:
    package = tmp_path / PACKAGE
    for folder in (*ALLOWED, *(f"models/{room}" for room in ROOMS)):
        (package / folder).mkdir(parents=True)
    for place, source in sources.items():
        path = package / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return package


IMPORT_PROBE = """
import json, sys, time
import keras

of_keras, before = time.process_time(), set(sys.modules)
import keras_moe
share = time.process_time() / of_keras - 1
import keras_moe.layers, keras_moe.routers, keras_moe.ops, keras_moe.losses
import keras_moe.data, keras_moe.evaluation
new = sorted({name.split(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"share": share, "new": new}))
"""


def test_the_core_imports_quickly_and_no_heavy_library():
    heavy = {"jax", "tensorflow", "torch", "keras_hub", "matplotlib"}
    heavy |= {"tensorflow_datasets", "keras_cv"}
    shares = []
    # Each of the two has what would be heavy for the other.
    for backend in ("jax", "torch"):
        done = run_python("-c", IMPORT_PROBE, KERAS_BACKEND=backend)
        assert done.returncode == 0, done.stderr
        actual = json.loads(done.stdout.splitlines()[-1])
        assert heavy.isdisjoint(actual["new"]), backend
        shares.append(actual["share"])
    # Time of the processor beside that of Keras, which changes neither with other work
    # nor with the machine.
    assert max(shares) < 0.08
