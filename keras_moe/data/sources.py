"""The sources of examples by name."""

import difflib
from pathlib import Path

from keras_moe.data import digits, folders, tfds, tfrecord
from keras_moe.data.examples import IndexedExamples, RecordExamples


def open_source(
    source: str, split: str, data_dir: str | None
) -> IndexedExamples | RecordExamples:
    """The examples of a split; downloads what a `tfds:` source has not yet."""
    kind, name = split_source(source)
    if kind == "folder":
        return folders.read_examples(name, split)
    if kind == "tfds":
        return tfds.read_examples(name, split, data_dir)
    if kind == "tfrecord":
        return tfrecord.read_examples(name, split)
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
    return digits.NUM_CLASSES


def split_source(source: str) -> tuple[str, str]:
    """The kind and the name of a source, or an error with what may be meant."""
    if source == "digits":
        return "digits", ""
    if isinstance(source, str):
        kind, _, name = source.partition(":")
        # A folder without a name has an error of its own.
        if (kind in ("tfds", "tfrecord") and name) or source.startswith("folder:"):
            return kind, name
    hint = ""
    if isinstance(source, str) and source:
        guesses = ["digits"] if difflib.get_close_matches(source, ["digits"]) else []
        kind = "folder" if Path(source).is_dir() else "tfds"
        guesses.append(f"{kind}:{source.split(':')[-1] or 'NAME'}")
        hint = f"; did you mean {' or '.join(map(repr, guesses))}?"
    raise ValueError(
        "Expected 'digits', 'tfds:NAME', 'tfrecord:GLOB' or 'folder:PATH'; "
        f"received: source={source!r}{hint}"
    )
