"""Folders and files of texts, and the documentation of Python's standard library.

PATH/**/name.txt            a document per file; also .md, .rst and .py
PATH/**/name.jsonl          {"text": "..."}: a document per line; also .jsonl.gz
PATH/split/...              the same with splits, if PATH has a folder "train"

Without such folders, a tenth of the documents, drawn by their contents, is the split
"validation", and another tenth "test". PATH may also be a file or a glob.

A document of Python's is the docstrings of a module, or a topic of `help()`, which is a
page of the language reference. Splits are drawn by package, since modules of a package
share sentences. Copyright Python Software Foundation, PSF-2.0.
"""

import ast
import functools
import gzip
import importlib
import json
import os
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_moe._checks import check_one_of, unfit
from keras_moe._files import open_regular, read_text
from keras_moe.data import _files
from keras_moe.data._examples import RecordExamples, RecordFile, as_stored
from keras_moe.data._packages import tf
from keras_moe.data.reading import read_or_name

_PLAIN = (".md", ".py", ".rst", ".txt")
_LINES = (".jsonl", ".jsonl.gz")
# Folders that are no documentation: tests, and what others installed.
_OTHERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def open_texts(path: str, split: str, data_dir: str | None = None) -> Iterator[str]:
    """Yields the documents of a split, in the order of their paths."""
    if not path:
        yield from of_split(python_documents(), split)
        return
    root = Path(path)
    if root.is_dir() and "train" in _files.folders_in(root):
        check_one_of("split", split, _files.folders_in(root))
        yield from _documents(_files.files_below(root / split, root), root / split)
        return
    files = _files.files_below(root, root) if root.is_dir() else _files.globbed(path)
    yield from of_split(((text, text) for text in _documents(files, path)), split)


def of_split(documents: Iterable[tuple[str, str]], split: str) -> Iterator[str]:
    """Yields the texts among (name, text) whose name is drawn for a split."""
    check_one_of("split", split, _files.SPLITS)
    for name, text in documents:
        if split in ("all", _files.held_out_split(name.encode())):
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
    found, empty, others = False, [], []
    for file in files:
        name = file.name.lower()
        if name.endswith((*_PLAIN, *_LINES)):
            texts = _lines(file) if name.endswith(_LINES) else [_read(file)]
            for number, text in enumerate(texts, start=1):
                # Such as `__init__.py`: they have no tokens.
                if text.strip():
                    found = True
                    yield text
                else:
                    empty.append(f"{file}, document {number}")
        else:
            others.append(file)
    kinds = ", ".join((*_PLAIN, *_LINES))
    if not found:
        raise unfit(f"texts ({kinds}) in {place}", f"{len(files)} files without any")
    if empty:
        warnings.warn(
            f"{len(empty)} documents in {place} are empty, such as {empty[0]}",
            stacklevel=2,
        )
    if others:
        warnings.warn(
            f"{len(others)} files in {place} are not among its texts, such as "
            f"{others[0]}: texts are {kinds}",
            stacklevel=2,
        )


def _read(file):
    try:
        # The mark that some editors put first is no text.
        return read_text(file, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise unfit("text in UTF-8", f"{file}, line {line}: {error}") from error


def _lines(file):
    """Yields the texts of a file, of which a line at a time is in memory."""
    number, line = 0, b""
    with open_regular(file) as stored:
        is_packed = file.suffix.lower() == ".gz"
        lines = gzip.GzipFile(fileobj=stored) if is_packed else stored
        try:
            for number, line in enumerate(lines, start=1):
                # With the mark that some editors put first.
                decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if decoded.strip():
                    text = json.loads(decoded)["text"]
                    text.encode()
                    yield text
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            expected = "a whole file, compressed by gzip"
            raise unfit(expected, f"{file}, behind line {number}: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            expected = f'an object with "text" in UTF-8 in each line of {file}'
            raise unfit(expected, f"line {number}: {line[:80]!r}") from error


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
