"""Images in files below one folder for each split and class."""

import os
from pathlib import Path

from keras_moe.data.examples import IndexedExamples

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")


def read_examples(path: str, split: str) -> IndexedExamples:
    """The images of a split; they stay in their files until `decode`."""
    import tensorflow as tf

    root = _root(path)
    if split not in _folders(root):
        raise ValueError(
            f"Expected a split of folder:{path}, one of {_folders(root)}; "
            f"received: split={split!r}"
        )
    classes = class_names(path)
    files = [
        # As bytes: a name need not be UTF-8.
        (os.fsencode(file), classes.index(name))
        for name in _folders(root / split)
        for file in sorted((root / split / name).iterdir())
        if file.suffix.lower() in SUFFIXES and file.is_file()
    ]
    if len(classes) < 2:
        raise ValueError(
            f"Expected at least two classes in folder:{path}; received: {classes}"
        )
    if not files:
        raise ValueError(
            f"Expected images ({', '.join(SUFFIXES)}) in the folders of classes below "
            f"folder:{path}; received: split={split!r} without any"
        )
    names = tf.constant([name for name, _ in files])
    labels = tf.constant([label for _, label in files], "int32")

    def decode(name):
        image = tf.io.decode_image(
            tf.io.read_file(name), channels=3, expand_animations=False
        )
        return tf.ensure_shape(image, (None, None, 3))

    return IndexedExamples(
        len(files), lambda index: (names[index], labels[index]), decode
    )


def class_names(path: str) -> list[str]:
    """The classes of all splits together, in the order of their labels."""
    root = _root(path)
    return sorted({name for split in _folders(root) for name in _folders(root / split)})


def _root(path: str) -> Path:
    root = Path(path)
    if (
        not path
        or not root.is_dir()
        or not any(_folders(root / name) for name in _folders(root))
    ):
        raise ValueError(
            "Expected a folder with images in PATH/split/class/; "
            f"received: source='folder:{path}'"
        )
    return root


def _folders(path: Path) -> list[str]:
    return sorted(
        entry.name
        for entry in path.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )
