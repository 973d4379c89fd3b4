"""The documentation of Python's standard library, as installed with the interpreter.

A document is the docstrings of a module, or a topic of `help()`, which is a page of the
language reference. Splits are drawn by package, since modules of a package share
sentences. Copyright Python Software Foundation, PSF-2.0.
"""

import ast
import functools
import importlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from keras_moe.data._files import files_below
from keras_moe.data._texts import of_split

# Folders that are no documentation: tests, and what others installed.
_OTHERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def open_texts(name: str, split: str, data_dir: str | None = None) -> Iterator[str]:
    """Yields the documents of a split; the modules of a package share one."""
    yield from of_split(_documents(), split)


@functools.cache
def _documents():
    """Names of packages and texts, which are kept: parsing takes seconds."""
    documents = []
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in files_below(root, root):
        name = file.relative_to(root)
        if file.suffix != ".py" or _OTHERS.intersection(name.parts):
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue
        nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
        texts = [text for text in map(ast.get_docstring, nodes) if text]
        if texts:
            documents.append(
                (f"lib/{name.with_suffix('').parts[0]}", "\n\n".join(texts))
            )
    topics = importlib.import_module("pydoc_data.topics").topics
    # Topics repeat parts of each other.
    return documents + [("lib/pydoc_data", topics[x]) for x in sorted(topics)]
