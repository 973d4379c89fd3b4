"""A text transformer, dense or with experts.

Axes: B batch, N tokens, D hidden, H mlp, V vocabulary.
"""

import dataclasses
from typing import Any

import keras

from keras_moe._checks import check_bool, check_integer, check_one_of
from keras_moe._types import DType
from keras_moe.layers import AttentionPooling, MaskedPooling, TowerSpec
from keras_moe.layers.pooling import MASKED_POOLINGS
from keras_moe.models.backbones.base import MoEBackbone, ReadsTexts
from keras_moe.models.backbones.config import TokenIdsConfig, TransformerConfig, takes
from keras_moe.models.backbones.tower import (
    PooledProjection,
    Tower,
    embedding_dropout,
    embedding_projection,
    final_norm_layer,
    text_embedding,
    text_inputs,
)
from keras_moe.models.base._input_checks import check_texts
from keras_moe.models.loading.blueprint import Part
from keras_moe.models.registry import register_backbone

TEXT_POOLINGS = (*MASKED_POOLINGS, "map")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(TransformerConfig, TokenIdsConfig):
    """Arguments of `TextBackbone`."""

    causal: bool = True
    pooling: str = "end_of_text"
    end_of_text_id: int | None = None
    projection_dim: int | None = None
    projection_bias: bool = False
    final_norm: bool = True
    # CLIP-B.
    hidden_dim: int = 512
    num_heads: int = 8
    mlp_dim: int = 2048
    activation: Any = "quick_gelu"
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self):
        super().__post_init__()
        for name in ("final_norm", "projection_bias"):
            check_bool(name, getattr(self, name))
        check_one_of("pooling", self.pooling, TEXT_POOLINGS)
        largest = self.vocabulary_size - 1
        check_integer("end_of_text_id", self.end_of_text_id, 0, largest, optional=True)
        check_integer("projection_dim", self.projection_dim, optional=True)


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class TextBackbone(ReadsTexts, MoEBackbone):
    """A text transformer such as CLIP's, dense or with mixtures of experts.

    The defaults are the text tower of OpenAI's CLIP-B, apart from its
    `projection_dim=512`. `routing` and `features` work as in `ViTBackbone`.

    With token choice (the default), padding does not change the tokens of a text at
    inference. It does with routers such as expert choice, where capacity depends on the
    number of tokens.

    Args:
        vocabulary_size: V, the number of token ids.
        max_length: maximum text length N, special tokens included.
        mask_padding: whether padding is excluded from attention, routing and pooling.
            If not, as in SigLIP, `"last"` pools the last position.
        causal: whether tokens attend only to themselves and earlier tokens.
        pooling: `"first"`, `"last"`, `"end_of_text"`, `"average"` or `"max"` (see
            `keras_moe.layers.MaskedPooling`), or `"map"`, attention from a learned
            probe (see `keras_moe.layers.AttentionPooling`).
        end_of_text_id: token id that `"end_of_text"` pools. Defaults to the largest id
            of each text, as in published CLIP weights.
        projection_dim: size of the projection of the pooled vector; None for none.
        projection_bias: whether the projection has a bias, as in SigLIP.
        final_norm: whether to normalise the last block's tokens.
        activation: MLP activation. OpenAI's weights use `"quick_gelu"`, most `"gelu"`.
        **kwargs: arguments of `TransformerConfig` and `MoEBackbone`.

    Input shape: dict of `"token_ids"`, integers (B, N) with N up to `max_length`;
    `"padding_mask"`, (B, N), False for padding; and, if routers use modalities,
    `"modality_ids"`, integers (B, N).

    Output shape: dict of `"tokens"` (B, N, D), normalised, and `"pooled"` (B, D) or (B,
    projection_dim).

    Reference: *Learning Transferable Visual Models From Natural Language Supervision*,
    section 2.4; *Multimodal Contrastive Learning with LIMoE*.

    Example:

    >>> import numpy as np
    >>> from keras_moe.models import TextBackbone
    >>> backbone = TextBackbone(
    ...     vocabulary_size=20, max_length=6, hidden_dim=8, num_layers=2, num_heads=2,
    ...     mlp_dim=16, projection_dim=4, moe={"moe_layers": [1], "num_experts": 4},
    ... )
    >>> token_ids = np.array([[1, 7, 19, 0], [1, 5, 6, 19]])
    >>> texts = {"token_ids": token_ids, "padding_mask": token_ids != 0}
    >>> tuple(backbone(texts)["pooled"].shape)
    (2, 4)
    >>> list(backbone.routing)
    ['block_1']
    """

    config_class = TextConfig
    example = "text"

    @takes(TextConfig)
    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    @classmethod
    def tower(cls, config: TextConfig, dtype: DType | None = None) -> Tower:
        spec = TowerSpec.of(config, config.max_length, dtype)
        return Tower(
            (*text_embedding(config, dtype), embedding_dropout(config, dtype)),
            spec.blocks(
                lambda index: config.attention(spec, index, causal=config.causal)
            ),
            final_norm_layer(config, dtype) if config.final_norm else None,
        )

    @classmethod
    def _functional(cls, config, dtype):
        tower, pooler = cls.tower(config, dtype), _text_pooler(config, dtype)
        tower.build_slots(config.max_length, config.hidden_dim)
        inputs = text_inputs()
        if getattr(config.moe, "modality_count", None) is not None:
            ids = keras.Input((None,), dtype="int32", name="modality_ids")
            inputs["modality_ids"] = ids
        mask = inputs["padding_mask"] if config.mask_padding else None
        token_ids = inputs["token_ids"]
        encoded = tower(token_ids, mask, inputs.get("modality_ids"))
        arguments = {} if mask is None else {"mask": mask}
        if config.pooling == "end_of_text":
            arguments["token_ids"] = token_ids
        pooled = pooler(encoded.tokens, **arguments)
        return inputs, {"tokens": encoded.tokens, "pooled": pooled}, encoded

    @property
    def token_embedding(self) -> keras.layers.Layer:
        """The token embedding, under the name KerasHub's text backbones use."""
        return self.get_layer("token_embedding")

    def _check_inputs(self, inputs, labels=None):
        check_texts(
            inputs,
            self.vocabulary_size,
            self.max_length,
            tuple(self.input),
            self.config.end_of_text_id,
            may_be_empty=not self.config.mask_padding,
        )

    @classmethod
    def describe_parts(cls, config: Any) -> tuple[list[Part], int, int]:
        tower = cls.tower(config, "float32")
        parts, num_tokens, dim = tower.parts((config.max_length,))
        parts += _text_pooler(config, "float32").parts((num_tokens, dim))
        return parts, num_tokens, dim


def _text_pooler(config, dtype):
    if config.pooling == "map":
        pooling = AttentionPooling(
            config.num_heads,
            config.mlp_dim,
            activation=config.activation,
            layer_norm_epsilon=config.layer_norm_epsilon,
            dtype=dtype,
            name="pooler",
        )
    else:
        pooling = MaskedPooling(
            config.pooling, config.end_of_text_id, dtype=dtype, name="pooler"
        )
    return PooledProjection(
        pooling,
        embedding_projection(config.projection_dim, config.projection_bias, dtype),
    )
