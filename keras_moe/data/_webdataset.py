"""Tar files of images and captions, as written by WebDataset and img2dataset.

Members whose names agree up to the last dot form an example: `0007.jpg` with
`0007.txt`, or with `0007.json`, which has a "caption". Beside these, `0007.mask.png` is
a further field of the example, which is not read. Headers are read once and images at
their offsets, so order, sharding and resumption work as for files.
"""

import functools
import json
import os
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from keras_moe._checks import unfit
from keras_moe._files import open_regular
from keras_moe.data import _files
from keras_moe.data._captions import CAPTION_NAMES, CaptionOptions, captioned
from keras_moe.data._examples import Examples
from keras_moe.data._packages import tf
from keras_moe.data.reading import decode_image, read_or_name

_TEXTS = (".txt", ".json")


class _Member(NamedTuple):
    """Position of a member's content in its tar file."""

    offset: int
    size: int


class _Example(NamedTuple):
    """An image and its captions, or a fault, by the name that errors use."""

    name: str
    image: _Member = _Member(0, 0)
    captions: Any = None
    fault: str | None = None


def open_captioned(pattern: str, split: str, options: CaptionOptions) -> Examples:
    """Opens a split with captions; images stay in their files."""
    files = _files.files_of_split(f"webdataset:{pattern}", "*.tar", split)
    file_of, examples = [], []
    for number, path in enumerate(files):
        about = path.stat()
        own = _read_index(path, about.st_size, about.st_mtime_ns)
        examples += own
        file_of += [number] * len(own)
    if not examples:
        expected = f"images with captions in webdataset:{pattern}"
        raise unfit(expected, f"split={split!r} without any")
    paths = tf.constant([os.fsencode(path) for path in files])
    file_of = tf.constant(file_of, "int64")
    bounds = tf.constant([example.image for example in examples], "int64")

    def location(index):
        return paths[file_of[index]]

    def read(index):
        path = location(index)
        return read_or_name(
            lambda x: tf.ensure_shape(
                tf.numpy_function(_read_at, [x["path"], x["bounds"]], tf.string), []
            ),
            {"path": path, "bounds": bounds[index]},
            "a tar file that has not changed since it was opened",
            path,
        )

    return captioned(
        [example.captions for example in examples],
        [example.name for example in examples],
        {i: x.fault for i, x in enumerate(examples) if x.fault is not None},
        read,
        decode_image,
        location,
    )


def _read_at(path: bytes, bounds: np.ndarray) -> bytes:
    offset, size = (int(bound) for bound in bounds)
    with open_regular(os.fsdecode(path), buffering=0) as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) != size:
        raise OSError(f"Expected {size} bytes at {offset}; received: {len(content)}")
    return content


# Captions, the number of pairs and batches all need the same headers.
@functools.lru_cache(maxsize=4096)
def _read_index(path: Path, size: int, changed: int) -> list[_Example]:
    """Returns the examples, one with a fault if the file is cut off."""
    members: dict[str, dict[str, list[_Member]]] = {}
    faults, last, bad = [], "", None
    with open_regular(path) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    is_plain = member.isdir() or member.isreg()
                    is_plain = is_plain and not member.issparse()
                    if _files.leads_outside(member.name) or not is_plain:
                        bad = member.name
                        break
                    end = member.offset_data + member.size
                    # A negative size would lead back to the same header.
                    if member.size < 0 or end > size:
                        raise tarfile.ReadError("unexpected end of data")
                    hidden = any(
                        map(_files.is_hidden, PurePosixPath(member.name).parts)
                    )
                    if member.isreg() and not hidden:
                        # The last dot separates example and suffix.
                        name = PurePosixPath(member.name)
                        parts = members.setdefault(name.with_suffix("").as_posix(), {})
                        same = parts.setdefault(name.suffix.lower(), [])
                        same.append(_Member(member.offset_data, member.size))
                        last = f" after {member.name}"
            # Only the zeros at the end tell that an archive is whole.
            file.seek(archive.offset)
            if bad is None and file.read(512) != bytes(512):
                raise tarfile.ReadError("no end of the archive")
            # An archive appended to another one would be lost.
            while bad is None and (chunk := file.read(1 << 20)):
                if chunk.strip(b"\0"):
                    raise tarfile.ReadError("content after its end")
        except (tarfile.TarError, OverflowError, ValueError) as error:
            # tarfile does not check the numbers in PAX headers.
            fault = f"{path} is cut off{last}, compressed or no tar file ({error})"
            faults = [_Example(str(path), fault=fault)]
        if bad is not None:
            expected = "plain files with paths inside the archive"
            raise unfit(expected, f"{bad!r} in {path}")
        examples = [
            _example(path, file, key, parts)
            for key, parts in members.items()
            if not _is_field(key, members)
        ]
    return [example for example in examples if example is not None] + faults


def _example(
    path: Path, file: Any, key: str, parts: dict[str, list[_Member]]
) -> _Example | None:
    """Returns an example; None if it has neither image nor caption."""
    images = [suffix for suffix in _files.IMAGE_SUFFIXES for _ in parts.get(suffix, ())]
    texts = [suffix for suffix in _TEXTS for _ in parts.get(suffix, ())]
    if not images and not texts:
        return None
    name = f"{path}: {key}"
    if not images:
        return _Example(name, fault=f"{name} has a caption and no image")
    if len(images) > 1 or len({*texts}) < len(texts):
        return _Example(name, fault=f"{name} has several of {images + texts}")
    captions = _captions(file, parts[texts[0]][0], texts[0]) if texts else None
    return _Example(name, parts[images[0]][0], captions)


def _captions(file: Any, member: _Member, suffix: str) -> Any:
    """Reads the captions of a member; None if there are none."""
    file.seek(member.offset)
    text = file.read(member.size).decode("utf-8-sig", errors="surrogateescape")
    if suffix == ".txt":
        return text
    try:
        entry = json.loads(text)
        return next((entry[name] for name in CAPTION_NAMES if name in entry), None)
    except (ValueError, TypeError, RecursionError):
        return None


def _is_field(key: str, members: dict[str, dict]) -> bool:
    """Whether "a.mask" is no pair, but further fields of an example "a"."""
    words = key.split(".")
    owners = (".".join(words[:i]) for i in range(1, len(words)))
    is_pair = {*members[key]} & {*_files.IMAGE_SUFFIXES} and {*members[key]} & {*_TEXTS}
    return not is_pair and any(
        {*members.get(x, ())} & {*_files.IMAGE_SUFFIXES} for x in owners
    )
