"""Folders of images with classes or captions.

PATH/split/class/name.jpg       one label per image, also in subfolders of a class
PATH/split/labels.json          {"name.jpg": ["class", "other class"]}: several labels
PATH/split/captions.csv         a header with the columns "image" and "caption"
PATH/split/captions.jsonl       {"image": "a.png", "caption": "a cat"}, or "captions"

Paths are relative to PATH/split. An image may have several lines, one per caption. The
column names of Hugging Face's image folders, "file_name" and "text", work, too.
"""

import csv
import io
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from keras_moe.data._captions import CAPTION_NAMES, CaptionOptions, captioned
from keras_moe.data._examples import IndexedExamples
from keras_moe.data._files import (
    files_below,
    folders_in,
    image_suffixes,
    is_file_within,
    leads_outside,
)
from keras_moe.data._json_schema import DictOf, ListOf, Text, read_json
from keras_moe.data.labels import Classes
from keras_moe.data.reading import decode_image, read_or_name

LABELS = "labels.json"
CAPTIONS = ("captions.csv", "captions.jsonl")
_IMAGE_NAMES = ("image", "file_name")
_FILE = DictOf(ListOf(Text()))


def find_classes(path: str, data_dir: str | None = None) -> Classes:
    """Returns the classes of all splits together."""
    root = _root(path)
    if _is_multi_label(root):
        listed = [_listed(root, split) for split in folders_in(root)]
        names = {name for files in listed for names in files.values() for name in names}
        most = max(
            (len(names) for files in listed for names in files.values()), default=1
        )
        return Classes(len(names), tuple(sorted(names)), max(1, most))
    names = {name for split in folders_in(root) for name in folders_in(root / split)}
    return Classes(len(names), tuple(sorted(names)))


def open_labelled(path: str, split: str, data_dir: str | None) -> IndexedExamples:
    """Opens a split with labels; images stay in their files."""
    import tensorflow as tf

    root = _root(path)
    if split not in folders_in(root):
        raise ValueError(
            f"Expected a split of folder:{path}, one of {folders_in(root)}; "
            f"received: split={split!r}"
        )
    classes = find_classes(path)
    number = {name: index for index, name in enumerate(classes.names)}
    if classes.count < 2:
        raise ValueError(
            f"Expected at least two classes in folder:{path}; received: "
            f"{[*classes.names]}"
        )
    several = classes.max_labels is not None
    if several:
        listed = _listed(root, split)
        files = [(root / split / file, names) for file, names in listed.items()]
    else:
        files = _files_of_classes(root / split)
    if not files:
        raise ValueError(
            f"Expected images ({', '.join(image_suffixes())}) in the folders of "
            f"classes below folder:{path}, or in {LABELS}; "
            f"received: split={split!r} without any"
        )
    _report_others(root / split, {file for file, _ in files})
    most = max(1, *(len(names) for _, names in files))
    if several:
        classes = classes._replace(max_labels=most)
    labels = [
        [number[name] for name in names] + [-1] * (most - len(names))
        for _, names in files
    ]
    labels = tf.constant(labels if several else [label for (label,) in labels], "int32")
    return _labelled_files([file for file, _ in files], labels, classes)


def read_files(path: str) -> tuple[IndexedExamples | None, list[str]]:
    """Returns the images of all splits, and the listed paths that are missing.

    Unlike `open_labelled` this works for folders that cannot be trained on: splits may
    be empty, and labels are not read.
    """
    import tensorflow as tf

    root = _root(path)
    files, missing = [], []
    for split in folders_in(root):
        if (root / split / LABELS).is_file():
            files += [root / split / name for name in _listed(root, split, missing)]
        else:
            files += [file for file, _ in _files_of_classes(root / split)]
    if not files and not missing:
        raise ValueError(
            f"Expected images ({', '.join(image_suffixes())}) in a split of "
            f"folder:{path}; received: none"
        )
    if not files:
        return None, missing
    labels = tf.zeros(len(files), "int32")
    return _labelled_files(files, labels, Classes(1)), missing


def _files_of_classes(folder: Path) -> list[tuple[Path, list[str]]]:
    """Returns the images in class folders, with the class name."""
    return [
        (file, [name])
        for name in folders_in(folder)
        for file in files_below(folder / name, folder.parent)
        if file.suffix.lower() in image_suffixes()
    ]


def _labelled_files(files, labels, classes) -> IndexedExamples:
    import tensorflow as tf

    read, place = _file_reader(files)
    return IndexedExamples(
        len(files),
        lambda index: {"image": read(index), "label": tf.gather(labels, index)},
        decode_image,
        classes=classes,
        encoded_channels=3,
        place=place,
    )


def _file_reader(files) -> tuple[Callable, Callable]:
    """Returns functions from an index to a file's content and to its path."""
    import tensorflow as tf

    # Paths are bytes, because names need not be UTF-8.
    places = tf.constant([os.fsencode(file) for file in files])

    def read(index):
        place = tf.gather(places, index)
        return read_or_name(tf.io.read_file, place, "a file that can be read", place)

    return read, lambda index: tf.gather(places, index)


def _is_multi_label(root: Path) -> bool:
    """Whether the splits have label files."""
    with_labels = [s for s in folders_in(root) if (root / s / LABELS).is_file()]
    without = [s for s in folders_in(root) if s not in with_labels]
    if with_labels and without:
        raise ValueError(
            f"Expected {LABELS} in every split of {root} or in none; "
            f"received: {with_labels} with, {without} without"
        )
    return bool(with_labels)


def _listed(
    root: Path, split: str, missing: list[str] | None = None
) -> dict[str, list[str]]:
    """Returns the class names of each image of a split.

    Missing images are left out, and added to the list `missing` if given.
    """
    path = root / split / LABELS
    listed = read_json(path, _FILE)
    there = {}
    for file, classes in listed.items():
        outside = leads_outside(file)
        known = Path(file).suffix.lower() in image_suffixes()
        is_there = not outside and known and is_file_within(root / split / file, root)
        if outside or not known or (missing is None and not is_there):
            raise ValueError(
                f"Expected images ({', '.join(image_suffixes())}) relative to the "
                f"folder of {path}; received: {file!r}"
            )
        if is_there:
            there[file] = classes
        else:
            missing.append(str(root / split / file))
    return there


def _root(path: str) -> Path:
    root = Path(path)
    if (
        not path
        or not root.is_dir()
        or not any(
            folders_in(root / name) or (root / name / LABELS).is_file()
            for name in folders_in(root)
        )
    ):
        raise ValueError(
            f"Expected a folder with images in PATH/split/class/, or {LABELS} in "
            f"PATH/split/; received: source='folder:{path}'"
        )
    return root


def _report_others(folder: Path, used: set[Path]) -> None:
    """Warns about files of a split that are not used as images."""
    files = files_below(folder, folder.parent)
    others = [x for x in files if x not in used and x != folder / LABELS]
    if not others:
        return
    kinds = Counter(file.suffix.lower() or "no suffix" for file in others)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    warnings.warn(
        f"{len(others)} files in {folder} are not among its images ({counts}), such "
        f"as {others[0]}: images are {', '.join(image_suffixes())} in the folder of a "
        f"class, or listed in {LABELS}",
        stacklevel=5,
    )


def open_captioned(
    path: str, split: str, options: CaptionOptions
) -> IndexedExamples | None:
    """Opens a split with captions; None without a caption file.

    Faults are images listed but missing, present but not listed, and unreadable lines.
    """
    splits = sorted(x.name for x in Path(path).glob("*") if _has_captions(path, x.name))
    if not _has_captions(path, split):
        has_classes = any(x.is_dir() for x in (Path(path) / split).glob("*"))
        if splits and not has_classes:
            raise ValueError(
                f"Expected a split of folder:{path} with captions, one of {splits}; "
                f"received: split={split!r}"
            )
        return None
    folder = Path(path) / split
    names = [name for name in CAPTIONS if (folder / name).is_file()]
    if len(names) > 1:
        raise ValueError(
            f"Expected one file of captions in {folder}; received: {names}"
        )
    file = folder / names[0]
    captions, faults = _listed_captions(file)
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
    read, place = _file_reader(places)
    return captioned(
        [captions[image] or None for image in images],
        read,
        decode_image,
        place=place,
        places=places,
        faults={i: faults[image] for i, image in enumerate(images) if image in faults},
    )


def _has_captions(path: str, split: str) -> bool:
    """Whether a split has a caption file."""
    folder = Path(path)
    if not folder.is_dir() or split not in folders_in(folder):
        return False
    return any((folder / split / name).is_file() for name in CAPTIONS)


def _listed_captions(file: Path) -> tuple[dict[str, list], dict[str, str]]:
    """Returns the captions listed for each image, and the faults of lines."""
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
    return captions, faults


def _csv_lines(file: Path, text: str) -> Iterator[tuple[int, Any, Any, str | None]]:
    """Yields line number, image, caption and fault of each row."""
    # Otherwise an unclosed quote would swallow the rest of the file.
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = list(rows.fieldnames or ())
        image, caption = (
            next((name for name in names if name in columns), None)
            for names in (_IMAGE_NAMES, CAPTION_NAMES)
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
    """Yields line number, image and captions of each object, and None as fault."""
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
            for names in (_IMAGE_NAMES, CAPTION_NAMES)
        )
        if not isinstance(caption, (str, list, type(None))):
            caption = [caption]
        yield number, image, caption, None
