"""The documentation of Python's standard library, as installed with the interpreter.

A document is the docstrings of a module, or a topic of `help()`, which is a page of the
language reference. Splits are drawn by package, since modules of a package share
sentences. Copyright Python Software Foundation, PSF-2.0.
"""

import ast
import functools
import importlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

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
    for file in _sources(root):
        name = file.relative_to(root)
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


def _sources(root):
    """The library's own modules; distributions link others into its folder."""
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [x for x in folders if x not in _OTHERS and not x.startswith(".")]
        paths += [Path(folder, x) for x in files if x.endswith(".py")]
    return sorted(path for path in paths if not path.is_symlink())
