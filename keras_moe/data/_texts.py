"""Folders and files of texts.

PATH/**/name.txt            a document per file; also .md, .rst and .py
PATH/**/name.jsonl          {"text": "..."}: a document per line
PATH/split/...              the same with splits, if PATH has a folder "train"

Without such folders, a tenth of the documents, drawn by their contents, is the split
"validation", and another tenth "test". PATH may also be a file or a glob.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_moe._checks import check_one_of
from keras_moe._files import read_text
from keras_moe.data._examples import RecordExamples, RecordFile
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


def open_texts(path: str, split: str, data_dir: str | None = None) -> Iterator[str]:
    """Yields the documents of a split, in the order of their paths."""
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

    examples = RecordExamples(files, read, decode=None)
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
        raise ValueError(
            f"Expected texts ({', '.join(_PLAIN)}, {_LINES}) in {place}; "
            f"received: {len(files)} files without any"
        )
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
        raise ValueError(
            f"Expected text in UTF-8; received: {file}: {error}"
        ) from error


def _lines(file):
    for number, line in enumerate(_read(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            text.encode()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f'Expected an object with "text" in each line of {file}; received: '
                f"line {number}: {line[:80]!r}"
            ) from error
        yield text
