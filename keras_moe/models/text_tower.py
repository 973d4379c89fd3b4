"""Towers of texts: token ids become tokens, blocks follow, and one vector is pooled.

Axes: B batch, N tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_moe.checks import check_bool, check_integer, check_one_of, check_seed
from keras_moe.layers import (
    AttentionPooling,
    EncoderSpec,
    LayerNorm,
    MaskedPooling,
    TextPositions,
    TokenEmbedding,
)
from keras_moe.layers.masked_pooling import MASKED_POOLINGS
from keras_moe.models.description import Part
from keras_moe.models.projection import embedding_projection
from keras_moe.models.tower import Tower, embedding_dropout, encoder_spec
from keras_moe.ops import Cost

TEXT_POOLINGS = (*MASKED_POOLINGS, "map")


def text_embedding(config: dict, dtype: Any) -> tuple:
    """The layers from token ids (B, N) to tokens (B, N, D) but dropout, not built."""
    return (
        TokenEmbedding(
            config["vocabulary_size"],
            config["hidden_dim"],
            dtype=dtype,
            name="token_embedding",
        ),
        TextPositions(config["max_length"], dtype=dtype, name="text_positions"),
    )


def text_tower(
    config: dict,
    dtype: Any,
    token_mixer: Callable[[EncoderSpec, int], keras.layers.Layer],
) -> Tower:
    """The tower of a backbone of texts, not built."""
    # Before seeds and layers are made of it.
    check_seed("seed", config["seed"])
    max_length = check_integer("max_length", config["max_length"])
    spec = encoder_spec(config, max_length, dtype)
    final_norm = None
    if check_bool("final_norm", config.get("final_norm", True)):
        epsilon = config["layer_norm_epsilon"]
        final_norm = LayerNorm(epsilon, dtype=dtype, name="final_norm")
    embedding = (*text_embedding(config, dtype), embedding_dropout(config, dtype))
    blocks = spec.blocks(lambda index: token_mixer(spec, index))
    return Tower(embedding, blocks, final_norm)


class TextPooler(NamedTuple):
    """The layers from a text's tokens to one vector, not built.

    Attributes:
        pooling: `MaskedPooling` or `AttentionPooling`.
        projection: dense layer on the pooled vector, or None.
    """

    pooling: keras.layers.Layer
    projection: keras.layers.Dense | None = None

    def __call__(self, tokens: Any, mask: Any = None, token_ids: Any = None) -> Any:
        """Pools tokens."""
        arguments = {} if mask is None else {"mask": mask}
        if getattr(self.pooling, "pooling", None) == "end_of_text":
            arguments["token_ids"] = token_ids
        pooled = self.pooling(tokens, **arguments)
        return pooled if self.projection is None else self.projection(pooled)

    def parts(self, shape: tuple[int, int]) -> list[Part]:
        """The parts with their costs."""
        parts, cost = [], self.pooling.cost(shape)
        if cost.parameters:
            parts.append(Part("pooler", "MAP", *cost))
        if self.projection is not None:
            dense = self.projection
            cost = Cost.of_dense(shape[-1], dense.units, dense.use_bias)
            parts.append(Part("projection", "dense", *cost))
        return parts


def text_pooler(config: dict, dtype: Any) -> TextPooler:
    """The pooling and the projection of a backbone of texts, not built."""
    pooling = check_one_of("pooling", config["pooling"], TEXT_POOLINGS)
    end_of_text_id = config["end_of_text_id"]
    if end_of_text_id is not None:
        check_integer("end_of_text_id", end_of_text_id, 0)
        if end_of_text_id >= config["vocabulary_size"]:
            raise ValueError(
                "Expected end_of_text_id below vocabulary_size="
                f"{config['vocabulary_size']}; received: "
                f"end_of_text_id={end_of_text_id}"
            )
    if pooling == "map":
        if end_of_text_id is not None:
            raise ValueError(
                "Expected end_of_text_id=None for pooling='map'; received: "
                f"end_of_text_id={end_of_text_id}"
            )
        pooler = AttentionPooling(
            config["num_heads"],
            config["mlp_dim"],
            activation=config["activation"],
            layer_norm_epsilon=config["layer_norm_epsilon"],
            dtype=dtype,
            name="pooler",
        )
    else:
        pooler = MaskedPooling(pooling, end_of_text_id, dtype=dtype, name="pooler")
    use_bias = check_bool("projection_bias", config["projection_bias"])
    if config["projection_dim"] is None:
        if use_bias:
            raise ValueError(
                "Expected projection_dim beside projection_bias=True; received: "
                "projection_dim=None"
            )
        return TextPooler(pooler)
    projection = embedding_projection(config["projection_dim"], use_bias, dtype)
    return TextPooler(pooler, projection)
