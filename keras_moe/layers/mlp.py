"""MLPs on and across tokens. Axes: B batch, N tokens, D hidden, H mlp."""

import keras
from keras import ops

from keras_moe._checks import check_bool, check_dropout, check_integer, check_seed
from keras_moe._errors import unfit
from keras_moe._types import Activation, Tensor
from keras_moe.layers import activations
from keras_moe.layers._layer import Layer, dropped_out, inner_call, projection
from keras_moe.ops.cost import Cost


@keras.saving.register_keras_serializable("keras_moe")
class MLP(Layer):
    """Two dense layers, D to H to D, with an activation between them.

    With `gated=True` it is `output(activation(gate(x)) * hidden(x))`, as in LLaMA.

    Args:
        mlp_dim: H, hidden size.
        activation: `"gelu_tanh"` as in the JAX models, or any Keras activation.
        dropout: dropout rate after each layer.
        seed: seed of the dropout.
        gated: whether a second layer of size H gates the first.
        use_bias: whether the dense layers have biases.
        **kwargs: arguments of `keras.layers.Layer`.

    Reference: *GLU Variants Improve Transformer*, for gated layers.

    Example:

    >>> from keras_moe.layers import MLP
    >>> tuple(MLP(mlp_dim=16)(np.ones((2, 4, 8), "float32")).shape)
    (2, 4, 8)
    """

    def __init__(
        self,
        mlp_dim: int,
        activation: Activation = "gelu_tanh",
        dropout: float = 0.0,
        seed: int | None = None,
        gated: bool = False,
        use_bias: bool = True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.gated = check_bool("gated", gated)
        self.use_bias = check_bool("use_bias", use_bias)
        self.mlp_dim = check_integer("mlp_dim", mlp_dim)
        self.activation = activations.get(activation)
        self.dropout = check_dropout("dropout", dropout)
        self.seed = check_seed("seed", seed)
        self.dropout_layer = keras.layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy, name="dropout"
        )

    def build(self, input_shape):
        small = keras.initializers.RandomNormal(stddev=1e-6)

        def dense(units, name):
            return projection(
                self,
                keras.layers.Dense,
                name,
                units,
                use_bias=self.use_bias,
                kernel="glorot_uniform",
                bias=small,
            )

        self.hidden = dense(self.mlp_dim, "hidden")
        self.hidden.build(input_shape)
        if self.gated:
            self.gate = dense(self.mlp_dim, "gate")
            self.gate.build(input_shape)
        self.output_dense = dense(input_shape[-1], "output")
        self.output_dense.build((*input_shape[:-1], self.mlp_dim))

    def call(self, tokens: Tensor, training: bool | None = None) -> Tensor:
        x = inner_call(self.hidden, tokens)
        if self.gated:
            x = self.activation(inner_call(self.gate, tokens)) * x
        else:
            x = self.activation(x)
        x = dropped_out(self.dropout_layer, x, training)
        x = inner_call(self.output_dense, x)
        return dropped_out(self.dropout_layer, x, training)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        _, dim = shape
        sizes = {"hidden": (dim, self.mlp_dim), "output": (self.mlp_dim, dim)}
        if self.gated:
            sizes["gate"] = sizes["hidden"]
        shapes = {}
        for name, (inputs, units) in sizes.items():
            shapes[f"{name}/kernel"] = (inputs, units)
            if self.use_bias:
                shapes[f"{name}/bias"] = (units,)
        return shapes

    def cost(self, shape: tuple) -> Cost:
        num_tokens, dim = shape
        flops = (6 if self.gated else 4) * num_tokens * dim * self.mlp_dim
        return Cost.all_active(self.weight_shapes(shape), flops)


@keras.saving.register_keras_serializable("keras_moe")
class TokenMLP(MLP):
    """MLP across tokens, shared by all D channels.

    Its weights fix the number of tokens, and so the image size.

    Args:
        mlp_dim: H, hidden size.
        **kwargs: arguments of `MLP`.

    Reference: *MLP-Mixer: An all-MLP Architecture for Vision*, equation 1.

    Example:

    >>> from keras_moe.layers import TokenMLP
    >>> tuple(TokenMLP(mlp_dim=16)(np.ones((1, 4, 8), "float32")).shape)
    (1, 4, 8)
    """

    def build(self, input_shape):
        self.num_tokens = known_num_tokens(input_shape)
        super().build((input_shape[0], input_shape[2], input_shape[1]))

    def call(self, tokens: Tensor, training: bool | None = None) -> Tensor:
        check_num_tokens(tokens, self.num_tokens)
        x = ops.transpose(tokens, (0, 2, 1))
        return ops.transpose(super().call(x, training=training), (0, 2, 1))

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        return super().weight_shapes(shape[::-1])


def known_num_tokens(input_shape: tuple) -> int:
    """Returns N, which layers with weights across tokens must know."""
    if len(input_shape) != 3 or input_shape[1] is None:
        expected = "tokens of shape (batch, tokens, dim) with a known number of tokens"
        raise unfit(expected, f"shape={tuple(input_shape)}")
    return input_shape[1]


def check_num_tokens(tokens: Tensor, num_tokens: int) -> None:
    """Checks that the layer was built for this number of tokens."""
    if tokens.shape[1] != num_tokens:
        expected = f"{num_tokens} tokens, for which the layer was built"
        raise unfit(expected, f"shape={tuple(tokens.shape)}")
