"""Images in files: below a folder for each class, or with labels in a file.

PATH/split/class/name.jpg       one label per image
PATH/split/labels.json          {"name.jpg": ["class", "other class"]}: several
"""

import os
from pathlib import Path

from keras_moe.data.examples import IndexedExamples
from keras_moe.data.json_files import read_json
from keras_moe.data.labels import Classes

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
LABELS = "labels.json"


def read_examples(path: str, split: str) -> IndexedExamples:
    """The images of a split; they stay in their files until `decode`."""
    import tensorflow as tf

    root = _root(path)
    if split not in _folders(root):
        raise ValueError(
            f"Expected a split of folder:{path}, one of {_folders(root)}; "
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
        files = [
            (file, [name])
            for name in _folders(root / split)
            for file in sorted((root / split / name).iterdir())
            if file.suffix.lower() in SUFFIXES and file.is_file()
        ]
    if not files:
        raise ValueError(
            f"Expected images ({', '.join(SUFFIXES)}) in the folders of classes below "
            f"folder:{path}, or in {LABELS}; received: split={split!r} without any"
        )
    most = max(1, *(len(classes) for _, classes in files))
    labels = [
        [number[name] for name in classes] + [-1] * (most - len(classes))
        for _, classes in files
    ]
    labels = tf.constant(labels if several else [label for (label,) in labels], "int32")
    # As bytes: a name need not be UTF-8.
    places = tf.constant([os.fsencode(file) for file, _ in files])

    def decode(encoded):
        image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        return tf.ensure_shape(image, (None, None, 3))

    return IndexedExamples(
        len(files),
        lambda index: (tf.io.read_file(places[index]), labels[index]),
        decode,
        Classes(len(names), tuple(names), most if several else None),
        encoded_channels=3,
    )


def class_names(path: str) -> list[str]:
    """The classes of all splits together, in the order of their labels."""
    root = _root(path)
    if _is_multi_label(root):
        classes = (_listed(root, split).values() for split in _folders(root))
        return sorted({name for lists in classes for names in lists for name in names})
    return sorted({name for split in _folders(root) for name in _folders(root / split)})


def _is_multi_label(root: Path) -> bool:
    """Whether the splits have files of labels."""
    with_labels = [s for s in _folders(root) if (root / s / LABELS).is_file()]
    without = [s for s in _folders(root) if s not in with_labels]
    if with_labels and without:
        raise ValueError(
            f"Expected {LABELS} in every split of {root} or in none; "
            f"received: {with_labels} with, {without} without"
        )
    return bool(with_labels)


def _listed(root: Path, split: str) -> dict[str, list[str]]:
    """The images of a split with the names of their classes."""
    path = root / split / LABELS
    listed = read_json(path)
    for file, classes in listed.items():
        is_list = isinstance(classes, list) and all(isinstance(c, str) for c in classes)
        place = Path(file)
        outside = place.is_absolute() or ".." in place.parts
        if not is_list or outside or not (root / split / file).is_file():
            raise ValueError(
                f"Expected a list of classes for each file, relative to {path.parent}; "
                f"received: {file!r}: {classes!r}"
            )
    return listed


def _root(path: str) -> Path:
    root = Path(path)
    if (
        not path
        or not root.is_dir()
        or not any(
            _folders(root / name) or (root / name / LABELS).is_file()
            for name in _folders(root)
        )
    ):
        raise ValueError(
            f"Expected a folder with images in PATH/split/class/, or {LABELS} in "
            f"PATH/split/; received: source='folder:{path}'"
        )
    return root


def _folders(path: Path) -> list[str]:
    return sorted(
        entry.name
        for entry in path.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )
