"""The section `data` of a recipe: which images, in which batches."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_moe import data
from keras_moe.checks import check_integer, check_one_of
from keras_moe.data.augmentation import LABEL_MIXING_NAMES
from keras_moe.training.section import Section


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The images that a recipe trains and evaluates on.

    Args:
        batch_size: images in a step.
        source: the source of images, see `keras_moe.data.load`.
        train_split: the split to train on.
        test_split: the split to evaluate on after each epoch.
        augment: names of augmentations, or dicts of a name and its options, in order;
            see `keras_moe.data.load`.
        exclude: a file of images not to train on, or a list of such, see
            `keras_moe.data.load`.
        unreadable: `"exclude"` leaves out images that cannot be read, which are looked
            for before the run, see `keras_moe.data.load`; None ends the run at one,
            with the name of its file.

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
    source: str = "digits"
    train_split: str = "train"
    test_split: str = "test"
    augment: Sequence = ()
    exclude: str | Sequence | None = None
    unreadable: str | None = None

    def __post_init__(self):
        check_integer("batch_size", self.batch_size)
        if self.unreadable is not None:
            check_one_of("unreadable", self.unreadable, ("exclude",))
        super().__post_init__()
        # Images that `left_out` has searched for, by `data_dir`.
        object.__setattr__(self, "_left_out", {})

    def replace(self, **changes: Any) -> "DataConfig":
        """Images with other settings.

        Args:
            **changes: any setting. With another `source` the splits are "train" and
                "test", unless they are given, too.

        Raises:
            ValueError: if a setting is unknown or out of range.
        """
        if changes.get("source", self.source) != self.source:
            defaults = {x.name: x.default for x in dataclasses.fields(self)}
            for name in ("train_split", "test_split"):
                changes.setdefault(name, defaults[name])
        return super().replace(**changes)

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
