"""What the blocks of one encoder share, and the blocks.

Axes: N tokens, D hidden, H mlp.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from keras_moe.checks import (
    check_bool,
    check_dropout,
    check_integer,
    check_positive,
    check_seed,
)
from keras_moe.layers import activations
from keras_moe.layers.encoder_block import EncoderBlock, MoEEncoderBlock
from keras_moe.layers.mlp import MLP
from keras_moe.layers.moe_config import check_num_layers
from keras_moe.layers.mumoe_config import moe_config

# Each block draws at this many sites: the block's dropout, the token mixer, the
# feed-forward layer and the router.
_SITES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The arguments of an encoder, which all backbones share.

    A backbone extends it by its own arguments; see
    `keras_moe.models.MoEBackbone.config_class`.

    Args:
        hidden_dim: D.
        num_layers: number of blocks.
        mlp_dim: H of the dense feed-forward layers.
        activation: activation of the feed-forward layers.
        dropout_rate: dropout rate on embeddings, token mixers' outputs and dense
            feed-forward layers.
        stochastic_depth: drop rate of the last block; the rate grows linearly from 0 at
            the first block. Training drops residual branches for whole examples; see
            `keras_moe.layers.EncoderBlock`.
        layer_norm_epsilon: epsilon of all normalisations.
        layer_scale_initial_value: initial value of a learned factor for each channel of
            both residual branches of a block, as in DINOv2; None for no factors.
        moe: `MoEConfig` or `MuMoEConfig`, or a dict of its fields: which blocks are
            mixtures of experts, and of what; None for a dense model.
        rematerialize: whether training keeps only the blocks' inputs for the gradient:
            less memory, more time; see `keras_moe.layers.EncoderBlock`.
        seed: seed of noise, dropout and stochastic depth; each site gets its own seed
            from it. Weights are drawn from Keras's global seed.

    Example:

    >>> from keras_moe.layers import EncoderConfig
    >>> EncoderConfig(num_layers=2, moe={"num_experts": 4}).moe.num_experts
    4
    """

    hidden_dim: int = 768
    num_layers: int = 12
    mlp_dim: int = 3072
    activation: Any = "gelu_tanh"
    dropout_rate: float = 0.0
    stochastic_depth: float = 0.0
    layer_norm_epsilon: float = 1e-6
    layer_scale_initial_value: float | None = None
    moe: Any = None
    rematerialize: bool = False
    seed: int | None = None

    def __post_init__(self):
        moe = moe_config(self.moe)
        num_layers = check_num_layers(self.num_layers)
        self._set(
            hidden_dim=check_integer("hidden_dim", self.hidden_dim),
            num_layers=num_layers,
            mlp_dim=check_integer("mlp_dim", self.mlp_dim),
            activation=activations.plain(self.activation),
            moe=moe and moe.for_layers(num_layers),
        )
        check_dropout("dropout_rate", self.dropout_rate)
        check_dropout("stochastic_depth", self.stochastic_depth)
        check_positive("layer_norm_epsilon", self.layer_norm_epsilon)
        if self.layer_scale_initial_value is not None:
            check_positive("layer_scale_initial_value", self.layer_scale_initial_value)
        check_bool("rematerialize", self.rematerialize)
        check_seed("seed", self.seed)

    def _set(self, **values):
        """Sets fields to their checked values, which `__post_init__` alone may do."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def to_dict(self) -> dict:
        """The arguments as plain values, which make an equal config."""
        names = [field.name for field in dataclasses.fields(self)]
        values = {name: copy.deepcopy(getattr(self, name)) for name in names}
        return {**values, "moe": self.moe and self.moe.to_dict()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSpec(EncoderConfig):
    """An `EncoderConfig` for a number of tokens, which makes the blocks.

    Args:
        num_tokens: N, the tokens of an example.
        dtype: dtype policy.
        **kwargs: arguments of `EncoderConfig`.

    Example:

    >>> from keras_moe.layers import EncoderSpec, MoEConfig, SelfAttention
    >>> spec = EncoderSpec(num_layers=2, num_tokens=9, mlp_dim=16, moe=MoEConfig())
    >>> blocks = spec.blocks(lambda index: SelfAttention(num_heads=2, key_dim=4))
    >>> [type(block).__name__ for block in blocks]
    ['EncoderBlock', 'MoEEncoderBlock']
    """

    num_tokens: int
    dtype: Any = None

    @classmethod
    def of(cls, config: EncoderConfig, num_tokens: int, dtype: Any) -> "EncoderSpec":
        """The spec of a backbone's config."""
        shared = [field.name for field in dataclasses.fields(EncoderConfig)]
        values = {name: getattr(config, name) for name in shared}
        return cls(num_tokens=num_tokens, dtype=dtype, **values)

    def seed_of(self, index: int, site: int) -> int | None:
        """The seed of a site: 0 the block, 1 its mixer, 2 its experts, 3 its router.

        The index -1 is the embedding, whose only site is 0.
        """
        return None if self.seed is None else self.seed + _SITES * (index + 1) + site

    def mlp(self, index: int) -> MLP:
        """The dense feed-forward layer of a block, not built."""
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
                layer_scale_initial_value=self.layer_scale_initial_value,
                dtype=self.dtype,
                name=f"block_{index}",
            )
            for index, feed_forward in enumerate(feed_forwards)
        )
