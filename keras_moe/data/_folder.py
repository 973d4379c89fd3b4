"""Folders of images with classes or captions.

PATH/split/class/name.jpg       one label per image, also in subfolders of a class
PATH/class/name.jpg             the same without splits: a fifth of each class is "test"
PATH/split/labels.json          {"name.jpg": ["class", "other class"]}: several labels
PATH/split/captions.csv         a header with the columns "image" and "caption"
PATH/split/captions.jsonl       {"image": "a.png", "caption": "a cat"}, or "captions"

Paths are relative to PATH/split. An image may have several lines, one per caption. The
column names of Hugging Face's image folders, "file_name" and "text", work, too.
"""

import csv
import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from keras_moe.checks import check_one_of
from keras_moe.data._captions import CAPTION_NAMES, CaptionOptions, captioned
from keras_moe.data._examples import Examples, IndexedExamples
from keras_moe.data._files import (
    files_below,
    files_listed,
    folders_in,
    image_suffixes,
    images_below,
    leads_outside,
    read_json,
)
from keras_moe.data.labels import Classes
from keras_moe.data.reading import decode_image, read_or_name
from keras_moe.files import read_bytes

LABELS = "labels.json"
CAPTIONS = ("captions.csv", "captions.jsonl")
_IMAGE_NAMES = ("image", "file_name")
# Splits that are drawn for a folder of classes, and the share of the second.
DRAWN_SPLITS = ("train", "test")
TEST_SHARE = 0.2
# Names that folders of splits have, and classes do not.
_SPLIT_NAMES = ("train", "training", "test", "testing", "val", "valid", "validation")


def find_classes(path: str, data_dir: str | None = None) -> Classes:
    """Returns the classes of all splits together."""
    root = Path(path)
    if not _has_splits(root):
        names = _folders_with_images(root)
        return Classes(len(names), tuple(names))
    splits = folders_in(root)
    if not any((root / split / LABELS).is_file() for split in splits):
        names = {name for split in splits for name in folders_in(root / split)}
        return Classes(len(names), tuple(sorted(names)))
    listed = [_listed(root, split).values() for split in splits]
    labels = [names for files in listed for names in files]
    names = {name for several in labels for name in several}
    most = max([1, *map(len, labels)])
    return Classes(len(names), tuple(sorted(names)), most)


def open_labelled(path: str, split: str, data_dir: str | None) -> IndexedExamples:
    """Opens a split with labels; images stay in their files."""
    import tensorflow as tf

    root = Path(path)
    has_splits = _has_splits(root)
    _check_split(root, split, has_splits)
    classes = find_classes(path)
    several = classes.max_labels is not None
    if not has_splits:
        files = _drawn(root, split)
    elif several:
        listed = _listed(root, split)
        files = [(root / split / file, names) for file, names in listed.items()]
    else:
        files = _files_of_classes(root / split)
    if classes.count < 2 or not files:
        where = f"{root / split}/class/ or in {LABELS} of" if has_splits else ""
        where = where or f"PATH/class/, a fifth of each class for {split!r}, of"
        raise ValueError(
            f"Expected at least two classes, and images ({', '.join(image_suffixes())})"
            f" in {where} folder:{path}; received: {len(files)} images, classes "
            f"{[*classes.names]}"
        )
    if has_splits:
        _report_others(root / split, {file for file, _ in files})
    else:
        _report_others(root, {file for file, _ in _files_of_classes(root)})
    number = {name: index for index, name in enumerate(classes.names)}
    most = max(1, *(len(names) for _, names in files))
    if several:
        classes = classes._replace(max_labels=most)
    labels = [
        [number[name] for name in names] + [-1] * (most - len(names))
        for _, names in files
    ]
    labels = tf.constant(labels if several else [label for (label,) in labels], "int32")
    return _labelled_files([file for file, _ in files], labels, classes)


def read_files(path: str) -> tuple[IndexedExamples, list[str]]:
    """Returns the images of all splits, and listed paths that are missing."""
    import tensorflow as tf

    root = Path(path)
    files, missing = [], []
    if not _has_splits(root):
        files = [file for file, _ in _files_of_classes(root)]
    for split in folders_in(root) if _has_splits(root) else ():
        if (root / split / LABELS).is_file():
            files += [root / split / name for name in _listed(root, split, missing)]
        else:
            files += [file for file, _ in _files_of_classes(root / split)]
    if not files and not missing:
        raise ValueError(f"Expected images in a split of folder:{path}; received: none")
    labels = tf.zeros(len(files), "int32")
    return _labelled_files(files, labels, Classes(1)), missing


def _has_splits(root: Path) -> bool:
    """Whether the folders in a folder are splits, and not classes with images."""
    names = folders_in(root)
    if any(name.lower() in _SPLIT_NAMES for name in names):
        return True
    for name in names:
        files = [x for x in (root / name).iterdir() if not x.name.startswith(".")]
        if any(x.is_dir() or x.name in (LABELS, *CAPTIONS) for x in files):
            return True
    return not _folders_with_images(root)


def _check_split(root: Path, split: str, has_splits: bool) -> None:
    names = folders_in(root) if has_splits else DRAWN_SPLITS
    if has_splits and split not in names and not {*names} & {*_SPLIT_NAMES}:
        raise ValueError(
            f"Expected split to be one of {names}, the folders in {root}; received: "
            f"split={split!r}. If these are classes, put their images directly into "
            "them, without subfolders"
        )
    check_one_of("split", split, names)


def _folders_with_images(root: Path) -> list[str]:
    return [name for name in folders_in(root) if images_below(root / name, root)]


def _drawn(root: Path, split: str) -> list[tuple[Path, list[str]]]:
    """Returns the images of a split that is drawn from those of each class."""
    chosen = []
    for name in _folders_with_images(root):
        files = images_below(root / name, root)
        number = max(round(TEST_SHARE * len(files)), int(len(files) > 1))
        # By their names, so that further images move few of them to the other split.
        by_hash = sorted(files, key=lambda file: _hash(file.relative_to(root)))
        tests = set(by_hash[:number])
        chosen += [(x, [name]) for x in files if (x in tests) == (split == "test")]
    return chosen


def _hash(path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(path.as_posix())).digest()


def _files_of_classes(folder: Path) -> list[tuple[Path, list[str]]]:
    """Returns the images in class folders, with the class name."""
    return [
        (file, [name])
        for name in folders_in(folder)
        for file in images_below(folder / name, folder.parent)
    ]


def _labelled_files(files, labels, classes) -> IndexedExamples:
    import tensorflow as tf

    read, path_of = _file_reader(files)
    return IndexedExamples(
        len(files),
        lambda index: {"image": read(index), "label": tf.gather(labels, index)},
        decode_image,
        classes=classes,
        encoded_channels=3,
        location=path_of,
    )


def _file_reader(files) -> tuple[Callable, Callable]:
    """Returns functions from an index to a file's content and to its path."""
    import tensorflow as tf

    # Paths are bytes, because names need not be UTF-8.
    paths = tf.constant([os.fsencode(file) for file in files], "string")

    def path_of(index):
        return tf.gather(paths, index)

    def read(index):
        path = path_of(index)
        return read_or_name(tf.io.read_file, path, "a file that can be read", path)

    return read, path_of


def _listed(
    root: Path, split: str, missing: list[str] | None = None
) -> dict[str, list[str]]:
    """Returns each image's class names; adds missing images to `missing`."""
    path = root / split / LABELS
    listed = read_json(path, {str: [str]}, within=root)
    names = [name for name in listed if not leads_outside(name)]
    there = files_listed((root / split / name for name in names), root)
    found = {}
    for name, classes in listed.items():
        file = root / split / name
        is_valid = not leads_outside(name) and file.suffix.lower() in image_suffixes()
        if is_valid and file in there:
            found[name] = classes
        elif is_valid and missing is not None:
            missing.append(str(file))
        else:
            raise ValueError(
                f"Expected images ({', '.join(image_suffixes())}) relative to the "
                f"folder of {path}; received: {name!r}"
            )
    return found


def _report_others(folder: Path, used: set[Path]) -> None:
    """Warns about files of a split that are not used as images."""
    files = files_below(folder, folder.parent)
    others = [x for x in files if x not in used and x != folder / LABELS]
    if others:
        warnings.warn(
            f"{len(others)} files in {folder} are not among its images, such as "
            f"{others[0]}: images are {', '.join(image_suffixes())} in the folder of "
            f"a class, or listed in {LABELS}",
            stacklevel=5,
        )


def open_captioned(path: str, split: str, options: CaptionOptions) -> Examples | None:
    """Opens a split with captions; None without a caption file."""
    root = Path(path)
    check_one_of("split", split, folders_in(root))
    folder = root / split
    names = [name for name in CAPTIONS if (folder / name).is_file()]
    if not names:
        return None
    if len(names) > 1:
        raise ValueError(
            f"Expected one file of captions in {folder}; received: {names}"
        )
    captions, faults = _listed_captions(folder / names[0], root)
    named = [image for image in captions if image not in faults]
    there = files_listed((folder / image for image in named), root)
    for image in named:
        if folder / image not in there:
            faults[image] = f"{folder / image} is not there"
    for file in images_below(folder, root):
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
        elif leads_outside(image):
            raise ValueError(
                f"Expected paths of images relative to the folder of {file}; "
                f"received: {image!r} in line {number}"
            )
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
        columns = list(rows.fieldnames or ())
        image, caption = (
            next((name for name in names if name in columns), None)
            for names in (_IMAGE_NAMES, CAPTION_NAMES)
        )
        if columns.count(image) != 1 or columns.count(caption) != 1:
            raise ValueError(
                f'Expected a column "image" and one "caption" in {file}; '
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
            entry = None
        image, caption = (
            next((entry[name] for name in names if name in entry), None)
            if isinstance(entry, dict)
            else None
            for names in (_IMAGE_NAMES, CAPTION_NAMES)
        )
        yield number, image, caption, None
