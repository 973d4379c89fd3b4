"""Pooling, head and loss of a classifier. Axes: B batch, N tokens, D hidden."""

import math
import warnings
from typing import Any

import keras

from keras_moe._checks import check_number, check_one_of
from keras_moe.layers import AttentionPooling, MuMoE, TokenPooling
from keras_moe.layers._layer import layer_argument
from keras_moe.layers.pooling import POOLINGS
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


def check_pooling(pooling: str | None, class_token: bool) -> str:
    """Returns the pooling or its default, if the backbone supports it."""
    if pooling is None:
        return "class_token" if class_token else "average"
    check_one_of("pooling", pooling, POOLINGS)
    needed = {"class_token": True, "patch_average": True, "first": False}
    if needed.get(pooling, class_token) != class_token:
        raise ValueError(
            f"Expected a backbone with class_token={not class_token} for "
            f"pooling={pooling!r}; received: class_token={class_token}"
        )
    return pooling


def pooling_layer(
    config: dict, pooling: str | None, query_key_norm: bool | None, dtype: Any
) -> Any:
    """Creates the pooling layer for a backbone's arguments, unbuilt."""
    pooling = check_pooling(pooling, config.get("class_token", False))
    if pooling == "map" and "num_heads" not in config:
        raise ValueError(
            "Expected pooling=None or 'average' for a backbone without attention "
            "heads; received: pooling='map'"
        )
    if pooling != "map" and query_key_norm is not None:
        raise ValueError(
            "Expected pooling='map' with pooling_query_key_norm; received: "
            f"pooling={pooling!r}, pooling_query_key_norm={query_key_norm!r}"
        )
    if pooling != "map":
        return TokenPooling(pooling, dtype=dtype, name="pooler")
    if query_key_norm is None:
        query_key_norm = config.get("query_key_norm", False)
    return AttentionPooling(
        config["num_heads"],
        config["mlp_dim"],
        activation=config["activation"],
        layer_norm_epsilon=config["layer_norm_epsilon"],
        query_key_norm=query_key_norm,
        query_key_norm_bias=query_key_norm and config.get("query_key_norm_bias", False),
        dtype=dtype,
        name="pooler",
    )


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
