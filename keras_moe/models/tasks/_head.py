"""Head and loss of a classifier."""

import math
import warnings
from typing import Any

import keras

from keras_moe._checks import check_number, check_one_of
from keras_moe.layers import MuMoE
from keras_moe.layers._layer import layer_argument
from keras_moe.ops._initializers import PathInitializer

HEAD_POSITIONS = ("final", "penultimate")
# Loss classes by function, for losses that read probabilities by default.
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


def mumoe_head(head: Any, head_position: str, num_classes: int, dtype: Any) -> Any:
    """Creates the unbuilt muMoE head from a layer or its arguments; None for none."""
    check_one_of("head_position", head_position, HEAD_POSITIONS)
    if isinstance(head, dict) and "class_name" not in head:
        head = MuMoE(**{"units": num_classes, **head})
    elif head is not None:
        head = layer_argument(head, "head")
    if head is None and head_position == "final":
        return None
    if not isinstance(head, MuMoE):
        raise ValueError(
            "Expected head to be a MuMoE, or None with head_position='final'; "
            f"received: head={head}, head_position={head_position!r}"
        )
    if head_position == "final" and head.units != num_classes:
        raise ValueError(
            "Expected a final head whose units are the classes; received: "
            f"units={head.units}, num_classes={num_classes}"
        )
    return type(head).from_config({**head.get_config(), "name": "head", "dtype": dtype})


def predictions_layer(
    num_classes: int, activation: str | None, head_bias: Any, dtype: Any
) -> keras.layers.Dense:
    """Creates the dense layer from features to classes, unbuilt."""
    if head_bias == "prior":
        head_bias = -math.log(num_classes)
    bias = keras.initializers.Constant(check_number("head_bias", head_bias))
    return keras.layers.Dense(
        num_classes,
        activation=activation,
        kernel_initializer=PathInitializer("zeros"),
        bias_initializer=PathInitializer(bias),
        dtype=dtype,
        name="predictions",
    )


def loss_of_outputs(loss: Any, from_logits: bool) -> Any:
    """Returns a loss that reads logits or probabilities, whichever the outputs are.

    Keras's crossentropies given by name or as functions would treat logits as
    probabilities. Loss objects are kept, with a warning if they would do the same.
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
    """Returns the class of a crossentropy given by name or function, or None."""
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            return None  # Other names are left to Keras.
        if type(loss) in _CROSSENTROPIES.values():
            return type(loss)
    return next((cls for f, cls in _CROSSENTROPIES.items() if f is loss), None)
