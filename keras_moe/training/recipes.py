"""Published training settings as data."""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe import data, models
from keras_moe.checks import (
    check_argument_names,
    check_bool,
    check_integer,
    check_not_negative,
    check_one_of,
    check_positive,
)
from keras_moe.data.augmentation import LABEL_MIXING_NAMES
from keras_moe.files import write_json
from keras_moe.losses import SigmoidCrossentropy, SparseSigmoidCrossentropy
from keras_moe.training.best_epoch import BestEpoch, check_best
from keras_moe.training.metrics import MeanAveragePrecision, PrecisionAt1
from keras_moe.training.optimizers import StopAfterBatches, make_optimizer
from keras_moe.training.parameter_groups import check_groups, group_factors
from keras_moe.training.schedules import (
    DECAYS,
    check_cooldown,
    check_length,
    warmup_schedule,
)
from keras_moe.training.weight_averages import EvaluateAverages

DECAY_TIMES = ("learning_rate", "share_of_peak")


class Datasets(NamedTuple):
    """What a recipe trains on.

    Attributes:
        train: batches of images in [-1, 1] and one-hot or mixed labels, in any form
            that `fit` takes with `steps_per_epoch`: of one epoch, or without end.
        test: the same for evaluation, with labels that are not mixed.
        num_classes: the number of classes.
        steps_per_epoch: batches of `train` in an epoch.
    """

    train: Any
    test: Any
    num_classes: int
    steps_per_epoch: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train a model: everything but the machine.

    The learning rate has a warm-up and a decay, for which the number of steps must be
    known; hence `model` asks for it. A step is an update of the weights, with or
    without accumulation. Labels are vectors, since mixing
    makes them so: the loss is the cross-entropy with these, and the accuracy on test
    images that of their one class. Models with `multi_label=True` have the sum of
    sigmoid losses instead.

    Args:
        name: of the recipe.
        preset: what `keras_moe.models.from_preset` takes.
        batch_size: images in a step.
        learning_rate: at the end of the warm-up.
        epochs: passes over the training images, or None where there are `steps`.
        steps: steps in the place of `epochs`.
        warmup_steps: steps in which the learning rate rises from 0.
        decay: `"cosine"` or `"linear"`, to `final_learning_rate` at the last step;
            `"rsqrt"`, a reciprocal square root, or `"constant"`.
        timescale: of `"rsqrt"`: so many steps after the warm-up, the learning rate is
            0.71 of that at its end.
        cooldown_steps: the last steps, in which the learning rate of `"rsqrt"` or
            `"constant"` falls on a line to `final_learning_rate`.
        final_learning_rate: after the last step of the schedule.
        schedule_steps: steps of the schedule, where it is not as long as the run: after
            them the run goes on with `final_learning_rate`. None for all its steps.
        optimizer: `"vitg_adafactor"`, or the name of a Keras optimizer; see
            `optimizer_class`.
        optimizer_options: its further arguments, such as `{"beta_2": 0.95}`.
        weight_decay: of all weights alike, but for `groups`; 0 for none.
        weight_decay_times: `"learning_rate"`, that of the step, as `AdamW` of Keras and
            PyTorch and the V-MoE release have it; or `"share_of_peak"`, the same
            divided by `learning_rate`, as big_vision has it.
        groups: dicts that give weights learning rates and weight decay of their own,
            such as `{"match": "head", "weight_decay": 10.0}`, a factor; see
            `ParameterGroups`.
        gradient_clipping: largest norm of all gradients together, or None.
        gradient_accumulation_steps: the batches into which that of a step is divided,
            one after the other, where memory is short. Tokens compete for experts, and
            losses of routers are taken, within each of them.
        ema_momentum: share that an average of the weights keeps of itself in each step;
            the model is evaluated, and left, with the averages. None for no average.
        model_arguments: override the preset's; a nested one, such as
            `router_options`, is replaced as a whole. The number of classes follows from
            the data, `dtype` and `seed` are the recipe's own.
        data: the source of images, see `keras_moe.data.load`.
        train_split: the split to train on.
        test_split: the split to evaluate on after each epoch.
        augment: names of augmentations, or dicts of a name and its options, in order;
            see `keras_moe.data.load`.
        multi_label: whether images have several labels. The model then has
            `multi_label=True`, the labels stay numbers of classes unless `augment`
            mixes them, and the metrics are precision at 1 and mean average precision.
        hierarchy: with `multi_label`, a file of a `keras_moe.data.LabelHierarchy`.
        max_labels: see `keras_moe.data.load`.
        exclude: a file of images not to train on, or a list of such, see
            `keras_moe.data.load`.
        unreadable: `"exclude"` leaves out images that cannot be read, which are looked
            for before the run, see `keras_moe.data.load`; None ends the run at one,
            with the name of its file.
        monitor: a metric of the history by which epochs are compared; None for the
            accuracy, or with several labels the precision at 1, of the test images.
        monitor_mode: `"max"` or `"min"`, see `BestEpoch`.
        patience: epochs without a better one after which the run ends; None for never.
        best: `"keep"` keeps the checkpoint of the best epoch beside the newest ones;
            `"restore"` gives the model its weights at the end, too. None for neither.
        dtype: the dtype policy. With `"mixed_float16"` losses are scaled.
        seed: of weights, noise, order and augmentation.
        description: a line about it.
        source: where the settings are published.
        notes: what differs from there.

    Raises:
        ValueError: if a setting is out of range, or is not JSON.

    Example:

    >>> from keras_moe.training import Recipe
    >>> recipe = Recipe(
    ...     "mine", preset="vmoe_digits", epochs=2, batch_size=32, learning_rate=1e-3
    ... )
    >>> schedule = recipe.schedule(steps_per_epoch=40)
    >>> [round(float(schedule(step)), 6) for step in (0, 40, 80)]
    [0.001, 0.0005, 0.0]
    """

    name: str
    preset: str
    batch_size: int
    learning_rate: float
    epochs: int | None = None
    steps: int | None = None
    warmup_steps: int = 0
    decay: str = "cosine"
    timescale: int = 10_000
    cooldown_steps: int = 0
    final_learning_rate: float = 0.0
    schedule_steps: int | None = None
    optimizer: str = "adamw"
    optimizer_options: dict = dataclasses.field(default_factory=dict)
    weight_decay: float = 0.0
    weight_decay_times: str = "learning_rate"
    groups: Sequence = ()
    gradient_clipping: float | None = 1.0
    gradient_accumulation_steps: int = 1
    ema_momentum: float | None = None
    model_arguments: dict = dataclasses.field(default_factory=dict)
    data: str = "digits"
    train_split: str = "train"
    test_split: str = "test"
    augment: Sequence = ()
    multi_label: bool = False
    hierarchy: str | None = None
    max_labels: int | None = None
    exclude: str | Sequence | None = None
    unreadable: str | None = None
    monitor: str | None = None
    monitor_mode: str | None = None
    patience: int | None = None
    best: str | None = None
    dtype: str = "float32"
    seed: int = 0
    description: str = ""
    source: str = ""
    notes: str = ""

    def __post_init__(self):
        # What `left_out` found, which is no setting.
        object.__setattr__(self, "_left_out", {})
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                "Expected either epochs or steps; "
                f"received: epochs={self.epochs!r}, steps={self.steps!r}"
            )
        length = "steps" if self.epochs is None else "epochs"
        for name in ("batch_size", "timescale", "gradient_accumulation_steps", length):
            check_integer(name, getattr(self, name))
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                "Expected gradient_accumulation_steps to divide batch_size; received: "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}, "
                f"batch_size={self.batch_size}"
            )
        for name in ("warmup_steps", "cooldown_steps", "seed"):
            check_integer(name, getattr(self, name), minimum=0)
        for name in ("weight_decay", "final_learning_rate"):
            check_not_negative(name, getattr(self, name))
        check_positive("learning_rate", self.learning_rate)
        if self.gradient_clipping is not None:
            check_positive("gradient_clipping", self.gradient_clipping)
        check_one_of("decay", self.decay, DECAYS)
        check_cooldown(self.decay, self.cooldown_steps, self.final_learning_rate)
        if self.schedule_steps is not None:
            check_integer("schedule_steps", self.schedule_steps)
        check_best(self.monitor, self.monitor_mode, self.patience, self.best)
        if self.unreadable is not None:
            check_one_of("unreadable", self.unreadable, ("exclude",))
        check_one_of("weight_decay_times", self.weight_decay_times, DECAY_TIMES)
        check_groups(self.groups)
        if check_not_negative("ema_momentum", self.ema_momentum or 0.0) >= 1:
            raise ValueError(
                "Expected ema_momentum to be below 1; "
                f"received: ema_momentum={self.ema_momentum!r}"
            )
        if set(str(self.name)) & set("/\\") or str(self.name) in ("", ".", ".."):
            raise ValueError(
                f"Expected a name without folders; received: name={self.name!r}"
            )
        check_bool("multi_label", self.multi_label)
        for name in ("hierarchy", "max_labels"):
            if getattr(self, name) is not None and not self.multi_label:
                raise ValueError(
                    f"Expected multi_label=True with {name}; "
                    f"received: {name}={getattr(self, name)!r}"
                )
        for name in ("use_ema", "ema_momentum", "ema_overwrite_frequency"):
            if isinstance(self.optimizer_options, dict) and (
                name in self.optimizer_options
            ):
                raise ValueError(
                    f"Expected no {name} in optimizer_options: the recipe's own "
                    "ema_momentum says it; received: "
                    f"{name}={self.optimizer_options[name]!r}"
                )
        for name in ("num_classes", "dtype", "seed"):
            if isinstance(self.model_arguments, dict) and name in self.model_arguments:
                raise ValueError(
                    f"Expected no {name} in model_arguments, which the recipe or its "
                    f"data say; received: {name}={self.model_arguments[name]!r}"
                )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is str and not isinstance(value, str):
                raise ValueError(
                    f"Expected {field.name} to be a string; "
                    f"received: {field.name}={value!r}"
                )
            if field.type is dict and not isinstance(value, dict):
                raise ValueError(
                    f"Expected {field.name} to be a dict; "
                    f"received: {field.name}={value!r}"
                )
            # A copy that nobody else has, as it comes out of a file.
            object.__setattr__(self, field.name, _plain(field.name, value))
        try:
            keras.dtype_policies.get(self.dtype)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "Expected the name of a dtype policy such as 'mixed_bfloat16'; "
                f"received: dtype={self.dtype!r}"
            ) from error

    def replace(self, **overrides: Any) -> "Recipe":
        """A recipe with other settings.

        Args:
            **overrides: any setting. `model_arguments` are added to those that are
                there, nested ones replaced as a whole. With another `data` the splits
                are "train" and "test", unless they are given, too. `epochs` and `steps`
                take each other's place.

        Raises:
            ValueError: if a setting is unknown or out of range.
        """
        fields = {field.name: field for field in dataclasses.fields(self)}
        check_argument_names(overrides, list(fields), "a recipe")
        if isinstance(overrides.get("model_arguments"), dict):
            overrides["model_arguments"] = {
                **self.model_arguments,
                **overrides["model_arguments"],
            }
        if overrides.get("data", self.data) != self.data:
            for name in ("train_split", "test_split"):
                overrides.setdefault(name, fields[name].default)
        for name, other in (("epochs", "steps"), ("steps", "epochs")):
            if overrides.get(name) is not None:
                overrides.setdefault(other, None)
        return dataclasses.replace(self, **overrides)

    def to_dict(self) -> dict:
        """All settings, JSON-serialisable."""
        return dataclasses.asdict(self)

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file that `load_recipe` reads, as a whole or not at all."""
        settings = self.to_dict()
        # The file's name says it.
        settings.pop("name")
        write_json(path, settings)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Updates of the weights in the run.

        Args:
            steps_per_epoch: batches in an epoch: with accumulation, several for each
                update.
        """
        batches = check_integer("steps_per_epoch", steps_per_epoch)
        if self.steps is not None:
            return self.steps
        return self.epochs * batches // self.gradient_accumulation_steps

    def passes(self, steps_per_epoch: int) -> int:
        """How many epochs `fit` needs; `callbacks` end the last one in time.

        Args:
            steps_per_epoch: batches in an epoch.
        """
        batches = check_integer("steps_per_epoch", steps_per_epoch)
        if self.epochs is not None:
            return self.epochs
        return -(-self.steps * self.gradient_accumulation_steps // batches)

    def schedule(
        self, steps_per_epoch: int
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        """The learning rate by step.

        Args:
            steps_per_epoch: batches in an epoch.

        Raises:
            ValueError: if the warm-up is as long as the run, the cooldown begins
                before its end, or the run goes on with a learning rate of 0.
        """
        total = self.total_steps(steps_per_epoch)
        steps = self.schedule_steps or total
        check_length(
            steps, total, self.decay, self.cooldown_steps, self.final_learning_rate
        )
        if self.warmup_steps >= steps:
            raise ValueError(
                f"Expected a warm-up shorter than the run, which has {steps} steps "
                f"(epochs={self.epochs}, {steps_per_epoch} batches in an epoch); "
                f"received: warmup_steps={self.warmup_steps}"
            )
        return warmup_schedule(
            self.decay,
            self.learning_rate,
            steps,
            self.warmup_steps,
            self.final_learning_rate,
            self.timescale,
            self.cooldown_steps,
        )

    def new_model(self, num_classes: int) -> keras.Model:
        """The model with a new head, not yet compiled for this recipe.

        Args:
            num_classes: of the head.
        """
        return models.from_preset(
            self.preset,
            num_classes=num_classes,
            dtype=self.dtype,
            seed=self.seed,
            **{
                **_plain("model_arguments", self.model_arguments),
                **({"multi_label": True} if self.multi_label else {}),
            },
        )

    def compile(self, model: keras.Model, steps_per_epoch: int) -> None:
        """Gives a classifier the recipe's optimizer, loss and metrics.

        Args:
            model: an image classifier.
            steps_per_epoch: batches in an epoch; the schedule ends with the last one.

        Raises:
            ValueError: if the optimizer does not exist, or a group has no weights in
                the model.
        """
        schedule = self.schedule(steps_per_epoch)
        # An optimizer would say it after the first batch.
        group_factors(self.groups, [x.path for x in model.trainable_variables])
        peak = (
            self.learning_rate if self.weight_decay_times == "share_of_peak" else None
        )
        ema = {} if self.ema_momentum is None else {"ema_momentum": self.ema_momentum}
        optimizer = make_optimizer(
            self.optimizer,
            self.optimizer_options,
            learning_rate=schedule,
            weight_decay=float(self.weight_decay),
            peak_learning_rate=peak,
            groups=self.groups,
            global_clipnorm=self.gradient_clipping,
            gradient_accumulation_steps=(
                # Of one batch, Keras knows no accumulation.
                self.gradient_accumulation_steps
                if self.gradient_accumulation_steps > 1
                else None
            ),
            use_ema=bool(ema),
            **ema,
        )
        loss, metrics = self._loss_and_metrics(model)
        # Weighted, so that images which fill up a batch count for nothing.
        model.compile(
            optimizer=optimizer, loss=loss, metrics=None, weighted_metrics=metrics
        )

    def _loss_and_metrics(self, model):
        from_logits = model.output_activation is None
        if self.multi_label:
            numbers = not self._mixes_labels()
            loss = SparseSigmoidCrossentropy if numbers else SigmoidCrossentropy
            precision = MeanAveragePrecision(
                model.output.shape[-1], from_logits=from_logits, sparse_labels=numbers
            )
            return loss(from_logits), [PrecisionAt1(numbers), precision]
        loss = "auto"
        if not model.multi_label:
            loss = keras.losses.CategoricalCrossentropy(from_logits)
        return loss, [keras.metrics.CategoricalAccuracy(name="accuracy")]

    def _mixes_labels(self):
        names = [x.get("name") if isinstance(x, dict) else x for x in self.augment]
        return any(name in LABEL_MIXING_NAMES for name in names)

    def model(self, num_classes: int, steps_per_epoch: int) -> keras.Model:
        """The compiled model.

        Args:
            num_classes: of a new head.
            steps_per_epoch: batches in an epoch; the schedule ends with the last one.

        Raises:
            ValueError: as `keras_moe.models.from_preset`, `schedule` and `compile`.
        """
        self.schedule(steps_per_epoch)  # Before a large model is made for nothing.
        model = self.new_model(num_classes)
        self.compile(model, steps_per_epoch)
        return model

    def callbacks(self, start_step: int = 0) -> list[keras.callbacks.Callback]:
        """What `fit` needs besides the compiled model: callbacks, put before others.

        With `steps` the run ends at the last one, within an epoch if need be. With
        `ema_momentum` the averages of the weights take the weights' place for each
        evaluation, and at the end.

        Args:
            start_step: how many batches were trained on before, for training that goes
                on.
        """
        found: list[keras.callbacks.Callback] = []
        if self.steps is not None:
            batches = self.steps * self.gradient_accumulation_steps
            found.append(StopAfterBatches(batches, start_step))
        if self.ema_momentum is not None:
            found.append(EvaluateAverages())
        return found

    def best_epoch(self) -> BestEpoch | None:
        """The callback that compares epochs, put after others; None if none should."""
        if self.patience is None and self.best is None:
            return None
        metric = "val_precision_at_1" if self.multi_label else "val_accuracy"
        return BestEpoch(self.monitor or metric, self.monitor_mode, self.patience)

    def datasets(
        self,
        image_shape: tuple[int, int, int],
        data_dir: str | None = None,
        start_step: int = 0,
    ) -> Datasets:
        """The images and labels.

        All training batches are full, so that one program serves each step, and they
        have no end: `fit` needs `steps_per_epoch`. A batch follows from the recipe and
        its number alone. On several hosts each has its part
        of a batch; with a distribution of Keras set `auto_shard_dataset=False`.

        Args:
            image_shape: (height, width, channels), the model's.
            data_dir: of TensorFlow Datasets.
            start_step: how many batches were trained on before, for training that
                goes on.

        Raises:
            ValueError: as `keras_moe.data.load`, and if no batch can be filled.
        """
        batch_size = self.batch_size // self.gradient_accumulation_steps
        common = {
            "image_shape": tuple(image_shape),
            "batch_size": batch_size,
            "seed": self.seed,
            "one_hot": not self.multi_label or self._mixes_labels(),
            "data_dir": data_dir,
            "multi_label": self.multi_label,
            "hierarchy": self.hierarchy,
            "max_labels": self.max_labels,
            "shard": data.process_shard(),
        }
        exclude, exclude_from_test = self.left_out(data_dir)
        count = data.num_examples(self.data, self.train_split, data_dir, exclude)
        steps = count // batch_size
        if steps < 1:
            raise ValueError(
                "Expected a batch no larger than the images to train on; "
                f"received: batch_size={self.batch_size}, data={self.data!r}, "
                f"train_split={self.train_split!r}"
            )
        train = data.load(
            self.data,
            self.train_split,
            augment=self.augment,
            shuffle=True,
            repeat=True,
            start_batch=start_step,
            exclude=exclude,
            **common,
        )
        test = data.load(
            self.data,
            self.test_split,
            shuffle=False,
            exclude=exclude_from_test,
            **common,
        )
        return Datasets(train, test, self.num_classes(data_dir), steps)

    def left_out(self, data_dir: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The images that `exclude` and `unreadable` leave out.

        All images may be decoded to find them: this object does so once.

        Args:
            data_dir: of TensorFlow Datasets.

        Returns:
            Sorted indices, int64, of the training and of the test images.

        Raises:
            ValueError: as `keras_moe.data.load`.
        """
        if data_dir not in self._left_out:
            unreadable = self.unreadable or "raise"
            self._left_out[data_dir] = tuple(
                data.excluded_examples(self.data, split, data_dir, given, unreadable)
                for split, given in (
                    (self.train_split, self.exclude or ()),
                    (self.test_split, ()),
                )
            )
        return self._left_out[data_dir]

    def num_classes(self, data_dir: str | None = None) -> int:
        """Number of classes of the images, or of the hierarchy.

        Args:
            data_dir: of TensorFlow Datasets.

        Raises:
            ValueError: as `keras_moe.data.num_classes`.
        """
        if self.hierarchy is not None:
            return len(data.LabelHierarchy.load(self.hierarchy).classes)
        return data.num_classes(self.data, data_dir)


def _plain(name, value):
    """A copy of the value as JSON gives it back."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Expected {name} to be JSON; received: {name}={value!r}"
        ) from error
