"""Folders and files of texts, and the documentation of Python's standard library.

PATH/**/name.txt            a document per file; also .md, .rst and .py
PATH/**/name.jsonl          {"text": "..."}: a document per line
PATH/split/...              the same with splits, if PATH has a folder "train"

Without such folders, a tenth of the documents, drawn by their contents, is the split
"validation", and another tenth "test". PATH may also be a file or a glob.

A document of Python's is the docstrings of a module, or a topic of `help()`, which is a
page of the language reference. Splits are drawn by package, since modules of a package
share sentences. Copyright Python Software Foundation, PSF-2.0.
"""

import ast
import functools
import importlib
import json
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_moe._checks import check_one_of, unfit
from keras_moe._files import read_text
from keras_moe.data._examples import RecordExamples, RecordFile, as_stored
from keras_moe.data._files import (
    SPLITS,
    files_below,
    folders_in,
    globbed,
    held_out_split,
)
from keras_moe.data._packages import tf
from keras_moe.data.reading import read_or_name

_PLAIN = (".md", ".py", ".rst", ".txt")
_LINES = ".jsonl"
# Folders that are no documentation: tests, and what others installed.
_OTHERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def open_texts(path: str, split: str, data_dir: str | None = None) -> Iterator[str]:
    """Yields the documents of a split, in the order of their paths."""
    if not path:
        yield from of_split(python_documents(), split)
        return
    root = Path(path)
    if root.is_dir() and "train" in folders_in(root):
        check_one_of("split", split, folders_in(root))
        yield from _documents(files_below(root / split, root), root / split)
        return
    files = files_below(root, root) if root.is_dir() else globbed(path)
    yield from of_split(((text, text) for text in _documents(files, path)), split)


def of_split(documents: Iterable[tuple[str, str]], split: str) -> Iterator[str]:
    """Yields the texts among (name, text) whose name is drawn for a split."""
    check_one_of("split", split, SPLITS)
    for name, text in documents:
        if split in ("all", held_out_split(name.encode())):
            yield text


def record_texts(
    files: Sequence[RecordFile], parse: Callable[[Any], Any]
) -> Iterator[str]:
    """Yields the documents in record files; `parse` maps a record to its text."""

    def text(record):
        # Raises an error for texts that are not UTF-8.
        return tf.strings.unicode_transcode(parse(record), "UTF-8", "UTF-8", "strict")

    def read(record, location):
        return read_or_name(text, record, "an example with text in UTF-8", location)

    examples = RecordExamples(files, read, as_stored)
    for (texts,) in examples.scan(lambda _, item: (examples.read(item),)):
        yield from (x.decode() for x in texts if x.strip())


def _documents(files, place):
    found, others = False, []
    for file in files:
        suffix = file.suffix.lower()
        if suffix not in (*_PLAIN, _LINES):
            others.append(file)
        else:
            texts = _lines(file) if suffix == _LINES else [_read(file)]
            for text in texts:
                # Empty documents, such as `__init__.py`, have no tokens.
                if text.strip():
                    found = True
                    yield text
    if not found:
        expected = f"texts ({', '.join(_PLAIN)}, {_LINES}) in {place}"
        raise unfit(expected, f"{len(files)} files without any")
    if others:
        warnings.warn(
            f"{len(others)} files in {place} are not among its texts, such as "
            f"{others[0]}: texts are {', '.join(_PLAIN)} and {_LINES}",
            stacklevel=2,
        )


def _read(file):
    try:
        # The mark that some editors put first is no text.
        return read_text(file, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise unfit("text in UTF-8", f"{file}: {error}") from error


def _lines(file):
    for number, line in enumerate(_read(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            text.encode()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            expected = f'an object with "text" in each line of {file}'
            raise unfit(expected, f"line {number}: {line[:80]!r}") from error
        yield text


@functools.cache
def python_documents():
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
