"""Folders of images with classes or captions.

PATH/split/class/name.jpg       one label per image, also in subfolders of a class
PATH/class/name.jpg             the same without splits: a fifth of each class is "test"
PATH/split/labels.json          {"name.jpg": ["class", "other class"]}: several labels
PATH/split/captions.csv         a header with the columns "image" and "caption"
PATH/split/captions.jsonl       {"image": "a.png", "caption": "a cat"}, or "captions"

Splits are the folders with names of splits, and others with the same classes; without
such names, all folders with folders of images. A class is a folder that holds images: a
folder alone in its split and in no other, such as test/images, has no label. What is
not read is named in a warning, once.

Paths are relative to PATH/split. An image may have several lines, one per caption. The
column names of Hugging Face's image folders, "file_name" and "text", work, too.
"""

import csv
import functools
import hashlib
import io
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from keras_moe._checks import check_one_of, unfit
from keras_moe._files import read_bytes
from keras_moe.data import _files
from keras_moe.data._captions import CAPTION_NAMES, CaptionOptions, captioned
from keras_moe.data._examples import Classes, Examples, IndexedExamples
from keras_moe.data._packages import tf
from keras_moe.data.reading import decode_image, read_or_name

LABELS = "labels.json"
CAPTIONS = ("captions.csv", "captions.jsonl")
_IMAGE_NAMES = ("image", "file_name")
_SUFFIXES = ", ".join(_files.IMAGE_SUFFIXES)
# Splits that are drawn for a folder of classes, and the share of the second.
DRAWN_SPLITS = ("train", "test")
TEST_SHARE = 0.2
# Names that folders of splits have, and classes do not.
_SPLIT_NAME = re.compile(
    "(train(ing)?|test(ing)?|val(id(ation)?)?|dev|eval(uation)?)"
    r"([-_ ]?(set|images|data|\d+))?",
    re.IGNORECASE,
)


def find_classes(path: str, data_dir: str | None = None) -> Classes:
    root = Path(path)
    splits = _class_folders(root)
    if None not in splits.values():
        names = {name for own in splits.values() for name in own or ()}
        if not names:
            images = len(_files.files_below(root, root, images=True))
            raise ValueError(
                f"Expected a folder for each class, such as {root}/cat/1.jpg, also in "
                f"splits, such as {root}/train/cat/1.jpg; received: {images} images, "
                "none of them in the folder of a class"
            )
        return Classes(len(names), tuple(sorted(names)))
    labels = [names for split in splits for _, names in _files_of(root, split)]
    names = {name for several in labels for name in several}
    most = max([1, *map(len, labels)])
    return Classes(len(names), tuple(sorted(names)), most)


def open_labelled(path: str, split: str, data_dir: str | None) -> IndexedExamples:
    """Opens a split with labels; images stay in their files."""
    root = Path(path)
    splits = _class_folders(root)
    _check_split(root, split, splits)
    classes = find_classes(path)
    names = classes.names or ()
    several = classes.max_labels is not None
    if "" in splits:
        files = _drawn(root, split, splits[""] or [])
        where = f"PATH/class/, a fifth of each class for {split!r}, of"
    else:
        files = _files_of(root, split, splits[split])
        where = f"{root / split}/class/ or in {LABELS} of"
    if classes.count < 2 or not files:
        raise ValueError(
            f"Expected at least two classes, and images ({_SUFFIXES}) in {where} "
            f"folder:{path}; received: {len(files)} images, classes {[*names]}"
        )
    _report_others(root)
    number = {name: index for index, name in enumerate(names)}
    most = max(1, *(len(names) for _, names in files))
    if several:
        classes = classes._replace(max_labels=most)
    labels = [
        [number[name] for name in names] + [-1] * (most - len(names))
        for _, names in files
    ]
    labels = tf.constant(labels if several else [label for (label,) in labels], "int32")
    read, path_of = _file_reader([file for file, _ in files])
    return IndexedExamples(
        len(files),
        lambda index: {"image": read(index), "label": tf.gather(labels, index)},
        decode_image,
        classes=classes,
        encoded_channels=3,
        location=path_of,
    )


def _class_folders(root: Path) -> dict[str, list[str] | None]:
    """Class folders by split, "" without splits; None if splits have a labels file."""
    found = {
        name: _files.folders_with_images(root / name, root)
        for name in _files.folders_in(root)
    }
    known = {name: own for name, own in found.items() if _SPLIT_NAME.fullmatch(name)}
    if listed := {name for name in found if (root / name / LABELS).is_file()}:
        return dict.fromkeys(sorted({*known, *listed}))
    names = {name for own in known.values() for name in own}
    # Beside train/ and test/, pictures of a run are no split.
    splits = known or {
        name: own
        for name, own in found.items()
        if own or any((root / name / file).is_file() for file in CAPTIONS)
    }
    splits |= {name: own for name, own in found.items() if own and names >= {*own}}
    if not splits:
        return {"": _files.folders_with_images(root, root)}
    several = {name for own in splits.values() if len(own) > 1 for name in own}
    for split, own in sorted(splits.items()):
        if own and all(x == split or _SPLIT_NAME.fullmatch(x) for x in own):
            raise ValueError(
                f"Expected folders of classes in {root / split}; received: {own}, "
                "named like splits. Give the folder that holds the splits"
            )
    return {
        split: [name for name in own if name in several or not several]
        for split, own in sorted(splits.items())
    }


def _check_split(root: Path, split: str, splits: dict[str, list[str] | None]) -> None:
    if "" in splits:
        check_one_of("split", split, DRAWN_SPLITS)
    elif split not in splits:
        hint = ""
        if not any(map(_SPLIT_NAME.fullmatch, splits)):
            hint = ". If these are classes, put their images directly into them"
        raise ValueError(
            f"Expected split to be one of {[*splits]}, folders in {root} of the same "
            f"classes; received: split={split!r}{hint}"
        )


def _drawn(root: Path, split: str, names: list[str]) -> list[tuple[Path, list[str]]]:
    """Returns the images of a split that is drawn from those of each class."""
    chosen = []
    for name in names:
        files = _files.files_below(root / name, root, images=True)
        number = max(round(TEST_SHARE * len(files)), int(len(files) > 1))
        # By their names, so that further images move few of them to the other split.
        paths = {x: os.fsencode(x.relative_to(root).as_posix()) for x in files}
        by_hash = sorted(files, key=lambda x: hashlib.sha256(paths[x]).digest())
        tests = set(by_hash[:number])
        chosen += [(x, [name]) for x in files if (x in tests) == (split == "test")]
    return chosen


def _files_of(
    root: Path, split: str, names: list[str] | None = None
) -> list[tuple[Path, list[str]]]:
    """Returns the images of a split with their classes, by folders or by a file."""
    if names is not None:
        return [
            (file, [name])
            for name in names
            for file in _files.files_below(root / split / name, root, images=True)
        ]
    path, found = root / split / LABELS, []
    listed = _files.read_json(path, {str: [str]}, within=root)
    inside = [name for name in listed if not _files.leads_outside(name)]
    there = _files.files_listed((root / split / name for name in inside), root)
    for name, classes in listed.items():
        file = root / split / name
        if file not in there or not _files.is_image(name):
            expected = f"images ({_SUFFIXES}) relative to the folder of {path}"
            raise unfit(expected, f"{name!r}")
        found.append((file, classes))
    return found


def _file_reader(files) -> tuple[Callable, Callable]:
    """Returns functions from an index to a file's content and to its path."""
    # Paths are bytes, because names need not be UTF-8.
    paths = tf.constant([os.fsencode(file) for file in files], "string")

    def path_of(index):
        return tf.gather(paths, index)

    def read(index):
        path = path_of(index)
        return read_or_name(tf.io.read_file, path, "a file that can be read", path)

    return read, path_of


@functools.cache
def _report_others(root: Path) -> None:
    """Warns once in a process about what in a folder is not read."""
    splits = _class_folders(root)
    used = {x for split, own in splits.items() for x, _ in _files_of(root, split, own)}
    folders = {root}
    for folder in {file.parent for file in used}:
        while folder not in folders:
            folders.add(folder)
            folder = folder.parent
    read = {*used, *folders, *(root / split / LABELS for split in splits)}
    # Links are other names of what is read.
    others = sorted(
        f"{x.relative_to(root)}{os.sep if x.is_dir() else ''}"
        for folder in folders
        for x in folder.iterdir()
        if x not in read and not x.is_symlink() and not x.name.startswith(".")
        if x.is_dir() or (x.is_file() and not _files.is_hidden(x.name))
    )
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        warnings.warn(
            f"In {root} not read: {', '.join(others[:5])}{more}. Images are "
            f"{_SUFFIXES} in the folder of a class, or listed in {LABELS}",
            stacklevel=5,
        )


def open_captioned(path: str, split: str, options: CaptionOptions) -> Examples | None:
    """Opens a split with captions; None without a caption file."""
    root = Path(path)
    check_one_of("split", split, _files.folders_in(root))
    folder = root / split
    names = [name for name in CAPTIONS if (folder / name).is_file()]
    if not names:
        return None
    if len(names) > 1:
        raise unfit(f"one file of captions in {folder}", names)
    captions, faults = _listed_captions(folder / names[0], root)
    named = [image for image in captions if image not in faults]
    there = _files.files_listed((folder / image for image in named), root)
    for image in named:
        if folder / image not in there:
            faults[image] = f"{folder / image} is not there"
    for file in _files.files_below(folder, root, images=True):
        captions.setdefault(file.relative_to(folder).as_posix(), [])
    images = list(captions)
    names = [str(folder / image) for image in images]
    read, path_of = _file_reader(names)
    return captioned(
        list(captions.values()),
        names,
        {i: faults[image] for i, image in enumerate(images) if image in faults},
        read,
        decode_image,
        path_of,
    )


def _listed_captions(file: Path, root: Path) -> tuple[dict[str, list], dict[str, str]]:
    """Returns the captions listed for each image, and the faults of lines."""
    text = read_bytes(file, root).decode("utf-8-sig", errors="surrogateescape")
    lines = _csv_lines if file.suffix == ".csv" else _json_lines
    captions: dict[str, list] = {}
    faults: dict[str, str] = {}
    for number, image, several, fault in lines(file, text):
        line = f"{file}, line {number}"
        if not isinstance(image, str) or not image:
            faults[line] = f"{line} names no image"
            captions[line] = []
        elif _files.leads_outside(image):
            expected = f"paths of images relative to the folder of {file}"
            raise unfit(expected, f"{image!r} in line {number}")
        else:
            # "./a.png" is "a.png".
            image = PurePosixPath(image).as_posix()
            several = several if isinstance(several, list) else [several]
            captions.setdefault(image, []).extend(several)
            if fault is not None:
                faults[image] = f"{line} {fault}"
    return captions, faults


def _csv_lines(file: Path, text: str) -> Iterator[tuple[int, Any, Any, str | None]]:
    """Yields line number, image, caption and fault of each row."""
    # Otherwise an unclosed quote would swallow the rest of the file.
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        columns: list[str | None] = list(rows.fieldnames or ())
        names = [*map(_first(columns), (_IMAGE_NAMES, CAPTION_NAMES))]
        if any(columns.count(name) != 1 for name in names):
            raise unfit(f'a column "image" and one "caption" in {file}', columns)
        for row in rows:
            fault = None
            if None in row:
                fault = "has more fields than columns: a caption's comma needs quotes"
            yield rows.line_num, *map(row.get, names), fault
    except csv.Error as error:
        expected = "rows of a CSV file"
        raise unfit(expected, f"{file}, line {rows.line_num} ({error})") from error


def _json_lines(file: Path, text: str) -> Iterator[tuple[int, Any, Any, None]]:
    """Yields line number, image and captions of each object, and None as fault."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        entry = entry if isinstance(entry, dict) else {}
        names = map(_first(entry), (_IMAGE_NAMES, CAPTION_NAMES))
        yield number, *map(entry.get, names), None


def _first(known: Any) -> Callable[[tuple[str, ...]], str | None]:
    """Returns a function that finds the first known one of some names."""
    return lambda names: next((name for name in names if name in known), None)
