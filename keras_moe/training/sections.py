"""Recipe sections: settings that share a heading in a file; data and model here."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from keras_moe import _checks, data
from keras_moe.data.augmentation import LABEL_MIXING_NAMES
from keras_moe.data.selection import left_out
from keras_moe.data.sources import has_captions, open_source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Base class of a recipe's sections: frozen dataclasses with JSON values."""

    title: ClassVar[str] = "settings"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for kind, article in ((str, "a string"), (dict, "a dict")):
                if field.type is kind and not isinstance(value, kind):
                    expected = f"{field.name} to be {article}"
                    raise _checks.unfit(expected, f"{field.name}={value!r}")
            # Copied and normalised, as if it came from a file.
            object.__setattr__(self, field.name, json_copy(field.name, value))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Builds a section from the settings of a file."""
        names = [field.name for field in dataclasses.fields(cls)]
        _checks.check_argument_names(
            {**settings}, names, f"the section {cls.title!r} of a recipe"
        )
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings as JSON data for `from_settings`."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with changed settings."""
        return type(self).from_settings({**self.to_dict(), **changes})


def json_copy(name: str, value: Any) -> Any:
    """Returns a copy of a value after a round trip through JSON."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise _checks.unfit(f"{name} to be JSON", f"{name}={value!r}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model that a recipe trains.

    In files and in `to_dict`, overrides are on the same level as the preset:
    `{"preset": "vmoe_b16", "num_experts": 8}`.

    Args:
        preset: a name for `keras_moe.models.from_preset`.
        dtype: dtype policy. `"mixed_float16"` scales the loss.
        load_weights: whether training starts from the preset's weights, if it has any.
        overrides: arguments that override the preset's, such as `{"num_experts": 8}`.
            Classes come from the data and the seed from the recipe.

    Example:

    >>> from keras_moe.training import ModelConfig
    >>> config = ModelConfig.from_settings({"preset": "vmoe_b16", "num_experts": 8})
    >>> config.replace(router="soft").overrides
    {'num_experts': 8, 'router': 'soft'}
    """

    title = "model"

    preset: str
    dtype: str = "float32"
    load_weights: bool = True
    overrides: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        _checks.check_bool("load_weights", self.load_weights)
        _checks.check_dtype("dtype", self.dtype)
        # These follow from the data and the recipe.
        for name in ("num_classes", "seed"):
            if name in self.overrides:
                expected = f"no {name} of the model, which the recipe or its data have"
                raise _checks.unfit(expected, **{name: self.overrides[name]})

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Builds the section from a file's settings; unknown names are overrides."""
        own = {
            name: settings[name]
            for name in ("preset", "dtype", "load_weights")
            if name in settings
        }
        overrides = {name: x for name, x in settings.items() if name not in own}
        return super().from_settings({**own, "overrides": overrides})

    def replace(self, **changes: Any) -> Self:
        """Returns a changed copy; a new `preset` loads its weights by default."""
        if changes.get("preset", self.preset) != self.preset:
            changes = {"load_weights": True, **changes}
        return super().replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings as JSON data for `from_settings`."""
        settings = super().to_dict()
        overrides = settings.pop("overrides")
        return {**settings, **overrides}


class Datasets(NamedTuple):
    """The batches of a run.

    Attributes:
        train: batches of inputs and targets for `fit`: one epoch or an infinite stream.
            Images are in [-1, 1], labels in the form the loss expects.
        test: the same for evaluation, with unmixed labels.
        num_classes: number of classes, or None if the objective has none.
        steps_per_epoch: number of training batches in an epoch.
        shuffled_test: function that returns the test batches in random order, or None.
    """

    train: Any
    test: Any
    num_classes: int | None
    steps_per_epoch: int
    shuffled_test: Callable[[], Iterable] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Settings shared by all kinds of data; see `ImageData`, `PairData`, `TextData`.

    Args:
        batch_size: number of examples in a step.
        source: source of the examples, see `keras_moe.data.load`.
        train_split: split to train on.
        test_split: split to evaluate on after each epoch.
        augment: augmentations, by name or as dicts; see `keras_moe.data.load`.
        exclude: one or more files that list examples to leave out, see there.
        unreadable: `"exclude"` searches for unreadable images before the run and
            leaves them out. None stops the run at the first one and names its file.

    Example:

    >>> from keras_moe.training import ImageData
    >>> config = ImageData(source="tfds:imagenet2012", batch_size=4096)
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
        _checks.check_integer("batch_size", self.batch_size)
        if self.unreadable is not None:
            _checks.check_one_of("unreadable", self.unreadable, ("exclude",))
        super().__post_init__()

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with changed settings; a new `source` resets the splits."""
        if changes.get("source", self.source) != self.source:
            names = ("train_split", "test_split", "test_source")
            of_class = {x: getattr(type(self), x) for x in names if hasattr(self, x)}
            changes = {**of_class, **changes}
        return super().replace(**changes)

    @property
    def evaluated_source(self) -> str:
        """Source of the examples to evaluate on."""
        return self.source

    def left_out(
        self, data_dir: str | None = None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the examples that a search left out; None without a search."""
        return None

    def steps_per_epoch(self, count: int, batch_size: int) -> int:
        """Returns the number of batches in an epoch of `count` examples."""
        if count < batch_size:
            raise ValueError(
                "Expected a batch no larger than the examples to train on; "
                f"received: batch_size={self.batch_size} for {count} examples of "
                f"source={self.source!r}, train_split={self.train_split!r}. "
                "--batch-size or data.batch_size changes it"
            )
        return count // batch_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData(DataConfig):
    """Images and their classes.

    Args:
        batch_size: number of images in a step.
        source: source of the images; see `DataConfig` for this and all other
            arguments.

    Example: see `DataConfig`.
    """

    # Results of `left_out` by `data_dir`.
    _left_out: ClassVar[dict]

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "_left_out", {})

    @property
    def mixes_labels(self) -> bool:
        """Whether an augmentation, such as mixup, turns labels into vectors."""
        names = [x.get("name") if isinstance(x, dict) else x for x in self.augment]
        return any(name in LABEL_MIXING_NAMES for name in names)

    def left_out(self, data_dir: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sorted indices of train and test images to leave out, cached."""
        if data_dir not in self._left_out:
            self._left_out[data_dir] = tuple(
                left_out(
                    open_source(self.source, split, data_dir),
                    split,
                    exclude,
                    self.unreadable or "raise",
                )
                for split, exclude in (
                    (self.train_split, self.exclude or ()),
                    (self.test_split, ()),
                )
            )
        return self._left_out[data_dir]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedData(DataConfig):
    """Settings of data that may be a mixture of sources."""

    source: str | dict = "digits"
    epoch_size: int | None = None
    test_source: str | None = None

    def __post_init__(self):
        if not self.source or not isinstance(self.source, (str, dict)):
            expected = "source to be a name, or a dict from names to weights"
            raise _checks.unfit(expected, source=self.source)
        for name, weight in self.weights.items():
            _checks.check_positive(f"source[{name!r}]", weight)
        _checks.check_integer("epoch_size", self.epoch_size, optional=True)
        super().__post_init__()

    @property
    def weights(self) -> dict[str, float]:
        """The weights of all sources, which may be mixed."""
        return self.source if isinstance(self.source, dict) else {self.source: 1}

    @property
    def evaluated_source(self) -> str:
        """Source of the examples to evaluate on."""
        return self.test_source or next(iter(self.weights))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairData(MixedData):
    """Images and their captions.

    Args:
        batch_size: number of pairs in a step.
        source: source of the pairs, see `keras_moe.data.load_pairs`; or a mixture, as a
            dict from source to weight: `{"webdataset:a/*.tar": 3, "folder:b": 1}`.
        train_split: see `DataConfig`, also for `test_split`, `augment`, `exclude` and
            `unreadable`.
        captions: how to use several captions of an image: `"random"` (the default in
            training) draws one in each pass, `"first"` always uses the first, `"all"`
            makes a pair of each.
        templates: captions for sources of classes, with `{}` for the class name: a
            string, a list of strings or the path of a file. None uses the bare name.
        epoch_size: pairs in an epoch; None counts them, which reads archives once.
        test_source: source of `test_split`; None uses the (first) training source.

    Example:

    >>> from keras_moe.training import PairData
    >>> PairData(batch_size=8, source={"emoji": 3, "digits": 1}).evaluated_source
    'emoji'
    """

    captions: str | None = None
    templates: str | Sequence | None = None

    def __post_init__(self):
        super().__post_init__()
        # Validates the rest as far as possible without data.
        data.PairOptions(**self.pair_options())

    def pair_options(self) -> dict[str, Any]:
        """Returns the given options as arguments of `keras_moe.data.load_pairs`."""
        names = ("captions", "templates", "unreadable")
        given = [name for name in names if getattr(self, name) is not None]
        return {name: getattr(self, name) for name in given}

    def test_pair_options(self, data_dir: str | None = None) -> dict[str, Any]:
        """Returns options of `keras_moe.data.load_pairs` for the test pairs."""
        options = self.pair_options()
        if options.get("captions", "random") == "random":
            options["captions"] = "first"
        source, split = self.evaluated_source, self.test_split
        is_part = "templates" in options and source != self.source
        if is_part and has_captions(source, split, data_dir):
            del options["templates"]
        return options


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData(MixedData):
    """Texts for language models.

    Texts are tokenized when a run starts, and stay in memory: 2 bytes per token, or 4
    for more than 65,536 ids. Tokens of larger corpora are read from a folder that
    `keras-moe tokenize` made. Documents in a row do not attend to each other.

    Args:
        batch_size: number of rows in a step.
        source: source of the texts, see `keras_moe.data.load_texts`; `"tokens:PATH"`, a
            folder of `keras-moe tokenize`, also `"tokens:gs://bucket/folder"`; or a
            mixture, as a dict from source to weight: `{"text:books": 3, "text:code":
            1}` has 3 rows of the books in each batch for each row of the code.
        train_split: see `DataConfig`.
        test_split: split of documents to evaluate on after each epoch.
        epoch_size: rows in an epoch; None counts those of all sources.
        test_source: see `PairData`.

    Example:

    >>> from keras_moe.training import TextData
    >>> TextData(batch_size=8, source="text:notes").test_split
    'validation'
    """

    source: str | dict = "python_docs"
    test_split: str = "validation"

    def __post_init__(self):
        super().__post_init__()
        for name in ("augment", "exclude", "unreadable"):
            if getattr(self, name):
                raise _checks.unfit(
                    f"no {name} for texts", f"{name}={getattr(self, name)!r}"
                )
        # Packed rows and their tokenizer, by source and `data_dir`.
        object.__setattr__(self, "packed", {})
