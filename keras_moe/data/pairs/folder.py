"""Images in a folder, with their captions in one file of it.

PATH/split/captions.csv     a header with the columns "image" and "caption"
PATH/split/captions.jsonl   {"image": "a.png", "caption": "a cat"}, or "captions": [...]

Paths of images are relative to PATH/split. Further lines of an image are further
captions. The names of Hugging Face's image folders, "file_name" and "text", are read,
too.
"""

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from keras_moe.data.folders import (
    files_below,
    folders_in,
    image_suffixes,
    is_file_within,
    leads_outside,
)
from keras_moe.data.pairs.captions import CAPTION_NAMES
from keras_moe.data.pairs.source import PairSource, indexed_pairs
from keras_moe.data.reading import decode_image, read_or_name

FILES = ("captions.csv", "captions.jsonl")
_IMAGE = ("image", "file_name")


def has_captions(path: str, split: str) -> bool:
    """Whether a split of a folder has a file of captions."""
    folder = Path(path)
    if not folder.is_dir() or split not in folders_in(folder):
        return False
    return any((folder / split / name).is_file() for name in FILES)


def check_split(path: str, split: str) -> None:
    """Raises ValueError for a split without captions or classes beside
    captioned ones.
    """
    splits = sorted(x.name for x in Path(path).glob("*") if has_captions(path, x.name))
    has_classes = any(x.is_dir() for x in (Path(path) / split).glob("*"))
    if splits and split not in splits and not has_classes:
        raise ValueError(
            f"Expected a split of folder:{path} with captions, one of {splits}; "
            f"received: split={split!r}"
        )


def read_pairs(path: str, split: str) -> PairSource:
    """The pairs of a split; images stay in their files until they are decoded.

    Images that are named and not there, or there and not named, are faults, and so are
    lines that cannot be read.
    """
    import tensorflow as tf

    folder = Path(path) / split
    names = [name for name in FILES if (folder / name).is_file()]
    if len(names) > 1:
        raise ValueError(
            f"Expected one file of captions in {folder}; received: {names}"
        )
    file = folder / names[0]
    text = file.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    lines = _csv_lines if file.suffix == ".csv" else _json_lines
    captions: dict[str, list] = {}
    faults: dict[str, str] = {}
    for number, image, several, fault in lines(file, text):
        place = f"{file}, line {number}"
        if not isinstance(image, str) or not image or "\0" in image:
            faults[place] = f"{place} names no image"
            captions[place] = []
        elif leads_outside(image):
            raise ValueError(
                f"Expected paths of images relative to the folder of {file}; "
                f"received: {image!r} in line {number}"
            )
        else:
            # "./a.png" is "a.png".
            image = PurePosixPath(image).as_posix()
            several = [several] if isinstance(several, (str, type(None))) else several
            captions.setdefault(image, []).extend(several)
            if fault is not None:
                faults[image] = f"{place} {fault}"
    there = [
        x.relative_to(folder).as_posix()
        for x in files_below(folder, folder.parent)
        if x.suffix.lower() in image_suffixes()
    ]
    for image in captions:
        if image not in faults and not is_file_within(folder / image, folder.parent):
            faults[image] = f"{folder / image} is not there"
    for image in sorted({*there} - {*captions}):
        captions[image] = []
    if not captions:
        raise ValueError(f"Expected images with captions in {file}; received: none")
    images = list(captions)
    places = [str(folder / image) for image in images]
    paths = tf.constant([os.fsencode(place) for place in places])
    return indexed_pairs(
        f"folder:{path}",
        [captions[image] or None for image in images],
        lambda index: read_or_name(
            tf.io.read_file, paths[index], "a file that can be read", paths[index]
        ),
        decode_image,
        encoded_channels=3,
        place=lambda index: paths[index],
        places=places,
        faults={i: faults[image] for i, image in enumerate(images) if image in faults},
    )


def _csv_lines(file: Path, text: str) -> Iterator[tuple[int, Any, Any, str | None]]:
    """The line, the image, the caption and the fault of each row."""
    # Otherwise a quote that is not closed would take the rest of the file.
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = list(rows.fieldnames or ())
        image, caption = (
            next((name for name in names if name in columns), None)
            for names in (_IMAGE, CAPTION_NAMES)
        )
        if columns.count(image) != 1 or columns.count(caption) != 1:
            raise ValueError(
                f'Expected one column "image" and one "caption" in {file}; '
                f"received: {columns}"
            )
        for row in rows:
            fault = None
            if None in row:
                fault = "has more fields than columns: a caption's comma needs quotes"
            yield rows.line_num, row[image], row[caption], fault
    except csv.Error as error:
        raise ValueError(
            f"Expected rows of a CSV file; received: {file}, line {rows.line_num} "
            f"({error})"
        ) from error


def _json_lines(file: Path, text: str) -> Iterator[tuple[int, Any, Any, None]]:
    """The line, the image and the caption or captions of each object, and no fault."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = {}
        entry = entry if isinstance(entry, dict) else {}
        image, caption = (
            next((entry[name] for name in names if name in entry), None)
            for names in (_IMAGE, CAPTION_NAMES)
        )
        if not isinstance(caption, (str, list, type(None))):
            caption = [caption]
        yield number, image, caption, None
