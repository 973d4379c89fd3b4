"""The settings that the blocks of one encoder share, and its layers.

Axes: N tokens, D hidden, H mlp.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from keras_moe.checks import check_bool, check_dropout, check_seed
from keras_moe.layers.encoder_block import EncoderBlock, MoEEncoderBlock
from keras_moe.layers.mlp import MLP
from keras_moe.layers.moe_layers import check_num_layers

# Each block draws at this many sites: the block's dropout, the token mixer, the
# feed-forward layer and the router.
_SITES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """The settings that the blocks of one encoder share.

    Args:
        num_layers: number of blocks.
        num_tokens: N, the tokens of an example.
        mlp_dim: H of the dense feed-forward layers.
        activation: activation of the feed-forward layers.
        dropout_rate: dropout rate of token mixers' outputs and dense layers.
        stochastic_depth: drop rate of the last block, to which the rate grows linearly
            from 0 at the first block.
        layer_norm_epsilon: epsilon of all normalisations.
        rematerialize: whether training keeps the blocks' inputs only.
        moe: `MoEConfig` or `MuMoEConfig`, or None for dense blocks.
        seed: seed of noise, dropout and stochastic depth; each site has one of its own
            that follows from it.
        dtype: dtype policy.

    Raises:
        ValueError: if an argument is out of range.

    Example:

    >>> from keras_moe.layers import EncoderSpec, MoEConfig, SelfAttention
    >>> spec = EncoderSpec(num_layers=2, num_tokens=9, mlp_dim=16, moe=MoEConfig())
    >>> blocks = spec.blocks(lambda index: SelfAttention(num_heads=2, key_dim=4))
    >>> [type(block).__name__ for block in blocks]
    ['EncoderBlock', 'MoEEncoderBlock']
    """

    num_layers: int
    num_tokens: int
    mlp_dim: int
    activation: Any = "gelu_tanh"
    dropout_rate: float = 0.0
    stochastic_depth: float = 0.0
    layer_norm_epsilon: float = 1e-6
    rematerialize: bool = False
    moe: Any = None
    seed: int | None = None
    dtype: Any = None

    def __post_init__(self):
        check_num_layers(self.num_layers)
        check_seed("seed", self.seed)
        check_dropout("stochastic_depth", self.stochastic_depth)
        check_bool("rematerialize", self.rematerialize)

    def seed_of(self, index: int, site: int) -> int | None:
        """The seed of a site: 0 the block, 1 its mixer, 2 its experts, 3 its router.

        Args:
            index: index of the block; -1 is the embedding, whose site is 0.
            site: number of the site.
        """
        return None if self.seed is None else self.seed + _SITES * (index + 1) + site

    def mlp(self, index: int) -> MLP:
        """The dense feed-forward layer of a block, not built.

        Args:
            index: index of the block.
        """
        return MLP(
            self.mlp_dim,
            self.activation,
            self.dropout_rate,
            self.seed_of(index, 2),
            dtype=self.dtype,
            name="mlp",
        )

    def blocks(
        self, token_mixer: Callable[[int], keras.layers.Layer]
    ) -> tuple[EncoderBlock, ...]:
        """The blocks, not built, called `block_0`, `block_1` and so on.

        Args:
            token_mixer: function from a block's index to the layer through which its
                tokens see each other.
        """
        if self.moe is None:
            feed_forwards = [self.mlp(index) for index in range(self.num_layers)]
        else:
            feed_forwards = self.moe.feed_forwards(self)
        depth_step = self.stochastic_depth / max(self.num_layers - 1, 1)
        return tuple(
            (MoEEncoderBlock if hasattr(feed_forward, "router") else EncoderBlock)(
                token_mixer(index),
                feed_forward,
                dropout=self.dropout_rate,
                layer_norm_epsilon=self.layer_norm_epsilon,
                seed=self.seed_of(index, 0),
                rematerialize=self.rematerialize,
                stochastic_depth=index * depth_step,
                dtype=self.dtype,
                name=f"block_{index}",
            )
            for index, feed_forward in enumerate(feed_forwards)
        )
