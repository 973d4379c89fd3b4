"""muMoE across tokens, the token mixer of muMoE mixers.

Axes: B batch, N tokens, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.layers.mumoe_block import MuMoEBlock
from keras_moe.layers.nested import build_once, layer_argument
from keras_moe.layers.token_mlp import check_num_tokens, known_num_tokens
from keras_moe.ops.cost import Cost, under


@keras.saving.register_keras_serializable("keras_moe")
class TokenMuMoE(keras.layers.Layer):
    """A `MuMoEBlock` across the tokens, whose inputs are the D channels.

    Like `TokenMLP` it serves images of one size. Each channel has coefficients of its
    own, so that the record's axis of tokens has channels.

    Args:
        block: `MuMoEBlock` across the tokens.
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape:
        (B, N, D).

    Output shape:
        `(tokens, Routing)`: (B, N, D), and the record of the coefficients (B, D, E).

    Raises:
        ValueError: if the number of tokens is unknown, or another one.

    Reference:
        *Multilinear Mixture of Experts*, section 4.3.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import MuMoEBlock, TokenMuMoE
    >>> layer = TokenMuMoE(MuMoEBlock(16, num_experts=4, rank=8))
    >>> tokens, routing = layer(np.ones((1, 4, 8), "float32"))
    >>> tuple(tokens.shape), tuple(routing.gates.shape)
    ((1, 4, 8), (1, 8, 4))
    """

    def __init__(self, block: Any, **kwargs):
        super().__init__(**kwargs)
        self.block = layer_argument(block, "block")
        if not isinstance(self.block, MuMoEBlock):
            raise ValueError(f"Expected block to be a MuMoEBlock; received: {block}")

    def build(self, input_shape):
        self.num_tokens = known_num_tokens(input_shape)
        build_once(self.block, (input_shape[0], input_shape[2], input_shape[1]))

    def call(self, tokens: Any, training: bool | None = None) -> tuple[Any, Any]:
        check_num_tokens(tokens, self.num_tokens)
        channels = ops.transpose(tokens, (0, 2, 1))
        outputs, routing = self.block(channels, training=training)
        return ops.transpose(outputs, (0, 2, 1)), routing

    def ablated(self, tokens: Any, experts: Any) -> Any:
        """The outputs as if one expert's weights were zero; see `MuMoEBlock.ablated`.

        Args:
            tokens: (B, N, D).
            experts: integers (B, L), the place of each example's expert at each level.

        Returns:
            (B, N, D).
        """
        channels = ops.transpose(tokens, (0, 2, 1))
        return ops.transpose(self.block.ablated(channels, experts), (0, 2, 1))

    @property
    def router(self) -> Any:
        """The layer that gives each channel its experts."""
        return self.block.router

    def compute_output_spec(self, tokens, training=None):
        batch, num_tokens, dim = tokens.shape
        channels = keras.KerasTensor((batch, dim, num_tokens), self.compute_dtype)
        _, routing = self.block.compute_output_spec(channels)
        return keras.KerasTensor(tokens.shape, self.compute_dtype), routing

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by path.

        Args:
            shape: (num_tokens, dim).
        """
        return under(self.block.name, self.block.weight_shapes(shape[::-1]))

    def cost(self, shape: tuple[int, int]) -> Cost:
        """The cost for tokens of one image.

        Args:
            shape: (num_tokens, dim).
        """
        return self.block.cost(shape[::-1])

    def get_config(self):
        config = super().get_config()
        config.update(block=keras.saving.serialize_keras_object(self.block))
        return config
