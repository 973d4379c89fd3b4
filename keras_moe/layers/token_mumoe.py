"""muMoE across tokens, the token mixer of muMoE mixers.

Axes: B batch, N tokens, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.layers.mumoe import MuMoEBlock
from keras_moe.layers.nested import build_once, layer_argument
from keras_moe.layers.token_mlp import check_num_tokens, known_num_tokens


@keras.saving.register_keras_serializable("keras_moe")
class TokenMuMoE(keras.layers.Layer):
    """A `MuMoEBlock` across the tokens, whose inputs are the D channels.

    Like `TokenMLP` it serves images of one size. Each channel has coefficients of its
    own; they are no record of tokens, and do not leave the layer.

    Args:
        block: a `MuMoEBlock`.
        **kwargs: see `keras.layers.Layer`.

    Input shape:
        (B, N, D).

    Output shape:
        (B, N, D).

    Raises:
        ValueError: if the number of tokens is unknown, or another one.

    Reference:
        *Multilinear Mixture of Experts*, section 4.3.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import MuMoEBlock, TokenMuMoE
    >>> layer = TokenMuMoE(MuMoEBlock(16, num_experts=4, rank=8))
    >>> tuple(layer(np.ones((1, 4, 8), "float32")).shape)
    (1, 4, 8)
    """

    def __init__(self, block: Any, **kwargs):
        super().__init__(**kwargs)
        self.block = layer_argument(block, "block")
        if not isinstance(self.block, MuMoEBlock):
            raise ValueError(f"Expected block to be a MuMoEBlock; received: {block}")

    def build(self, input_shape):
        self.num_tokens = known_num_tokens(input_shape)
        build_once(self.block, (input_shape[0], input_shape[2], input_shape[1]))

    def call(self, tokens: Any, training: bool | None = None) -> Any:
        check_num_tokens(tokens, self.num_tokens)
        channels = ops.transpose(tokens, (0, 2, 1))
        outputs, _ = self.block(channels, training=training)
        return ops.transpose(outputs, (0, 2, 1))

    def compute_output_spec(self, tokens, training=None):
        return keras.KerasTensor(tokens.shape, self.compute_dtype)

    def parameters(self, num_tokens: int, dim: int) -> int:
        """The number of parameters for (B, num_tokens, dim)."""
        return self.block.parameters(num_tokens)

    def active_parameters(self, num_tokens: int, dim: int) -> int:
        """The number of parameters that one token meets: all."""
        return self.parameters(num_tokens, dim)

    def flops(self, num_tokens: int, dim: int) -> int:
        """Floating-point operations (2 per multiply-add)."""
        return self.block.flops(dim, num_tokens)

    def get_config(self):
        config = super().get_config()
        config.update(block=keras.saving.serialize_keras_object(self.block))
        return config
