"""Evaluation while a model is trained: few-shot now, others by the same interface."""

import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_moe.evaluation.few_shot import SEEDS, few_shot_from_model
from keras_moe.evaluation.ridge_regression import L2S
from keras_moe.files import write_json
from keras_moe.processes import process_index
from keras_moe.training.periodic import PeriodicCallback, written_if_possible
from keras_moe.training.weight_averages import averages_in_place


class PeriodicEvaluation(PeriodicCallback):
    """Evaluates a model every so many epochs or steps.

    An evaluator is any callable that takes the model and returns a dict from names to
    numbers. It may predict and evaluate with the model, and must not change its
    weights; where the optimizer keeps averages of these, it sees the averages. Its
    figures have its name before theirs, such as `"few_shot/5_shot"`, in
    the logs, the history and `records`.

    Args:
        evaluators: callables by name.
        every: number of epochs or steps between evaluations.
        unit: `"epochs"` or `"steps"`.
        path: a JSON file for `records`, which the first process writes each time; None
            for none. Where it cannot be written there is a warning, and all of them are
            tried next time.

    Raises:
        ValueError: if there is no evaluator, or an argument is out of range.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from keras_moe.training import PeriodicEvaluation
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> size = lambda model: {"weights": model.count_params()}
    >>> callback = PeriodicEvaluation({"size": size})
    >>> x = np.ones((4, 1))
    >>> sorted(model.fit(x, x, verbose=0, callbacks=[callback]).history)
    ['loss', 'size/weights']
    """

    def __init__(
        self,
        evaluators: Mapping[str, Callable[[keras.Model], Mapping[str, float]]],
        every: int = 1,
        unit: str = "epochs",
        path: str | os.PathLike | None = None,
    ):
        super().__init__(every, unit)
        if not isinstance(evaluators, Mapping) or not evaluators:
            raise ValueError(
                "Expected a dict of at least one evaluator; "
                f"received: evaluators={evaluators!r}"
            )
        for name, evaluator in evaluators.items():
            if not callable(evaluator):
                raise ValueError(
                    "Expected callables from a model to a dict; "
                    f"received: {name}={evaluator!r}"
                )
        self.evaluators = dict(evaluators)
        self.path = path

    def measure(self):
        figures = {}
        for name, evaluator in self.evaluators.items():
            # `fit` evaluates the averages, too.
            with averages_in_place(self.model):
                results = evaluator(self.model)
            for key, value in results.items():
                if not isinstance(value, numbers.Real):
                    raise ValueError(
                        f"Expected numbers of the evaluator {name!r}; "
                        f"received: {key}={value!r}"
                    )
                figures[f"{name}/{key}"] = float(value)
        return figures

    def measured(self, record):
        if self.path is not None and not process_index():
            with written_if_possible(self.path):
                write_json(self.path, self.records)


class FewShot:
    """An evaluator: k-shot accuracy of the features that a classifier's head reads.

    Features of a model of pairs are its embeddings of images.

    Args:
        train_data: the pool from which shots are drawn, see
            `keras_moe.evaluation.few_shot_from_model`; read each time.
        test_data: the same for the test images.
        shots: the numbers k of training examples per class.
        l2s: penalties.
        seeds: one draw of the shots for each.
        num_classes: number of classes; the highest label + 1 by default.
        batch_size: size of the batches of data given as arrays.

    Returns:
        Called with a model, the mean accuracy over the seeds by k, as `"5_shot"`.

    Raises:
        ValueError: if a model has no features.

    Example:

    >>> import numpy as np
    >>> from keras_moe import models
    >>> from keras_moe.training import FewShot
    >>> labels = np.arange(6) % 2
    >>> images = np.ones((6, 16, 16, 1), "float32") * labels[:, None, None, None]
    >>> model = models.from_preset(
    ...     "vmoe_digits", num_classes=2, num_layers=2, load_weights=False
    ... )
    >>> FewShot((images, labels), (images, labels), shots=(1,))(model)
    {'1_shot': 1.0}
    """

    def __init__(
        self,
        train_data: Any,
        test_data: Any,
        shots: Sequence[int] = (5, 10),
        l2s: Sequence[float] = L2S,
        seeds: Sequence[int] = SEEDS,
        num_classes: int | None = None,
        batch_size: int = 64,
    ):
        self.train_data, self.test_data = train_data, test_data
        self.options = {
            "shots": tuple(shots),
            "l2s": tuple(l2s),
            "seeds": tuple(seeds),
            "num_classes": num_classes,
            "batch_size": batch_size,
        }
        self._of, self._features = None, None

    def __call__(self, model: keras.Model) -> dict[str, float]:
        if self._of is not model:
            # Compiled once, not at each evaluation.
            self._of, self._features = model, _feature_model(model)
        result = few_shot_from_model(
            self._features, self.train_data, self.test_data, verbose=0, **self.options
        )
        return {f"{k}_shot": float(x) for k, x in zip(result.shots, result.mean)}


def _feature_model(model):
    encoder = getattr(getattr(model, "backbone", model), "encoder", None)
    if encoder is not None:
        return encoder("image")
    features = getattr(model, "features", None)
    if isinstance(features, Mapping):
        features = features.get("pooled")
    if features is None:
        raise ValueError(
            "Expected a classifier or a backbone with features; "
            f"received: {type(model).__name__}"
        )
    return keras.Model(model.input, features)
