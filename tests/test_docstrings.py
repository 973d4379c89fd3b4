"""Public names are documented, and the examples in their docstrings run."""

import doctest
import importlib
import inspect
import io
from pathlib import Path

import numpy as np
import pytest

from tests.forks import ROOT

PACKAGE = ROOT / "keras_moe"
# Examples of these folders run on each backend; the others put layers together,
# and once is enough.
OF_EACH_BACKEND = ("ops",)
OTHERS = ("losses", "routers", "layers", "models", "data", "distribution")
OTHERS += ("evaluation", "analysis")
DOCUMENTED = (*OF_EACH_BACKEND, *OTHERS, "report", "training")


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _marks(path: Path) -> list:
    folder = path.relative_to(PACKAGE).parts[0]
    return [pytest.mark.every_backend] if folder in OF_EACH_BACKEND else []


# Read from the text, so that collecting imports nothing.
WITH_EXAMPLES = [
    pytest.param(_module_name(path), marks=_marks(path))
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name, tmp_path, monkeypatch):
    # An example may save a file.
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    report = io.StringIO()
    finder, assumed = doctest.DocTestFinder(), {"np": np}
    for example in finder.find(module, module.__name__, extraglobs=assumed):
        runner.run(example, out=report.write)
    assert runner.failures == 0, report.getvalue()


def complaints(name: str, thing: object) -> list[str]:
    """Returns what is missing from the docstring of a public function or class."""
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return []
    text = inspect.cleandoc(thing.__doc__ or "")
    if inspect.isclass(thing) and issubclass(thing, tuple):
        # A record: its docstring has one line per field, and nothing to call.
        return [
            f"{name}: field {field} is not described"
            for field in getattr(thing, "_fields", ())
            if field not in text
        ]
    if not text or text.startswith(f"{getattr(thing, '__name__', '')}("):
        return [f"{name}: no docstring"]
    missing = []
    signature = inspect.signature(thing)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    arguments = [p.name for p in signature.parameters.values() if p.kind not in kinds]
    if arguments and "Args:" not in text:
        missing.append(f"{name}: no Args")
    if ">>> " not in text and "Example" not in text:
        missing.append(f"{name}: no example")
    return missing


@pytest.mark.parametrize("folder", DOCUMENTED)
def test_public_names_are_documented(folder):
    module = importlib.import_module(f"keras_moe.{folder}")
    assert module.__all__, f"keras_moe.{folder} exports nothing"
    assert dir(module) == sorted(module.__all__)
    missing = []
    for name in module.__all__:
        missing += complaints(f"{folder}.{name}", getattr(module, name))
    assert missing == []
