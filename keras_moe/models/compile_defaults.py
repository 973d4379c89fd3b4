"""Losses and metrics that fit a classifier's outputs and labels."""

import warnings
from typing import Any

import keras

from keras_moe.losses import SigmoidCrossentropy

# Losses that take probabilities by default, by function.
_CROSSENTROPIES = {
    keras.losses.binary_crossentropy: keras.losses.BinaryCrossentropy,
    keras.losses.binary_focal_crossentropy: keras.losses.BinaryFocalCrossentropy,
    keras.losses.categorical_crossentropy: keras.losses.CategoricalCrossentropy,
    keras.losses.categorical_focal_crossentropy: (
        keras.losses.CategoricalFocalCrossentropy
    ),
    keras.losses.sparse_categorical_crossentropy: (
        keras.losses.SparseCategoricalCrossentropy
    ),
}
_SPARSE = keras.losses.SparseCategoricalCrossentropy


def default_optimizer(policy: keras.DTypePolicy) -> keras.optimizers.Optimizer:
    """The optimizer of `compile(optimizer="auto")`."""
    # With bfloat16 weights beside float32 routers, TensorFlow cannot take the norm of
    # all gradients together.
    global_clipnorm = 1.0 if policy.variable_dtype == "float32" else None
    return keras.optimizers.AdamW(
        3e-4, weight_decay=1e-4, global_clipnorm=global_clipnorm
    )


def default_loss(multi_label: bool, from_logits: bool) -> keras.losses.Loss:
    """The loss of `compile(loss="auto")`."""
    return (SigmoidCrossentropy if multi_label else _SPARSE)(from_logits=from_logits)


def loss_of_outputs(loss: Any, from_logits: bool) -> Any:
    """A loss that takes logits or probabilities, as the outputs are.

    Keras's crossentropies by name, and as functions, would take logits for
    probabilities. Loss objects stay as they are; those that would do the same warn.
    """
    if isinstance(loss, (list, tuple, dict)):
        return keras.tree.map_structure(
            lambda each: loss_of_outputs(each, from_logits), loss
        )
    crossentropy = _crossentropy(loss)
    if crossentropy is not None:
        return crossentropy(from_logits=from_logits)
    reads_logits = getattr(loss, "from_logits", from_logits)
    if isinstance(loss, keras.losses.Loss) and reads_logits != from_logits:
        outputs = "logits" if from_logits else "probabilities"
        warnings.warn(
            f"The model's outputs are {outputs}: expected a loss with "
            f"from_logits={from_logits}; received: {type(loss).__name__}"
            f"(from_logits={reads_logits})",
            stacklevel=4,
        )
    return loss


def _crossentropy(loss):
    """The class of a crossentropy that is given by name or as a function, or None."""
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            return None  # Keras knows further names, and refuses the others.
        if type(loss) in _CROSSENTROPIES.values():
            return type(loss)
    return next((cls for f, cls in _CROSSENTROPIES.items() if f is loss), None)


def default_metrics(
    loss: Any, multi_label: bool, num_classes: int, from_logits: bool
) -> list:
    """The metrics of `compile(metrics="auto")`."""
    is_sparse = any(isinstance(each, _SPARSE) for each in keras.tree.flatten(loss))
    if multi_label and not is_sparse:
        return [keras.metrics.AUC(curve="PR", from_logits=from_logits, name="auc")]
    if is_sparse:
        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    if num_classes == 1:
        # Keras's own choice would take a logit for a probability.
        threshold = 0.0 if from_logits else 0.5
        return [keras.metrics.BinaryAccuracy("accuracy", threshold=threshold)]
    # Keras chooses by the shape of the labels, with any loss.
    return ["accuracy"]
