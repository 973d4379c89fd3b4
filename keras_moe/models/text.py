"""A transformer of texts, whose blocks are dense or mixtures of experts.

Axes: B batch, N tokens, D hidden, H mlp, V vocabulary.
"""

from typing import Any

import keras

from keras_moe.checks import check_bool, check_integer, head_size
from keras_moe.layers import SelfAttention, moe_config
from keras_moe.models.backbone import MoEBackbone
from keras_moe.models.input_checks import check_texts
from keras_moe.models.overrides import complete_config
from keras_moe.models.registry import register_backbone
from keras_moe.models.tower import Tower, text_pooler, text_tower


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class TextBackbone(MoEBackbone):
    """A transformer of texts, such as CLIP's, dense or with mixtures of experts.

    With `moe=None` all blocks are dense; `moe=MoEConfig(moe_layers="every_2")` puts
    experts into every second block. The defaults are the text tower of OpenAI's
    CLIP-B, whose embeddings also need `projection_dim=512`.

    `backbone.routing` holds the symbolic routing record of each MoE block, and
    `backbone.features` `"tokens"`, `"pooled"` and the tokens behind each block, as
    those of `ViTBackbone` do.

    At inference padding changes no result with token choice, the default: a text has
    the same tokens whatever follows it in its row. Routers whose capacity follows from
    the number of tokens, such as expert choice, count padding there.

    Args:
        vocabulary_size: V, the number of token ids.
        max_length: N of the longest text, its special tokens included.
        hidden_dim: D.
        num_layers: number of blocks.
        num_heads: number of attention heads, a divisor of D.
        mlp_dim: H.
        causal: whether a token attends to itself and the tokens before it alone.
        pooling: pooling of a text's tokens: `"first"`, `"last"`, `"end_of_text"`,
            `"average"` or `"max"`, see `keras_moe.layers.MaskedPooling`; or `"map"`, a
            learned probe that attends to them, see `keras_moe.layers.AttentionPooling`.
        end_of_text_id: id of the token that `"end_of_text"` takes; None takes the
            largest id of each text, as published CLIP weights do.
        mask_padding: whether no token attends to padding, which is neither routed nor
            pooled. False treats padding as any other token, as SigLIP does: `"last"` is
            then the last of all.
        projection_dim: size of the projection of the pooled vector; None for none.
        projection_bias: whether the projection has a bias, as in SigLIP.
        final_norm: whether the last block's tokens are normalised.
        activation: activation of the feed-forward layers; OpenAI's weights have
            `"quick_gelu"`, most others `"gelu"`.
        dropout_rate: dropout rate on embeddings, attention outputs and dense
            feed-forward layers.
        attention_dropout: dropout rate on attention weights.
        stochastic_depth: drop rate of the last block, to which the rate grows linearly
            from 0 at the first block; see `keras_moe.layers.EncoderBlock`.
        query_key_norm: whether queries and keys are normalised in each head, as in
            Soft MoE.
        layer_norm_epsilon: epsilon of all normalisations.
        moe: `MoEConfig` or `MuMoEConfig`, or a dict of its fields: which blocks are
            mixtures of experts, and of what; None for a dense model. With
            `num_modalities` or `expert_pools` the inputs have `"modality_ids"`, too.
        rematerialize: whether training keeps only the blocks' inputs for the gradient:
            less memory, more time; see `keras_moe.layers.EncoderBlock`.
        seed: seed of noise, dropout and stochastic depth, each site with one of its own
            that follows from it; weights draw from Keras's global seed.
        dtype: dtype policy; routing is float32 under each.
        **kwargs: arguments of `keras_hub.models.Backbone`.

    Input shape:
        A dict: `"token_ids"`, integers (B, N), N up to `max_length`;
        `"padding_mask"`, boolean or integers (B, N), False for padding; and where
        routers tell modalities apart `"modality_ids"`, integers (B, N).

    Output shape:
        A dict: `"tokens"` (B, N, D), normalised, and `"pooled"` (B, D), or
        (B, projection_dim).

    Raises:
        ValueError: if an argument is out of range or arguments do not fit together.

    Reference:
        *Learning Transferable Visual Models From Natural Language Supervision*,
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

    example = "text"
    pipeline_tag = "feature-extraction"

    def __init__(
        self,
        vocabulary_size: int = 49408,
        max_length: int = 77,
        hidden_dim: int = 512,
        num_layers: int = 12,
        num_heads: int = 8,
        mlp_dim: int = 2048,
        causal: bool = True,
        pooling: str = "end_of_text",
        end_of_text_id: int | None = None,
        mask_padding: bool = True,
        projection_dim: int | None = None,
        projection_bias: bool = False,
        final_norm: bool = True,
        activation: Any = "quick_gelu",
        dropout_rate: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        query_key_norm: bool = False,
        layer_norm_epsilon: float = 1e-5,
        moe: Any = None,
        rematerialize: bool = False,
        seed: int | None = None,
        dtype: Any = None,
        **kwargs,
    ):
        super().__init__(
            {
                "vocabulary_size": vocabulary_size,
                "max_length": max_length,
                "hidden_dim": hidden_dim,
                "num_layers": num_layers,
                "num_heads": num_heads,
                "mlp_dim": mlp_dim,
                "causal": causal,
                "pooling": pooling,
                "end_of_text_id": end_of_text_id,
                "mask_padding": mask_padding,
                "projection_dim": projection_dim,
                "projection_bias": projection_bias,
                "final_norm": final_norm,
                "activation": activation,
                "dropout_rate": dropout_rate,
                "attention_dropout": attention_dropout,
                "stochastic_depth": stochastic_depth,
                "query_key_norm": query_key_norm,
                "layer_norm_epsilon": layer_norm_epsilon,
                "moe": moe,
                "rematerialize": rematerialize,
                "seed": seed,
            },
            dtype=dtype,
            **kwargs,
        )

    @classmethod
    def tower(cls, config: dict, dtype: Any = None) -> Tower:
        hidden_dim = check_integer("hidden_dim", config["hidden_dim"])
        key_dim = head_size(config["num_heads"], hidden_dim)

        def attention(spec, index):
            return SelfAttention(
                config["num_heads"],
                key_dim,
                query_key_norm=config["query_key_norm"],
                layer_norm_epsilon=config["layer_norm_epsilon"],
                dropout=config["attention_dropout"],
                # A seed of its own: both dropouts would drop alike otherwise.
                seed=spec.seed_of(index, 1),
                causal=config["causal"],
                dtype=dtype,
                name="attention",
            )

        return text_tower(config, dtype, attention)

    @classmethod
    def _checked_sizes(cls, config):
        names = ("vocabulary_size", "max_length")
        return {name: check_integer(name, config[name]) for name in names}

    @classmethod
    def _functional(cls, config, dtype):
        check_bool("mask_padding", config["mask_padding"])
        tower, pooler = cls.tower(config, dtype), text_pooler(config, dtype)
        inputs = {
            "token_ids": keras.Input((None,), dtype="int32", name="token_ids"),
            "padding_mask": keras.Input((None,), dtype="bool", name="padding_mask"),
        }
        if getattr(moe_config(config["moe"]), "modality_count", None) is not None:
            ids = keras.Input((None,), dtype="int32", name="modality_ids")
            inputs["modality_ids"] = ids
        mask = inputs["padding_mask"] if config["mask_padding"] else None
        token_ids = inputs["token_ids"]
        encoded = tower(token_ids, mask, inputs.get("modality_ids"))
        pooled = pooler(encoded.tokens, mask, token_ids)
        return inputs, {"tokens": encoded.tokens, "pooled": pooled}, encoded

    @property
    def features(self) -> dict:
        """Symbolic features by name, for `keras.Model(backbone.input, ...)`.

        `"tokens"` (B, N, D) and `"pooled"` are the outputs, and `"block_0"`, ...
        (B, N, D) the tokens behind each block.
        """
        return {**self.output, **self._block_tokens}

    @property
    def vocabulary_size(self) -> int:
        """V."""
        return self._config["vocabulary_size"]

    @property
    def max_length(self) -> int:
        """N of the longest text."""
        return self._config["max_length"]

    @property
    def token_embedding(self) -> keras.layers.Layer:
        """The layer from token ids to tokens, as KerasHub's backbones of texts have."""
        return self.get_layer("token_embedding")

    def _check_inputs(self, inputs, labels=None):
        config = self._config
        check_texts(
            inputs,
            config["vocabulary_size"],
            config["max_length"],
            tuple(self.input),
            config["end_of_text_id"],
            may_be_empty=not config["mask_padding"],
        )

    @classmethod
    def describe_parts(cls, **config) -> tuple:
        config = complete_config(cls, config)
        tower = cls.tower(config, "float32")
        parts, num_tokens, dim = tower.parts((config["max_length"],))
        pooler = text_pooler(config, "float32")
        return parts + pooler.parts((num_tokens, dim)), num_tokens, dim
