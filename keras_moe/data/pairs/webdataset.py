"""Tar files of images and captions, as WebDataset and img2dataset write them.

Members that are named alike up to the first dot of the file's name are one example:
`0007.jpg` with `0007.txt`, or with `0007.json`, which has a "caption". The headers are
read once, and images at their offsets: order, shards and resumption are those of files.
"""

import glob
import json
import os
import re
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from keras_moe.data.folders import image_suffixes
from keras_moe.data.pairs.source import PairSource, indexed_pairs
from keras_moe.data.reading import decode_image, read_or_name

_TEXTS = (".txt", ".json")
_CAPTION = ("captions", "caption", "text")


class _Member(NamedTuple):
    """The place of a member's content in its tar file."""

    offset: int
    size: int


def read_pairs(pattern: str, split: str) -> PairSource:
    """The pairs of a split; images stay in their files until they are decoded.

    An image without a caption, a caption without an image, and a file that is cut off
    are faults.

    Raises:
        ValueError: if there are no such files, one is no tar file or is compressed, or
            a member's path leads out of the archive.
    """
    import tensorflow as tf

    files = _split_files(pattern, split)
    captions, places, faults = [], [], {}
    file_of, members = [], []
    for number, path in enumerate(files):
        examples, cut_off = _read_index(path)
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

    return indexed_pairs(
        f"webdataset:{pattern}",
        captions,
        read,
        decode_image,
        encoded_channels=3,
        place=place,
        places=places,
        faults=faults,
    )


def _read_at(path: bytes, bounds: np.ndarray) -> bytes:
    """The bytes of a member."""
    offset, size = (int(bound) for bound in bounds)
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) != size:
        raise OSError(f"Expected {size} bytes at {offset}; received: {len(content)}")
    return content


def _split_files(pattern: str, split: str) -> list[Path]:
    """The tar files whose names have the split as a word, or all if none has words."""
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "*.tar")
    paths = [Path(path) for path in sorted(glob.glob(pattern))]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise ValueError(
            "Expected a folder with tar files, or a glob that matches some; "
            f"received: source='webdataset:{pattern}'"
        )
    chosen = [path for path in paths if split in re.split(r"[-_.]", path.name)]
    # The files of img2dataset are such as "00012.tar".
    if not chosen and not any(re.search("[A-Za-z]", path.stem) for path in paths):
        chosen = paths
    if not chosen:
        raise ValueError(
            f"Expected files of webdataset:{pattern} with the split as a word of their "
            f"names, or numbers alone; received: split={split!r}, "
            f"{[path.name for path in paths[:3]]}"
        )
    return chosen


def _read_index(
    path: Path,
) -> tuple[dict[str, tuple[_Member | None, Any, str | None]], str | None]:
    """The image, the captions and the fault of each example; and that of the file."""
    members: dict[str, dict[str, _Member]] = {}
    cut_off = None
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                last, at = "", 0
                while (member := archive.next()) is not None:
                    _check_member(path, member)
                    if member.offset_data + member.size > end:
                        raise tarfile.ReadError("unexpected end of data")
                    last, at = member.name, archive.offset
                    # The list of members would hold all headers of a large file.
                    archive.members = []
                    if member.isdir():
                        continue
                    key, suffix = _key_of(member.name)
                    place = _Member(member.offset_data, member.size)
                    members.setdefault(key, {})[suffix] = place
                # The end of an archive is 1,024 zeros.
                file.seek(at)
                if file.read(512) != bytes(512):
                    raise tarfile.ReadError("no end of the archive")
        except tarfile.TarError as error:
            if not members:
                raise ValueError(
                    "Expected a tar file, not compressed, with whole members; "
                    f"received: {path} ({error})"
                ) from error
            cut_off = f"{path} is cut off behind {last} ({error})"
        examples = {}
        for key, parts in members.items():
            image = next((parts[x] for x in image_suffixes() if x in parts), None)
            text = next((x for x in _TEXTS if x in parts), None)
            if image is None and text is None:
                continue
            captions, fault = None, None
            if text is not None:
                captions, fault = _captions(file, parts[text], text)
            if image is None:
                fault = "has a caption and no image"
            examples[key] = image, captions, fault
    return examples, cut_off


def _captions(file: Any, member: _Member, suffix: str) -> tuple[Any, str | None]:
    """The captions in a member, or a fault."""
    file.seek(member.offset)
    content = file.read(member.size)
    if suffix == ".txt":
        return content.decode(errors="surrogateescape").strip(), None
    try:
        entry = json.loads(content.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        return None, "has no JSON object with a caption"
    return next((entry[name] for name in _CAPTION if name in entry), None), None


def _key_of(name: str) -> tuple[str, str]:
    """The name of an example and the suffix of its member, from the first dot on."""
    folder, _, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    return f"{folder}/{stem}" if folder else stem, (dot + suffix).lower()


def _check_member(path: Path, member: tarfile.TarInfo) -> None:
    """Raises ValueError for a member that is no plain file inside the archive."""
    name = PurePosixPath(member.name.replace("\\", "/"))
    outside = name.is_absolute() or ".." in name.parts
    if outside or not (member.isdir() or member.isreg()) or member.issparse():
        raise ValueError(
            "Expected plain files with paths inside the archive; received: "
            f"{member.name!r} in {path}"
        )
