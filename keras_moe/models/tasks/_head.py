"""Head and loss of a classifier: from tokens to classes. Axes: B batch, N tokens."""

import math
import warnings
from typing import Any

import keras
from keras import ops

from keras_moe._checks import check_number, check_one_of, outer_stack_level, unfit
from keras_moe._types import Tensor
from keras_moe.layers import LayerNorm, MuMoE
from keras_moe.layers._layer import layer_argument
from keras_moe.layers.pooling import pooling_layer
from keras_moe.ops._initializers import PathInitializer

HEAD_POSITIONS = ("final", "penultimate")
# What an ensemble's outputs are, of which it averages the probabilities.
SOFTMAX, SIGMOID, PROBABILITIES = "softmax", "sigmoid", "probabilities"
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
# Keras's signatures take names only.
_initializer: Any = PathInitializer


def head_layers(
    backbone_config,
    policy,
    num_classes,
    pooling=None,
    representation_dim=None,
    head_bias=0.0,
    output_activation=None,
    dropout=0.0,
    pooled_norm=False,
    head=None,
    head_position="final",
    pooling_query_key_norm=None,
    **_,
):
    """Returns the unbuilt layers from tokens to classes in order, by name."""
    layers = [pooling_layer(backbone_config, pooling, pooling_query_key_norm, policy)]
    if pooled_norm:
        epsilon = backbone_config["layer_norm_epsilon"]
        layers.append(LayerNorm(epsilon, dtype=policy, name="pooled_norm"))
    if representation_dim is not None:
        layers.append(
            keras.layers.Dense(
                representation_dim,
                activation="tanh",
                kernel_initializer=_initializer("lecun_normal", "pre_logits/kernel"),
                dtype=policy,
                name="pre_logits",
            )
        )
    seed = backbone_config["seed"]
    seed = None if seed is None else seed + 1
    layers.append(
        keras.layers.Dropout(dropout, seed=seed, dtype=policy, name="output_dropout")
    )
    mumoe = _mumoe_head(head, head_position, num_classes, policy)
    layers += [] if mumoe is None else [mumoe]
    if mumoe is not None and head_position == "final":
        predictions = keras.layers.Activation(
            output_activation, dtype=policy, name="predictions"
        )
    else:
        if head_bias == "prior":
            head_bias = -math.log(num_classes)
        bias = keras.initializers.Constant(check_number("head_bias", head_bias))
        predictions = keras.layers.Dense(
            num_classes,
            activation=output_activation,
            kernel_initializer=_initializer("zeros"),
            bias_initializer=_initializer(bias),
            dtype=policy,
            name="predictions",
        )
    return {layer.name: layer for layer in (*layers, predictions)}


class MembersMean(keras.layers.Layer):
    """The mean probabilities (B, C) of an ensemble, or logits of them."""

    def __init__(self, ensemble_size: int, kind: str, **kwargs):
        super().__init__(**kwargs)
        self.ensemble_size, self.kind = ensemble_size, kind

    def call(self, outputs: Tensor, training: bool | None = None) -> Tensor:
        """Takes (B M, C), the members of an example one after the other."""
        # In training each member has a loss of its own.
        members = ops.reshape(outputs, (-1, self.ensemble_size, outputs.shape[-1]))
        return members if training else self.mean(members)

    def mean(self, members: Tensor) -> Tensor:
        """Averages (B, M, C)."""
        x = ops.cast(members, "float32")
        if self.kind == PROBABILITIES:
            x = ops.mean(x, axis=1)
        elif self.kind == SIGMOID:
            # log(p / (1 - p)) of the mean p
            x = ops.logsumexp(ops.log_sigmoid(x), axis=1) - ops.logsumexp(
                ops.log_sigmoid(-x), axis=1
            )
        else:
            x = ops.logsumexp(ops.log_softmax(x, axis=-1), axis=1)
            x = x - math.log(members.shape[1])
        return ops.cast(x, self.compute_dtype)

    def compute_output_shape(self, input_shape):
        return (None, input_shape[-1])


def _mumoe_head(head, head_position, num_classes, dtype):
    """Creates the unbuilt muMoE head from a layer or its arguments; None for none."""
    check_one_of("head_position", head_position, HEAD_POSITIONS)
    if isinstance(head, dict) and "class_name" not in head:
        head = MuMoE(**{"units": num_classes, **head})
    elif head is not None:
        head = layer_argument(head, "head")
    if head is None and head_position == "final":
        return None
    if not isinstance(head, MuMoE):
        expected = "head to be a MuMoE, or None with head_position='final'"
        raise unfit(expected, head=head, head_position=head_position)
    if head_position == "final" and head.units != num_classes:
        expected = "a final head whose units are the classes"
        raise unfit(expected, units=head.units, num_classes=num_classes)
    return type(head).from_config({**head.get_config(), "name": "head", "dtype": dtype})


def loss_of_outputs(loss, from_logits):
    """Returns a loss that reads logits or probabilities, whichever the outputs are."""
    if isinstance(loss, (list, tuple, dict)):
        return keras.tree.map_structure(
            lambda each: loss_of_outputs(each, from_logits), loss
        )
    crossentropy = _crossentropy(loss)
    if crossentropy is not None:
        # Keras's would treat logits as probabilities.
        return crossentropy(from_logits=from_logits)
    reads_logits = getattr(loss, "from_logits", from_logits)
    if isinstance(loss, keras.losses.Loss) and reads_logits != from_logits:
        outputs = "logits" if from_logits else "probabilities"
        warnings.warn(
            f"The model's outputs are {outputs}: expected a loss with "
            f"from_logits={from_logits}; received: {type(loss).__name__}"
            f"(from_logits={reads_logits})",
            stacklevel=outer_stack_level(),
        )
    return loss


def _crossentropy(loss) -> Any:
    """Returns the class of a crossentropy given by name or function, or None."""
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            return None  # Other names are left to Keras.
        if type(loss) in _CROSSENTROPIES.values():
            return type(loss)
    return next((cls for f, cls in _CROSSENTROPIES.items() if f is loss), None)
