"""The dense feed-forward layer of a transformer.

Axes: D hidden, H mlp.
"""

from typing import Any

import keras

from keras_moe.checks import check_dropout, check_integer, check_seed
from keras_moe.layers import activations
from keras_moe.layers.dropped_out import dropped_out
from keras_moe.layers.fused_bias import fused_bias
from keras_moe.layers.inner_call import inner_call
from keras_moe.ops.cost import Cost
from keras_moe.ops.initializers import FastInitializer


@keras.saving.register_keras_serializable("keras_moe")
class MLP(keras.layers.Layer):
    """Two dense layers: D to H, activation, H to D.

    Args:
        mlp_dim: H, the hidden size.
        activation: activation between the layers, `"gelu_tanh"` as in the JAX models,
            or any that Keras knows.
        dropout: dropout rate after each of the two layers.
        seed: seed of the dropout.
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape:
        (..., D).

    Output shape:
        (..., D).

    Raises:
        ValueError: if an argument is out of range.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import MLP
    >>> tuple(MLP(mlp_dim=16)(np.ones((2, 4, 8), "float32")).shape)
    (2, 4, 8)
    """

    def __init__(
        self,
        mlp_dim: int,
        activation: Any = "gelu_tanh",
        dropout: float = 0.0,
        seed: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.mlp_dim = check_integer("mlp_dim", mlp_dim)
        self.activation = activations.get(activation)
        self.dropout = check_dropout("dropout", dropout)
        self.seed = check_seed("seed", seed)
        self.dropout_layer = keras.layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy, name="dropout"
        )

    def build(self, input_shape):
        small = FastInitializer(keras.initializers.RandomNormal(stddev=1e-6))

        def dense(units, name):
            layer = keras.layers.Dense(
                units,
                kernel_initializer=FastInitializer("glorot_uniform"),
                bias_initializer=small,
                dtype=self.dtype_policy,
                name=name,
            )
            return fused_bias(layer)

        self.hidden = dense(self.mlp_dim, "hidden")
        self.hidden.build(input_shape)
        self.output_dense = dense(input_shape[-1], "output")
        self.output_dense.build((*input_shape[:-1], self.mlp_dim))

    def call(self, tokens: Any, training: bool | None = None) -> Any:
        x = self.activation(inner_call(self.hidden, tokens))
        x = dropped_out(self.dropout_layer, x, training)
        x = inner_call(self.output_dense, x)
        return dropped_out(self.dropout_layer, x, training)

    def compute_output_shape(self, input_shape):
        return input_shape

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by path.

        Args:
            shape: (num_tokens, dim).
        """
        _, dim = shape
        return {
            "hidden/kernel": (dim, self.mlp_dim),
            "hidden/bias": (self.mlp_dim,),
            "output/kernel": (self.mlp_dim, dim),
            "output/bias": (dim,),
        }

    def cost(self, shape: tuple[int, int]) -> Cost:
        """The cost for tokens of one image.

        Args:
            shape: (num_tokens, dim).
        """
        num_tokens, dim = shape
        flops = 4 * num_tokens * dim * self.mlp_dim
        return Cost.all_active(self.weight_shapes(shape), flops)

    def get_config(self):
        config = super().get_config()
        config.update(
            mlp_dim=self.mlp_dim,
            activation=activations.serialize(self.activation),
            dropout=self.dropout,
            seed=self.seed,
        )
        return config
