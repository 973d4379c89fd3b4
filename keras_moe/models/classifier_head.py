"""Pooling, head, loss and metrics of a classifier.

Axes: B batch, N tokens, D hidden.
"""

import math
import warnings
from typing import Any

import keras
import keras_hub

from keras_moe.checks import (
    argument_names,
    check_argument_names,
    check_bool,
    check_one_of,
)
from keras_moe.layers import AttentionPooling, LayerNorm, MuMoE, TokenPooling
from keras_moe.layers.inner_call import layer_argument
from keras_moe.layers.pooling import POOLINGS
from keras_moe.losses import SigmoidCrossentropy
from keras_moe.models.backbone import MoEBackbone
from keras_moe.ops.initializers import FastInitializer

HEAD_POSITIONS = ("final", "penultimate")
OUTPUT_ACTIVATIONS = (None, "softmax", "sigmoid")
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
_SPARSE = keras.losses.SparseCategoricalCrossentropy


def check_backbone(backbone: Any, backbone_cls: type) -> None:
    backbone_cls = backbone_cls or keras_hub.models.Backbone
    if not isinstance(backbone, backbone_cls):
        raise ValueError(
            f"Expected backbone to be a {backbone_cls.__name__}; "
            f"received: backbone={backbone!r}"
        )


def backbone_arguments(backbone: Any) -> dict[str, Any]:
    """Returns the backbone arguments that the head depends on."""
    if isinstance(backbone, MoEBackbone):
        return backbone.arguments
    return backbone.get_config()


def check_output_activation(output_activation: str | None, multi_label: bool) -> None:
    """Raises ValueError for an activation that does not fit the labels."""
    check_one_of("output_activation", output_activation, OUTPUT_ACTIVATIONS)
    if output_activation == ("softmax" if multi_label else "sigmoid"):
        raise ValueError(
            "Expected a sigmoid for multi_label=True and a softmax otherwise; "
            f"received: output_activation={output_activation!r}, "
            f"multi_label={multi_label}"
        )


def check_head(
    head: Any, head_position: str, num_classes: int, head_bias: Any
) -> MuMoE | None:
    """Returns the muMoE head, from a layer or its config, after checking it."""
    check_one_of("head_position", head_position, HEAD_POSITIONS)
    if head is None:
        if head_position != "final":
            raise ValueError(
                "Expected a head=MuMoE(...) before the dense one; received: "
                f"head=None, head_position={head_position!r}"
            )
        return None
    if isinstance(head, dict) and "class_name" not in head:
        names = argument_names(MuMoE)
        check_argument_names(head, names, "MuMoE")
        if "num_experts" not in head:
            raise ValueError(f"Expected num_experts of a head; received: head={head}")
        head = MuMoE(**{"units": num_classes, **head})
    else:
        head = layer_argument(head, "head")
    if not isinstance(head, MuMoE):
        raise ValueError(f"Expected head to be None or a MuMoE; received: head={head}")
    if head_position == "final" and head.units != num_classes:
        raise ValueError(
            "Expected a final head whose units are the classes; received: "
            f"units={head.units}, num_classes={num_classes}"
        )
    if head_position == "final" and head_bias != 0.0:
        raise ValueError(
            "Expected head_bias=0.0 with a final MuMoE, whose experts have biases of "
            f"their own; received: head_bias={head_bias!r}"
        )
    if head_position == "penultimate" and head.edited_outputs:
        raise ValueError(
            "Expected edited_outputs of a final head alone; received: "
            f"edited_outputs={head.edited_outputs}, head_position='penultimate'"
        )
    return head


def check_pooling(pooling: str | None, class_token: bool) -> str:
    """Returns the pooling or its default, if the backbone supports it."""
    if pooling is None:
        return "class_token" if class_token else "average"
    if pooling not in POOLINGS:
        raise ValueError(
            f"Expected pooling to be None or one of {POOLINGS}; "
            f"received: pooling={pooling!r}"
        )
    if pooling in ("class_token", "patch_average") and not class_token:
        raise ValueError(
            f"Expected a backbone with class_token=True for pooling={pooling!r}; "
            "received: class_token=False"
        )
    if pooling == "first" and class_token:
        raise ValueError(
            "Expected a backbone with class_token=False for pooling='first', which "
            "takes the first patch's token; received: class_token=True"
        )
    return pooling


def pooling_layer(
    backbone_config: dict, pooling: str, query_key_norm: bool | None, dtype: Any
) -> Any:
    """Creates the pooling layer, unbuilt."""
    if query_key_norm is None:
        query_key_norm = backbone_config.get("query_key_norm", False)
    elif pooling != "map":
        raise ValueError(
            "Expected pooling='map' with pooling_query_key_norm; received: "
            f"pooling={pooling!r}, pooling_query_key_norm={query_key_norm!r}"
        )
    if pooling == "map" and "num_heads" not in backbone_config:
        raise ValueError(
            "Expected pooling=None or 'average' for a backbone without attention "
            "heads; received: pooling='map'"
        )
    if pooling != "map":
        return TokenPooling(pooling, dtype=dtype, name="pooler")
    return AttentionPooling(
        backbone_config["num_heads"],
        backbone_config["mlp_dim"],
        activation=backbone_config.get("activation", "gelu_tanh"),
        layer_norm_epsilon=backbone_config.get("layer_norm_epsilon", 1e-6),
        query_key_norm=query_key_norm,
        query_key_norm_bias=(
            query_key_norm and backbone_config.get("query_key_norm_bias", False)
        ),
        dtype=dtype,
        name="pooler",
    )


def pooled_norm_layer(
    backbone_config: dict, pooled_norm: bool, dtype: Any
) -> LayerNorm | None:
    """Creates the norm of the pooled vector, unbuilt; None for none."""
    if not check_bool("pooled_norm", pooled_norm):
        return None
    epsilon = backbone_config["layer_norm_epsilon"]
    return LayerNorm(epsilon, dtype=dtype, name="pooled_norm")


def dropout_layer(
    backbone_config: dict, rate: float, dtype: Any
) -> keras.layers.Dropout:
    """Creates the dropout before the head, seeded from the backbone."""
    seed = backbone_config["seed"]
    return keras.layers.Dropout(
        rate,
        seed=None if seed is None else seed + 1,
        dtype=dtype,
        name="output_dropout",
    )


def head_layer(head: MuMoE | None, dtype: Any) -> MuMoE | None:
    """Creates an unbuilt muMoE head with the arguments of `head`."""
    if head is None:
        return None
    config = {**head.get_config(), "name": "head", "dtype": dtype}
    return type(head).from_config(config)


def predictions_layer(
    num_classes: int,
    activation: str | None,
    head_bias: Any,
    is_dense: bool,
    dtype: Any,
) -> keras.layers.Layer:
    """Creates the last layer: dense, or just an activation after a muMoE head."""
    if not is_dense:
        return keras.layers.Activation(activation, dtype=dtype, name="predictions")
    bias = keras.initializers.Constant(bias_value(head_bias, num_classes))
    return keras.layers.Dense(
        num_classes,
        activation=activation,
        kernel_initializer=FastInitializer("zeros"),
        bias_initializer=FastInitializer(bias),
        dtype=dtype,
        name="predictions",
    )


def bias_value(head_bias: Any, num_classes: int) -> float:
    """Returns the number for `head_bias`, which may be `"prior"`."""
    if head_bias == "prior":
        return -math.log(num_classes)
    if isinstance(head_bias, str) or not math.isfinite(head_bias):
        raise ValueError(
            "Expected head_bias to be a finite number or 'prior'; "
            f"received: head_bias={head_bias!r}"
        )
    return float(head_bias)


def default_loss(multi_label: bool, from_logits: bool) -> keras.losses.Loss:
    return (SigmoidCrossentropy if multi_label else _SPARSE)(from_logits=from_logits)


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


def default_metrics(
    loss: Any, multi_label: bool, num_classes: int, from_logits: bool
) -> list:
    is_sparse = any(isinstance(each, _SPARSE) for each in keras.tree.flatten(loss))
    if multi_label and not is_sparse:
        return [keras.metrics.AUC(curve="PR", from_logits=from_logits, name="auc")]
    if is_sparse:
        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    if num_classes == 1:
        # Keras's own choice would treat logits as probabilities.
        threshold = 0.0 if from_logits else 0.5
        return [keras.metrics.BinaryAccuracy("accuracy", threshold=threshold)]
    # Keras chooses by label shape, whatever the loss.
    return ["accuracy"]
