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
from pathlib import Path
from typing import Any

from keras_moe.data.folders import files_below, image_suffixes
from keras_moe.data.pairs.source import PairSource, indexed_pairs
from keras_moe.data.reading import decode_image, read_or_name

FILES = ("captions.csv", "captions.jsonl")
_IMAGE, _CAPTION = ("image", "file_name"), ("captions", "caption", "text")


def has_captions(path: str, split: str) -> bool:
    """Whether a split of a folder has a file of captions."""
    return any((Path(path) / split / name).is_file() for name in FILES)


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
    for number, image, several in lines(file, text):
        place = f"{file}, line {number}"
        if not isinstance(image, str) or not image or "\0" in image:
            faults[place] = f"{place} names no image"
            captions[place] = []
        elif Path(image).is_absolute() or ".." in Path(image).parts:
            raise ValueError(
                f"Expected paths of images relative to the folder of {file}; "
                f"received: {image!r} in line {number}"
            )
        else:
            several = [several] if isinstance(several, (str, type(None))) else several
            captions.setdefault(image, []).extend(several)
    there = [
        x.relative_to(folder).as_posix()
        for x in files_below(folder)
        if x.suffix.lower() in image_suffixes()
    ]
    for image in captions:
        if image not in faults and not (folder / image).is_file():
            faults[image] = f"{folder / image} is not there"
    for image in sorted({*there} - {str(Path(name).as_posix()) for name in captions}):
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


def _csv_lines(file: Path, text: str) -> Iterator[tuple[int, Any, Any]]:
    """The line, the image and the caption of each row."""
    rows = csv.DictReader(io.StringIO(text, newline=""))
    image, caption = (
        next((name for name in names if name in (rows.fieldnames or ())), None)
        for names in (_IMAGE, _CAPTION)
    )
    if image is None or caption is None:
        raise ValueError(
            f'Expected columns "image" and "caption" in {file}; '
            f"received: {rows.fieldnames}"
        )
    try:
        for row in rows:
            yield rows.line_num, row[image], row[caption]
    except csv.Error as error:
        raise ValueError(
            f"Expected rows of a CSV file; received: {file}, line {rows.line_num} "
            f"({error})"
        ) from error


def _json_lines(file: Path, text: str) -> Iterator[tuple[int, Any, Any]]:
    """The line, the image and the caption or captions of each object."""
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
            for names in (_IMAGE, _CAPTION)
        )
        if not isinstance(caption, (str, list, type(None))):
            caption = [caption]
        yield number, image, caption
