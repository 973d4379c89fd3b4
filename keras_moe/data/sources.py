"""Sources of examples by name, and their classes."""

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from keras_moe.data import (
    _fashion_mnist,
    _folder,
    _openclipart,
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
from keras_moe.data.labels import Classes


class Source(NamedTuple):
    """A kind of source; its functions receive what follows the colon in the name.

    Fields:
        classes: function of (name, data_dir) to the classes, without a download; None
            for sources without labels.
        labelled: function of (name, split, data_dir) to examples with labels.
        captioned: function of (name, split, `CaptionOptions`) to examples with
            captions, or to None if they only have labels; None for kinds without
            captions.
        alone: whether the kind is a source without a name, such as "digits".
        named: whether it is a source with a name, such as "tfds:cifar10".
    """

    classes: Callable[[str, str | None], Classes] | None = None
    labelled: Callable[[str, str, str | None], Examples] | None = None
    captioned: Callable[[str, str, CaptionOptions], Examples | None] | None = None
    alone: bool = False
    named: bool = True


def _of_module(module: Any, **names: bool) -> Source:
    """Builds a source from a module's functions."""
    functions = ("find_classes", "open_labelled", "open_captioned")
    return Source(*(getattr(module, name, None) for name in functions), **names)


SOURCES = {
    "digits": _of_module(digits, alone=True, named=False),
    "emoji": _of_module(emoji, alone=True),
    "fashion_mnist": _of_module(_fashion_mnist, alone=True, named=False),
    "folder": _of_module(_folder),
    "openclipart": _of_module(_openclipart),
    "tfds": _of_module(_tfds),
    "tfrecord": _of_module(_tfrecord),
    "webdataset": _of_module(_webdataset),
}


def find_source(source: Any) -> tuple[Source, str]:
    """Returns the kind and the name of a source; errors suggest the nearest names."""
    if isinstance(source, str):
        kind, colon, name = source.partition(":")
        found = SOURCES.get(kind)
        if found and (found.named if name else found.alone and not colon):
            return found, name
    hint = ""
    if isinstance(source, str) and source:
        known = [kind for kind in SOURCES if SOURCES[kind].alone]
        guesses = difflib.get_close_matches(source, known, cutoff=0.75)
        kind = "folder" if Path(source).is_dir() else "tfds"
        guesses.append(f"{kind}:{source.split(':')[-1] or 'NAME'}")
        hint = f"; did you mean {' or '.join(map(repr, guesses))}?"
    raise ValueError(
        "Expected 'digits', 'emoji', 'emoji:noto', 'fashion_mnist', 'tfds:NAME', "
        "'tfrecord:GLOB', 'folder:PATH', 'openclipart:PATH' or, for captions, "
        f"'webdataset:GLOB'; received: source={source!r}{hint}"
    )


def open_source(source: str, split: str, data_dir: str | None) -> Examples:
    """Opens a split with labels; downloads missing data of `tfds:`."""
    kind, name = find_source(source)
    if kind.labelled is None:
        raise ValueError(
            "Expected a source with labels, not with captions alone; received: "
            f"source={source!r}"
        )
    examples = kind.labelled(name, split, data_dir)
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
    if isinstance(source, tuple) and len(source) == 2:
        examples = captioned_arrays(*source)
        examples.name = "arrays"
        return examples
    if not isinstance(source, str):
        raise ValueError(
            "Expected the name of a source, a dict of names and weights, or a tuple of "
            f"images and captions; received: {type(source).__name__}"
        )
    kind, name = find_source(source)
    examples = None
    if kind.captioned is not None:
        examples = kind.captioned(name, split, options)
    if examples is None:
        labelled = open_source(source, split, options.data_dir)
        examples = captions_of_classes(labelled, options)
    examples.name = source
    return examples


def class_names(source: str, data_dir: str | None = None) -> tuple[str, ...] | None:
    """Returns the class names of a source of `load`, without a download.

    Args:
        source: a source of `load`.
        data_dir: folder of TensorFlow Datasets.

    Returns:
        The names in the order of the labels, or None if there are none.

    Example:

    >>> from keras_moe.data import class_names
    >>> class_names("digits")[:3]
    ('0', '1', '2')
    """
    return _classes(source, data_dir).names


def num_classes(source: str, data_dir: str | None = None) -> int:
    """Returns the number of classes of a source of `load`, without a download.

    Args:
        source: a source of `load`.
        data_dir: folder of TensorFlow Datasets.

    Example:

    >>> from keras_moe.data import num_classes
    >>> num_classes("digits")
    10
    """
    return _classes(source, data_dir).count


def _classes(source, data_dir) -> Classes:
    kind, name = find_source(source)
    if kind.classes is None:
        raise ValueError(f"Expected a source with labels; received: source={source!r}")
    return kind.classes(name, data_dir)
