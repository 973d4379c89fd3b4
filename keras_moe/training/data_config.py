"""The section `data` of a recipe: which images, in which batches."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_moe import data
from keras_moe.checks import check_integer, check_one_of
from keras_moe.data.augmentation import LABEL_MIXING_NAMES
from keras_moe.data.pairs.opening import (
    EMOJI_OPTIONS,
    SourceOptions,
    is_emoji,
    open_all,
)
from keras_moe.training.section import Section

# Settings that pairs alone have, and the options of `load_pairs` among them.
_PAIR_OPTIONS = ("captions", "templates", "style", "language", "size")
_OF_PAIRS = (*_PAIR_OPTIONS, "epoch_size", "test_source")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The images that a recipe trains and evaluates on.

    Args:
        batch_size: images in a step.
        source: the source of images, see `keras_moe.data.load`; or of pairs, see
            `keras_moe.data.load_pairs`: a name, or a dict from names to weights, such
            as `{"webdataset:a/*.tar": 3, "folder:b": 1}`, which are mixed.
        train_split: the split to train on.
        test_split: the split to evaluate on after each epoch.
        augment: names of augmentations, or dicts of a name and its options, in order;
            see `keras_moe.data.load`.
        exclude: a file of images not to train on, or a list of such, see
            `keras_moe.data.load`.
        unreadable: `"exclude"` leaves out images that cannot be read, which are looked
            for before the run, see `keras_moe.data.load`; None ends the run at one,
            with the name of its file.
        captions: choice of a caption, for pairs: `"random"` draws one of an image's in
            each pass, `"first"` takes its first, and with `"all"` each makes a pair.
            None is `"random"` in training.
        templates: captions of a source of classes, for pairs, with `{}` for the class's
            name: a string, a list of such, or the path of a file. None for the name.
        style: drawings of the emoji; None for OpenMoji's.
        language: language of the emoji's names; None for English.
        size: side at which emoji are drawn; None for that of the images.
        epoch_size: number of pairs in an epoch; None counts those of the source, for
            which archives are read once.
        test_source: the source of pairs to evaluate on, which has `test_split`; None
            for `source`, or for the first source of a mixture.

    Raises:
        ValueError: if a setting is out of range, or is not JSON.

    Example:

    >>> from keras_moe.training import DataConfig
    >>> config = DataConfig(source="tfds:imagenet2012", batch_size=4096)
    >>> config.replace(source="digits", batch_size=64).test_split
    'test'
    """

    title = "data"

    batch_size: int
    source: str | dict = "digits"
    train_split: str = "train"
    test_split: str = "test"
    augment: Sequence = ()
    exclude: str | Sequence | None = None
    unreadable: str | None = None
    captions: str | None = None
    templates: str | Sequence | None = None
    style: str | None = None
    language: str | None = None
    size: int | None = None
    epoch_size: int | None = None
    test_source: str | None = None

    def __post_init__(self):
        check_integer("batch_size", self.batch_size)
        _check_source(self.source)
        for name in ("style", "language", "test_source"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(
                    f"Expected {name} to be a string or None; "
                    f"received: {name}={value!r}"
                )
        for name in ("size", "epoch_size"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))
        # Checks the rest, as far as no data are needed.
        data.PairOptions(**self.pair_options())
        if self.unreadable is not None:
            check_one_of("unreadable", self.unreadable, ("exclude",))
        super().__post_init__()
        # Images that `left_out` has searched for, by `data_dir`.
        object.__setattr__(self, "_left_out", {})

    def replace(self, **changes: Any) -> "DataConfig":
        """Images with other settings.

        Args:
            **changes: any setting. With another `source` the splits are "train" and
                "test", the test source is that source, and options of the emoji are
                None without any, unless they are given, too.

        Raises:
            ValueError: if a setting is unknown or out of range.
        """
        if changes.get("source", self.source) != self.source:
            defaults = {x.name: x.default for x in dataclasses.fields(self)}
            names = ("train_split", "test_split", "test_source")
            if not any(is_emoji(name) for name in _sources(changes["source"])):
                names += EMOJI_OPTIONS
            for name in names:
                changes.setdefault(name, defaults[name])
        return super().replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        """All settings, JSON-serialisable, but for those of pairs that are None."""
        settings = super().to_dict()
        return {
            name: value
            for name, value in settings.items()
            if name not in _OF_PAIRS or value is not None
        }

    def pair_options(self) -> dict[str, Any]:
        """The options of `keras_moe.data.load_pairs` that are set.

        Example:

        >>> from keras_moe.training import DataConfig
        >>> DataConfig(batch_size=8, source="emoji", language="de").pair_options()
        {'language': 'de'}
        """
        options = {name: getattr(self, name) for name in (*_PAIR_OPTIONS, "unreadable")}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def evaluated_source(self) -> str:
        """The source of pairs to evaluate on.

        Example:

        >>> from keras_moe.training import DataConfig
        >>> DataConfig(batch_size=8, source={"emoji": 3, "digits": 1}).evaluated_source
        'emoji'
        """
        return self.test_source or next(iter(_sources(self.source)))

    def test_pair_options(self, data_dir: str | None = None) -> dict[str, Any]:
        """The options of `keras_moe.data.load_pairs` for the pairs to evaluate on.

        They are the same in each evaluation, with the first of captions where training
        draws one. Templates are those of the classes in a mixture, and other options
        those of its emoji.

        Args:
            data_dir: folder of TensorFlow Datasets.
        """
        options = self.pair_options()
        if options.get("captions", "random") == "random":
            options["captions"] = "first"
        source, split = self.evaluated_source, self.test_split
        if "templates" in options and source != self.source:
            (pairs,) = open_all(source, split, SourceOptions(data_dir=data_dir))
            if not pairs.has_classes:
                del options["templates"]
        if source != self.source and not is_emoji(source):
            options = {k: x for k, x in options.items() if k not in EMOJI_OPTIONS}
        return options

    @property
    def mixes_labels(self) -> bool:
        """Whether an augmentation makes vectors of labels, such as mixup."""
        names = [x.get("name") if isinstance(x, dict) else x for x in self.augment]
        return any(name in LABEL_MIXING_NAMES for name in names)

    def left_out(self, data_dir: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The images that `exclude` and `unreadable` leave out.

        All images may be decoded to find them: this object does so once.

        Args:
            data_dir: folder of TensorFlow Datasets.

        Returns:
            Sorted indices, int64, of the training and of the test images.

        Raises:
            ValueError: as `keras_moe.data.load`.
        """
        if data_dir not in self._left_out:
            self._left_out[data_dir] = tuple(
                data.excluded_examples(
                    self.source, split, data_dir, exclude, self.unreadable or "raise"
                )
                for split, exclude in (
                    (self.train_split, self.exclude or ()),
                    (self.test_split, ()),
                )
            )
        return self._left_out[data_dir]


def _sources(source):
    """The names in a source, which may be a mixture."""
    return source if isinstance(source, dict) else [source]


def _check_source(source):
    """Raises ValueError unless `source` is a name, or a dict of positive weights."""
    if isinstance(source, str):
        return
    weights = source.values() if isinstance(source, dict) else ()
    are_numbers = all(
        isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < math.inf
        for x in weights
    )
    if not weights or not are_numbers or not all(isinstance(x, str) for x in source):
        raise ValueError(
            "Expected source to be a name, or a dict from names to weights above 0; "
            f"received: source={source!r}"
        )
