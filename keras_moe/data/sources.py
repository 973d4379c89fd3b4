"""The sources of examples by name."""

import difflib
from pathlib import Path

from keras_moe.data import (
    digits,
    fashion_mnist,
    folders,
    openclipart,
    tfds,
    tfrecord,
)
from keras_moe.data.emoji import loading as emoji
from keras_moe.data.emoji.fonts import STYLES
from keras_moe.data.examples import IndexedExamples, RecordExamples

# Sources with a name of their own, by kind and name; those of emoji are styles.
_NAMED = {
    "digits": ("digits", ""),
    "fashion_mnist": ("fashion_mnist", ""),
    "emoji": ("emoji", "openmoji"),
    **{f"emoji:{style}": ("emoji", style) for style in STYLES},
}


def open_source(
    source: str, split: str, data_dir: str | None
) -> IndexedExamples | RecordExamples:
    """The examples of a split; a `tfds:` source that is not there is downloaded."""
    kind, name = split_source(source)
    if kind == "folder":
        return folders.read_examples(name, split)
    if kind == "tfds":
        return tfds.read_examples(name, split, data_dir)
    if kind == "tfrecord":
        return tfrecord.read_examples(name, split)
    if kind == "openclipart":
        return openclipart.read_examples(name, split)
    if kind == "emoji":
        return emoji.read_examples(split, name)
    if kind == "fashion_mnist":
        return fashion_mnist.read_examples(split, data_dir)
    return digits.read_examples(split)


def count_classes(source: str, data_dir: str | None) -> int:
    """Number of classes, without a download."""
    kind, name = split_source(source)
    if kind == "folder":
        return len(folders.class_names(name))
    if kind == "tfds":
        return tfds.count_classes(name, data_dir)
    if kind == "tfrecord":
        return tfrecord.count_classes(name)
    if kind == "openclipart":
        return len(openclipart.class_names(name))
    if kind == "emoji":
        return len(emoji.class_names())
    if kind == "fashion_mnist":
        return len(fashion_mnist.CLASS_NAMES)
    return digits.NUM_CLASSES


def class_names(source: str, data_dir: str | None = None) -> tuple[str, ...] | None:
    """Names of the classes of a source that `load` knows; downloads nothing.

    Args:
        source: name of a source of `load`.
        data_dir: folder of TensorFlow Datasets.

    Returns:
        The names in the order of the labels, or None if the source has none.

    Raises:
        ValueError: if the source is not known.

    Example:

    >>> from keras_moe.data import class_names
    >>> class_names("digits")[:3]
    ('0', '1', '2')
    """
    kind, name = split_source(source)
    if kind == "folder":
        return tuple(folders.class_names(name))
    if kind == "tfds":
        return tfds.class_names(name, data_dir)
    if kind == "tfrecord":
        return tfrecord.class_names(name)
    if kind == "openclipart":
        return openclipart.class_names(name)
    if kind == "emoji":
        return emoji.class_names()
    if kind == "fashion_mnist":
        return fashion_mnist.CLASS_NAMES
    return digits.CLASS_NAMES


def split_source(source: str) -> tuple[str, str]:
    """The kind and the name of a source, or an error with the likeliest names."""
    if isinstance(source, str):
        if source in _NAMED:
            return _NAMED[source]
        kind, _, name = source.partition(":")
        # A folder without a name has an error of its own.
        is_named = kind in ("openclipart", "tfds", "tfrecord") and name
        if is_named or source.startswith("folder:"):
            return kind, name
    hint = ""
    if isinstance(source, str) and source:
        guesses = difflib.get_close_matches(source, _NAMED, cutoff=0.75)
        kind = "folder" if Path(source).is_dir() else "tfds"
        guesses.append(f"{kind}:{source.split(':')[-1] or 'NAME'}")
        hint = f"; did you mean {' or '.join(map(repr, guesses))}?"
    raise ValueError(
        "Expected 'digits', 'emoji', 'emoji:noto', 'fashion_mnist', 'tfds:NAME', "
        "'tfrecord:GLOB', 'folder:PATH' or 'openclipart:PATH'; received: "
        f"source={source!r}{hint}"
    )
