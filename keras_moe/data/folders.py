"""Images in files: below a folder for each class, or with labels in a file.

PATH/split/class/name.jpg       one label per image, also in folders below the class's
PATH/split/labels.json          {"name.jpg": ["class", "other class"]}: several
"""

import os
import warnings
from collections import Counter
from pathlib import Path, PurePosixPath

from keras_moe.data.examples import IndexedExamples
from keras_moe.data.json_schema import DictOf, ListOf, Text, read_json
from keras_moe.data.labels import Classes
from keras_moe.data.reading import decode_image, read_or_name

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
LABELS = "labels.json"
_FILE = DictOf(ListOf(Text()))


def read_examples(path: str, split: str) -> IndexedExamples:
    """The examples of a split; images stay in their files until `decode`."""
    import tensorflow as tf

    root = _root(path)
    if split not in folders_in(root):
        raise ValueError(
            f"Expected a split of folder:{path}, one of {folders_in(root)}; "
            f"received: split={split!r}"
        )
    names = class_names(path)
    number = {name: index for index, name in enumerate(names)}
    if len(names) < 2:
        raise ValueError(
            f"Expected at least two classes in folder:{path}; received: {names}"
        )
    several = _is_multi_label(root)
    if several:
        listed = _listed(root, split)
        files = [(root / split / file, classes) for file, classes in listed.items()]
    else:
        files = _files_of_classes(root / split)
    if not files:
        raise ValueError(
            f"Expected images ({', '.join(image_suffixes())}) in the folders of "
            f"classes below folder:{path}, or in {LABELS}; "
            f"received: split={split!r} without any"
        )
    _report_others(root / split, {file for file, _ in files})
    most = max(1, *(len(classes) for _, classes in files))
    labels = [
        [number[name] for name in classes] + [-1] * (most - len(classes))
        for _, classes in files
    ]
    labels = tf.constant(labels if several else [label for (label,) in labels], "int32")
    return _examples(
        [file for file, _ in files],
        labels,
        Classes(len(names), tuple(names), most if several else None),
    )


def read_files(path: str) -> tuple[IndexedExamples | None, list[str]]:
    """The images of all splits, and the paths of those that are listed and missing.

    Unlike `read_examples` it accepts a folder that cannot be trained on: some splits
    may have no images, and labels are not read.
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
    return _examples(files, labels, Classes(1, None, None)), missing


def _files_of_classes(folder: Path) -> list[tuple[Path, list[str]]]:
    """The images in the folders of classes, with the name of the class."""
    return [
        (file, [name])
        for name in folders_in(folder)
        for file in files_below(folder / name, folder.parent)
        if file.suffix.lower() in image_suffixes()
    ]


def _examples(files, labels, classes):
    import tensorflow as tf

    # Paths are bytes, since a name need not be UTF-8.
    places = tf.constant([os.fsencode(file) for file in files])

    def read(index):
        place = tf.gather(places, index)
        encoded = read_or_name(tf.io.read_file, place, "a file that can be read", place)
        return encoded, tf.gather(labels, index)

    return IndexedExamples(
        len(files),
        read,
        decode_image,
        classes,
        encoded_channels=3,
        place=lambda index: tf.gather(places, index),
    )


def class_names(path: str) -> list[str]:
    """The classes of all splits together, in the order of their labels."""
    root = _root(path)
    if _is_multi_label(root):
        classes = (_listed(root, split).values() for split in folders_in(root))
        return sorted({name for lists in classes for names in lists for name in names})
    return sorted(
        {name for split in folders_in(root) for name in folders_in(root / split)}
    )


def _is_multi_label(root: Path) -> bool:
    """Whether the splits have files with labels."""
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
    """The images of a split with the names of their classes.

    Missing ones are left out, and added to the list `missing` unless it is None.
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


def folders_in(path: Path) -> list[str]:
    """The names of the folders in a folder, but for hidden ones, sorted."""
    return sorted(
        entry.name
        for entry in path.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )


def leads_outside(name: str) -> bool:
    """Whether a relative path is none, or may lead out of its folder."""
    place = PurePosixPath(name.replace("\\", "/"))
    return place.is_absolute() or ".." in place.parts


def image_suffixes() -> tuple[str, ...]:
    """The suffixes of the files that the installed TensorFlow decodes."""
    import tensorflow as tf

    has_webp = hasattr(tf.io, "decode_webp")
    return SUFFIXES if has_webp else tuple(x for x in SUFFIXES if x != ".webp")


def files_below(folder: Path, root: Path | None = None) -> list[Path]:
    """All files in a folder and below it, but for hidden ones, sorted.

    Pipes and devices are no files. A link may lead to another place below `root`.
    """
    root = os.path.realpath(folder if root is None else root)
    paths, seen, pending = [], set(), [Path(folder)]
    while pending:
        place = pending.pop()
        # A link may lead to a folder above itself.
        real = _within(place, root)
        if real in seen:
            continue
        seen.add(real)
        with os.scandir(place) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
        # The first of several names of one folder is then the same on any machine.
        for entry in sorted(shown, key=lambda entry: entry.name, reverse=True):
            if entry.is_dir():
                pending.append(place / entry.name)
            elif entry.is_file():
                if entry.is_symlink():
                    _within(entry.path, root)
                paths.append(place / entry.name)
    return sorted(paths)


def _within(path: str | Path, root: str) -> str:
    """The real path of a path, if it is below a folder's."""
    real = os.path.realpath(path)
    if real != root and not real.startswith(os.path.join(root, "")):
        raise ValueError(
            f"Expected links to stay within {root}; received: {path}, which leads to "
            f"{real}"
        )
    return real


def is_file_within(path: Path, root: Path) -> bool:
    """Whether a path is a file, and no link out of a folder."""
    if path.is_symlink():
        _within(path, os.path.realpath(root))
    return path.is_file()


def _report_others(folder: Path, used: set[Path]) -> None:
    """Warns of the files of a split that are not among its images."""
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
