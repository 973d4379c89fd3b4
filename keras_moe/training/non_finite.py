"""Finds the origin of NaN and Inf: checks the loss and searches for the layer."""

import contextlib
import math
from typing import NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_moe import _compat
from keras_moe._batches import progress_bar
from keras_moe._types import Structure
from keras_moe.training.callbacks import ProgressCallback

_MARGIN = 4


class NonFiniteLoss(ValueError):
    """A loss, or weights, with NaN or Inf.

    Args:
        step: number of steps before it was detected.
        message: the error message.
        since: first step that may have caused it.

    Example:

    >>> from keras_moe.training import NonFiniteLoss
    >>> NonFiniteLoss(7, "Expected a finite loss; received: loss=nan").step
    7
    """

    def __init__(self, step: int, message: str, since: int = 1):
        super().__init__(message)
        self.step = step
        self.since = since


class NonFinite(NamedTuple):
    """The first non-finite value and its location.

    Attributes:
        what: `"weights"` before the step, `"inputs"` of the model, a layer's `"input"`
            or `"output"`, or of finite values: `"loss"`, `"gradient"`, `"update"`.
        where: path of the layer, such as `"block_1/moe/experts"`, or of the weight.
    """

    what: str
    where: str

    def __str__(self):
        if self.what == "inputs":
            return "in the images or labels of the batch"
        if self.what == "loss":
            return "in the loss, of outputs that are finite"
        return f"in the {self.what} of {self.where}"


class StopOnNonFinite(ProgressCallback):
    """Raises `NonFiniteLoss` when the training loss becomes NaN or Inf."""

    # `fit` may call `on_train_batch_end` from another thread.
    async_safe = True

    def on_train_batch_end(self, batch, logs=None):
        self._check(logs, self.progress.step_of(batch))

    def on_epoch_end(self, epoch, logs=None):
        self._check(logs, self.progress.step)

    def _check(self, logs, step):
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                step,
                f"Expected a finite loss; received: loss={loss} in step {step}",
                # Several threads may check the logs of different steps.
                since=step - _MARGIN,
            )


def locate_non_finite(
    model: keras.Model, x: Structure, y: "Structure | None", gradients: bool = True
) -> NonFinite | None:
    """Finds where a training step first produces NaN or Inf.

    Runs the model op by op in training mode and checks every layer's inputs and
    outputs, inner layers first. Rematerialised layers (`rematerialize=True`) are only
    checked from outside. The model is left unchanged.

    Args:
        model: compiled model with the weights from before the step.
        x: inputs of the batch.
        y: targets of the batch.
        gradients: whether to check gradients if the loss is finite (compiles a step).

    Returns:
        A `NonFinite`, or None if everything is finite.

    Example:

    >>> from keras_moe.training import locate_non_finite
    >>> layer = keras.layers.Activation("exponential", name="exp")
    >>> model = keras.Sequential([keras.Input((1,)), layer])
    >>> model.compile("sgd", "mse")
    >>> images = np.full((2, 1), 1000.0)
    >>> locate_non_finite(model, images, images)
    NonFinite(what='output', where='exp')
    """
    bad = first_non_finite_weight(model)
    if bad is not None:
        return NonFinite("weights", bad)
    if not all(_is_finite(value) for value in tree.flatten([x, y])):
        return NonFinite("inputs", "")
    with _compat.kept_random_states(), _compat.restored(model.variables):
        with _watched_layers(model) as (finished, found):
            y_pred = model(x, training=True)
        if found:
            return found[0]
        y_true = None
        if y is not None:
            y_true = tree.map_structure(ops.convert_to_tensor, y)
        loss = model.compute_loss(x=x, y=y_true, y_pred=y_pred)
        if not _is_finite(loss):
            return NonFinite("loss", "")
        return _bad_gradient(model, x, y, finished) if gradients else None


def first_non_finite_step(model, batches, error, step, verbose):
    """Repeats steps up to an error; returns a step and its `NonFinite`, or None."""
    bar = progress_bar(error.step - step, verbose, "step again")
    for number in range(step + 1, error.step + 1):
        x, y, weight = next(batches)
        is_suspect = number >= error.since
        if is_suspect:
            origin = locate_non_finite(model, x, y, gradients=False)
            if origin is not None:
                return number, origin
            # Copied: on PyTorch the arrays would change with the variables.
            before = [np.array(ops.convert_to_numpy(v.value)) for v in model.variables]
        model.train_on_batch(x, y, sample_weight=weight)
        bad = is_suspect and first_non_finite_weight(model)
        if bad:
            for variable, value in zip(model.variables, before):
                variable.assign(value)
            return number, locate_non_finite(model, x, y) or NonFinite("update", bad)
        bar.update(number - step)
    return None


def first_non_finite_weight(model: keras.Model) -> str | None:
    """Returns the path of the first weight with NaN or Inf, or None."""
    bad = (x.path for x in model.weights if not _is_finite(x.value))
    return next(bad, None)


@contextlib.contextmanager
def _watched_layers(model):
    """Yields the layers that finish, with their paths, and their non-finite values."""
    finished, found, within = [], [], []

    def look(what, path, values):
        if not all(map(_is_finite, tree.flatten(values))):
            found.append(NonFinite(what, path))

    def watched(layer, call):
        def watched_call(*args, **kwargs):
            # Layers without weights have no path.
            path = layer.path or "/".join([*within[-1:], layer.name])
            look("input", path, (args, kwargs))
            within.append(path)
            outputs = call(*args, **kwargs)
            within.pop()
            look("output", path, outputs)
            finished.append((layer, path))
            return outputs

        return watched_call

    layers = [
        layer
        for layer in _compat.flatten_layers(model, include_self=False)
        if not isinstance(layer, keras.layers.InputLayer)
    ]
    for layer in layers:
        layer.call = watched(layer, layer.call)
    try:
        yield finished, found
    finally:
        for layer in layers:
            # Makes the class's method visible again.
            del layer.call


class _GradientProbe(keras.optimizers.Optimizer):
    """Replaces each weight by its gradient."""

    def __init__(self):
        super().__init__(learning_rate=1.0, name="gradient_probe")

    def update_step(self, gradient, variable, learning_rate):
        self.assign(variable, ops.cast(gradient, variable.dtype))


def _bad_gradient(model, x, y, finished):
    optimizer = model.optimizer
    try:
        with _compat.restored(model.metrics_variables):
            model.optimizer = _GradientProbe()
            model.optimizer.build(model.trainable_variables)
            model.make_train_function(force=True)
            model.train_on_batch(x, y)
            bad = {id(v) for v in model.trainable_variables if not _is_finite(v.value)}
    finally:
        model.optimizer = optimizer
        model.train_function = None
    # Gradients flow from the last layer to the first.
    owners = [
        (path, _compat.own_variables(layer, trainable=True))
        for layer, path in reversed(finished)
    ]
    owners += [(variable.path, [variable]) for variable in model.trainable_variables]
    found = (path for path, own in owners if any(id(x) in bad for x in own))
    path = next(found, None)
    return None if path is None else NonFinite("gradient", path)


def _is_finite(value):
    if not ops.is_tensor(value) and not hasattr(value, "dtype"):
        return True
    if "float" not in keras.backend.standardize_dtype(value.dtype):
        return True
    try:
        return bool(ops.all(ops.isfinite(value)))
    except TypeError:
        # Traced values of a JAX transformation cannot be inspected.
        return True
