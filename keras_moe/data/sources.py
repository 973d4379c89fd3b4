"""Sources of examples by name, and their classes.

A kind of source is a module with some of these functions, which receive what follows
the colon in a source's name:

    find_classes(name, data_dir)            the classes, without a download
    open_labelled(name, split, data_dir)    examples with labels
    open_captioned(name, split, options)    examples with captions, by `CaptionOptions`;
                                            None if this source only has labels
    open_texts(name, split, data_dir)       documents, as strings

Folders of tokens, "tokens:PATH", are no kind of these: see `_tokens.py`.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from keras_moe._checks import nearest, unfit
from keras_moe.data import (
    _fashion_mnist,
    _folder,
    _texts,
    _tfds,
    _tfrecord,
    _webdataset,
    digits,
    emoji,
)
from keras_moe.data._captions import (
    CaptionOptions,
    captioned_arrays,
    captions_of_classes,
)
from keras_moe.data._examples import Examples

# Kinds that are sources without a name, and those that have one.
_ALONE = {
    "digits": digits,
    "emoji": emoji,
    "fashion_mnist": _fashion_mnist,
    "python_docs": _texts,
}
_NAMED = {
    "emoji": emoji,
    "folder": _folder,
    "text": _texts,
    "tfds": _tfds,
    "tfrecord": _tfrecord,
    "webdataset": _webdataset,
}


def _find(source: object, function: str) -> tuple[Callable, str]:
    """Returns a function of the source's module and the source's name."""
    kind, colon, name = str(source).partition(":")
    # A shell expands ~ at the beginning of a word alone.
    name = os.path.expanduser(name)
    kinds = _NAMED if name else {} if colon else _ALONE
    if kind not in kinds:
        hint = nearest(kind, {**_ALONE, **_NAMED})
        if os.path.isdir(str(source)):
            hint = f"a folder of images is 'folder:{source}', of texts 'text:{source}'"
        elif kind == "tokens":
            hint = "tokens are read by language recipes alone"
        raise ValueError(
            "Expected 'digits', 'emoji', 'emoji:size=64', 'fashion_mnist', "
            "'tfds:NAME', 'tfrecord:GLOB', 'folder:PATH', for captions "
            "'webdataset:GLOB', or for "
            f"texts 'text:PATH' or 'python_docs'; received: source={source!r} ({hint})"
        )
    module = kinds[kind]
    if function == "open_captioned":
        return getattr(module, function, lambda *_: None), name
    if not hasattr(module, function):
        texts, labels = "documents for language models", "images with labels"
        expected = texts if function == "open_texts" else labels
        raise unfit(f"a source of {expected}", source=source)
    return getattr(module, function), name


def open_source(source: str, split: str, data_dir: str | None) -> Examples:
    """Opens a split with labels; downloads missing data of `tfds:`."""
    open_labelled, name = _find(source, "open_labelled")
    examples = open_labelled(name, split, data_dir)
    examples.name = source
    return examples


def open_captioned(source: Any, split: str, options: CaptionOptions) -> list[Examples]:
    """Opens a split with captions, for each source of a mixture."""
    sources = list(source) if isinstance(source, Mapping) else [source]
    opened = [_open_captioned(one, split, options) for one in sources]
    if options.templates is not None and not any(x.captions.of_classes for x in opened):
        raise ValueError(
            "Expected templates with a source of classes alone; received: "
            f"templates={options.templates!r} for {[x.name for x in opened]}"
        )
    return opened


def has_captions(source: str, split: str, data_dir: str | None) -> bool:
    """Whether a source has captions and not only class names."""
    (examples,) = open_captioned(source, split, CaptionOptions(data_dir=data_dir))
    return not examples.captions.of_classes


def _open_captioned(source: Any, split: str, options: CaptionOptions) -> Examples:
    if isinstance(source, tuple):
        examples = captioned_arrays(*source)
        examples.name = "arrays"
        return examples
    open_kind, name = _find(source, "open_captioned")
    examples = open_kind(name, split, options)
    if examples is None:
        labelled = open_source(source, split, options.data_dir)
        examples = captions_of_classes(labelled, options)
    examples.name = source
    return examples


def load_texts(source: str, split: str, data_dir: str | None = None) -> tuple[str, ...]:
    """Loads the documents of a source of texts into memory.

    Args:
        source: `"text:PATH"`, `"tfds:NAME"`, `"tfrecord:GLOB"` or `"python_docs"`; see
            "Texts" in docs/data.md.
        split: `"train"`, `"validation"`, `"test"` or `"all"`, or one that the source
            has itself.
        data_dir: folder of TensorFlow Datasets.

    Example:

    >>> from keras_moe.data import load_texts
    >>> any("is a generator" in text for text in load_texts("python_docs", "all"))
    True
    """
    return tuple(read_texts(source, split, data_dir))


def read_texts(source: str, split: str, data_dir: str | None = None) -> Iterator[str]:
    """Yields the documents of `load_texts`, one at a time."""
    open_texts, name = _find(source, "open_texts")
    text = None
    for text in open_texts(name, split, data_dir):
        yield text
    if text is None:
        expected = "documents in the split"
        raise unfit(expected, f"none in source={source!r}, split={split!r}")


def class_names(source: str, data_dir: str | None = None) -> tuple[str, ...] | None:
    """Returns the class names of a source of `load` by label, or None if it has none.

    Args:
        source: see `load`, also for `data_dir`.

    Example:

    >>> from keras_moe.data import class_names
    >>> class_names("digits")[:3]
    ('0', '1', '2')
    """
    find_classes, name = _find(source, "find_classes")
    return find_classes(name, data_dir).names


def credit(source: object) -> str | None:
    """Returns who owns a source's pictures, to show with them; None if unknown.

    Args:
        source: a source of `load` or `load_pairs`.

    Example:

    >>> from keras_moe.data import credit
    >>> credit("emoji")
    'OpenMoji, the open-source emoji and icon project (openmoji.org), CC BY-SA 4.0'
    >>> credit("folder:photos") is None
    True
    """
    if not isinstance(source, str):
        return None
    kind, _, name = source.partition(":")
    function = getattr({**_ALONE, **_NAMED}.get(kind), "credit", lambda name: None)
    return function(name)


def num_classes(source: str, data_dir: str | None = None) -> int:
    """Returns the number of classes of a source of `load`, without a download.

    Args:
        source: see `load`, also for `data_dir`.

    Example:

    >>> from keras_moe.data import num_classes
    >>> num_classes("digits")
    10
    """
    find_classes, name = _find(source, "find_classes")
    return find_classes(name, data_dir).count
