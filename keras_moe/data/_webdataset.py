"""Tar files of images and captions, as written by WebDataset and img2dataset.

Members whose names agree up to the first dot form an example: `0007.jpg` with
`0007.txt`, or with `0007.json`, which has a "caption". Headers are read once and
images at their offsets, so order, sharding and resumption work as for files.
"""

import functools
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_moe.data._captions import CAPTION_NAMES, CaptionOptions, captioned
from keras_moe.data._examples import IndexedExamples
from keras_moe.data._files import (
    files_of_split,
    image_suffixes,
    leads_outside,
)
from keras_moe.data.reading import decode_image, read_or_name

_TEXTS = (".txt", ".json")
# gzip, bzip2, xz and Zstandard.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")


class _Member(NamedTuple):
    """The location of a member's content in its tar file."""

    offset: int
    size: int


def open_captioned(
    pattern: str, split: str, options: CaptionOptions
) -> IndexedExamples:
    """Opens a split with captions; images stay in their files.

    Faults are images without captions, captions without images, and truncated files.
    """
    import tensorflow as tf

    files = files_of_split(f"webdataset:{pattern}", "*.tar", split)
    captions, places, faults = [], [], {}
    file_of, members = [], []
    for number, path in enumerate(files):
        about = path.stat()
        examples, cut_off = _read_index(path, about.st_size, about.st_mtime_ns)
        for key, parts in examples.items():
            image, several, fault = parts
            if fault is not None:
                faults[len(places)] = f"{path}: {key} {fault}"
            captions.append(several)
            places.append(f"{path}: {key}")
            file_of.append(number)
            members.append(image or _Member(0, 0))
        if cut_off is not None:
            faults[len(places)] = cut_off
            captions.append(None)
            places.append(str(path))
            file_of.append(number)
            members.append(_Member(0, 0))
    if not places:
        raise ValueError(
            f"Expected images with captions in webdataset:{pattern}; "
            f"received: split={split!r} without any"
        )
    paths = tf.constant([os.fsencode(path) for path in files])
    file_of = tf.constant(file_of, "int64")
    bounds = tf.constant(members, "int64")

    def place(index):
        return paths[file_of[index]]

    def read(index):
        member = {"path": place(index), "bounds": bounds[index]}
        return read_or_name(
            lambda x: tf.ensure_shape(
                tf.numpy_function(_read_at, [x["path"], x["bounds"]], tf.string), []
            ),
            member,
            "a tar file that has not changed since it was opened",
            place(index),
        )

    return captioned(
        captions, read, decode_image, place=place, places=places, faults=faults
    )


def _read_at(path: bytes, bounds: np.ndarray) -> bytes:
    """Reads the bytes of a member."""
    offset, size = (int(bound) for bound in bounds)
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) != size:
        raise OSError(f"Expected {size} bytes at {offset}; received: {len(content)}")
    return content


# Captions, the number of pairs and batches all need the same headers.
@functools.lru_cache(maxsize=4096)
def _read_index(
    path: Path, size: int, changed: int
) -> tuple[dict[str, tuple[_Member | None, Any, str | None]], str | None]:
    """Returns the image, captions and fault of each example, and the file's fault."""
    members: dict[str, dict[str, list[_Member]]] = {}
    cut_off, last = None, ""
    with path.open("rb") as file:
        try:
            for member in _plain_members(path, file, size):
                last = f" after {member.name}"
                key, suffix = _key_of(member.name)
                places = members.setdefault(key, {}).setdefault(suffix, [])
                places.append(_Member(member.offset_data, member.size))
        except tarfile.TarError as error:
            if not last and not _begins_as_tar(file):
                raise ValueError(
                    "Expected a tar file, not compressed, with whole members; "
                    f"received: {path} ({error})"
                ) from error
            cut_off = f"{path} is cut off{last} ({error})"
        read = {key: _example(file, parts) for key, parts in members.items()}
    return {key: parts for key, parts in read.items() if parts is not None}, cut_off


def _plain_members(path: Path, file: Any, end: int) -> Iterator[tarfile.TarInfo]:
    """Yields the files of an archive; raises an error of tarfile if it is truncated."""
    with _read_header(lambda: tarfile.open(fileobj=file, mode="r:")) as archive:
        at = 0
        while (member := _read_header(archive.next)) is not None:
            _check_member(path, member)
            if member.size < 0 or member.offset_data + member.size > end:
                raise tarfile.ReadError("unexpected end of data")
            at = archive.offset
            # The list of members would keep all headers of a large file.
            archive.members = []
            if not member.isdir():
                yield member
    # An archive ends with at least 1,024 zeros.
    file.seek(at)
    if file.read(512) != bytes(512):
        raise tarfile.ReadError("no end of the archive")
    while chunk := file.read(1 << 20):
        if chunk.count(0) != len(chunk):
            raise tarfile.ReadError("content after its end")


def _read_header(read: Callable[[], Any]) -> Any:
    """Calls `read` and turns all errors of damaged headers into errors of tarfile."""
    try:
        return read()
    except (OverflowError, ValueError) as error:
        # tarfile does not check the numbers of sparse files in PAX headers.
        raise tarfile.InvalidHeaderError(f"a damaged header, {error}") from error


def _begins_as_tar(file: Any) -> bool:
    """Whether a file may be the beginning of an archive, such as an empty file."""
    file.seek(0)
    header = file.read(512)
    try:
        tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.InvalidHeaderError:
        return False
    except tarfile.HeaderError:
        return not header.startswith(_COMPRESSED)
    return True


def _example(
    file: Any, parts: dict[str, list[_Member]]
) -> tuple[_Member | None, Any, str | None] | None:
    """Returns the image, captions and fault of an example; None if it has neither."""
    images = [suffix for suffix in image_suffixes() if suffix in parts]
    text = next((suffix for suffix in _TEXTS if suffix in parts), None)
    if not images and text is None:
        return None
    captions, fault = None, None
    if text is not None:
        captions, fault = _captions(file, parts[text][0], text)
    if not images:
        return None, captions, "has a caption and no image"
    if len(images) > 1:
        fault = f"has several images: {', '.join(images)}"
    for suffix in (*images, *_TEXTS):
        if len(parts.get(suffix, ())) > 1:
            fault = f"has several members {suffix}"
    return parts[images[0]][0], captions, fault


def _captions(file: Any, member: _Member, suffix: str) -> tuple[Any, str | None]:
    """Reads the captions of a member, or a fault."""
    file.seek(member.offset)
    text = file.read(member.size).decode("utf-8-sig", errors="surrogateescape")
    if suffix == ".txt":
        return text.strip(), None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        return None, "has no JSON object with a caption"
    return next((entry[name] for name in CAPTION_NAMES if name in entry), None), None


def _key_of(name: str) -> tuple[str, str]:
    """Splits a member's name at the first dot into example and suffix."""
    folder, _, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    return f"{folder}/{stem}" if folder else stem, (dot + suffix).lower()


def _check_member(path: Path, member: tarfile.TarInfo) -> None:
    """Rejects members that are not plain files inside the archive."""
    is_plain = (member.isdir() or member.isreg()) and not member.issparse()
    if leads_outside(member.name) or not is_plain:
        raise ValueError(
            "Expected plain files with paths inside the archive; received: "
            f"{member.name!r} in {path}"
        )
