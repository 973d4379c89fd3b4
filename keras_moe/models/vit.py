"""ViT and V-MoE: one backbone, whose blocks are dense or mixtures of experts.

Axes: B batch, N tokens, D hidden, H mlp, E experts.
"""

from typing import Any

import keras

from keras_moe.checks import check_integer, head_size
from keras_moe.layers import SelfAttention
from keras_moe.models.backbone import MoEBackbone
from keras_moe.models.image_classifier import ImageClassifier
from keras_moe.models.registry import register_backbone, register_task
from keras_moe.models.tower import Tower, image_tower


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class ViTBackbone(MoEBackbone):
    """A vision transformer whose feed-forward layers are dense or mixtures of experts.

    With `moe=None` it is a ViT; with `moe=MoEConfig(moe_layers="every_2")` a V-MoE.
    Images are in [-1, 1].

    `backbone.routing` holds the symbolic routing record of each MoE block, so
    `keras.Model(backbone.input, backbone.routing).predict(images)` returns what the
    routers did. `backbone.features` holds `"tokens"`, `"pooled"`, `"grid"` (B, rows,
    columns, D) and the tokens behind each block (`"block_0"`, ...) in the same way.

    On JAX a backbone that one model calls twice keeps the auxiliary losses of one call
    only (Keras 3.15): concatenate the inputs, and call it once.

    Args:
        image_shape: (height, width, channels).
        patch_size: an int or (height, width), which divides the image.
        hidden_dim: D.
        num_layers: number of blocks.
        num_heads: number of attention heads, a divisor of D.
        mlp_dim: H.
        class_token: whether a learned token stands before the patches.
        position_embedding: places of the tokens, added to them: `"learned"`, a weight
            for each token; `"sincos"`, fixed sines and cosines for the patches
            (the class token has none); or None for nothing, so that the backbone
            does not know where a patch lies.
        position_interpolation: resizing of learned embeddings when weights of
            another image size or patch size are loaded, and patch kernels for the
            latter: `"bilinear"`, as the releases do it, or `"bicubic"`, as timm; see
            `keras_moe.layers.resize_positions` and `resize_patch_kernel`.
        embedding_norm: whether embedded tokens are normalised, as in CLIP.
        query_key_norm: whether queries and keys are normalised in each head, as in Soft
            MoE.
        query_key_norm_bias: whether that normalisation has an offset beside its
            scale, as timm's `qk_norm` has.
        final_norm: whether the last block's tokens are normalised; without, a
            classifier with `pooled_norm` normalises what it pools.
        activation: activation of the feed-forward layers.
        dropout_rate: dropout rate on embeddings, attention outputs and dense
            feed-forward layers.
        attention_dropout: dropout rate on attention weights.
        stochastic_depth: drop rate of the last block, to which the rate grows linearly
            from 0 at the first block. Training drops residual
            branches for whole examples; see `keras_moe.layers.EncoderBlock`.
        layer_norm_epsilon: epsilon of all normalisations.
        moe: `MoEConfig` or `MuMoEConfig`, or a dict of its fields: which blocks are
            mixtures of experts, and of what; None for a ViT.
        rematerialize: whether training keeps only the blocks' inputs for the gradient:
            less memory, more time; see `keras_moe.layers.EncoderBlock`.
        seed: seed of noise, dropout and stochastic depth, each site with one of its own
            that follows from it; weights draw from Keras's global seed.
        dtype: dtype policy; routing is float32 under each.
        **kwargs: arguments of `keras_hub.models.Backbone`.

    Input shape:
        (B, height, width, channels).

    Output shape:
        (B, N, D): the normalised tokens, the class token first if there is one.

    Raises:
        ValueError: if an argument is out of range or arguments do not fit together.

    Reference:
        *An Image is Worth 16x16 Words*; *Scaling Vision with Sparse Mixture of
        Experts*.

    Example:

    >>> import numpy as np
    >>> from keras_moe.models import ViTBackbone
    >>> backbone = ViTBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=2,
    ...     num_heads=2, mlp_dim=16, moe={"moe_layers": "every_2", "num_experts": 4},
    ... )
    >>> tuple(backbone(np.zeros((1, 8, 8, 3), "float32")).shape)
    (1, 5, 8)
    >>> list(backbone.routing)
    ['block_1']
    """

    def __init__(
        self,
        image_shape: tuple = (224, 224, 3),
        patch_size: Any = 32,
        hidden_dim: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        mlp_dim: int = 3072,
        class_token: bool = True,
        position_embedding: str | None = "learned",
        position_interpolation: str = "bilinear",
        embedding_norm: bool = False,
        query_key_norm: bool = False,
        query_key_norm_bias: bool = False,
        final_norm: bool = True,
        activation: Any = "gelu_tanh",
        dropout_rate: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        layer_norm_epsilon: float = 1e-6,
        moe: Any = None,
        rematerialize: bool = False,
        seed: int | None = None,
        dtype: Any = None,
        **kwargs,
    ):
        super().__init__(
            {
                "image_shape": image_shape,
                "patch_size": patch_size,
                "hidden_dim": hidden_dim,
                "num_layers": num_layers,
                "num_heads": num_heads,
                "mlp_dim": mlp_dim,
                "class_token": class_token,
                "position_embedding": position_embedding,
                "position_interpolation": position_interpolation,
                "embedding_norm": embedding_norm,
                "query_key_norm": query_key_norm,
                "query_key_norm_bias": query_key_norm_bias,
                "final_norm": final_norm,
                "activation": activation,
                "dropout_rate": dropout_rate,
                "attention_dropout": attention_dropout,
                "stochastic_depth": stochastic_depth,
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
                query_key_norm_bias=config["query_key_norm_bias"],
                layer_norm_epsilon=config["layer_norm_epsilon"],
                dropout=config["attention_dropout"],
                # A seed of its own: both dropouts would drop alike otherwise.
                seed=spec.seed_of(index, 1),
                dtype=dtype,
                name="attention",
            )

        return image_tower(config, dtype, attention)


@register_task
@keras.saving.register_keras_serializable("keras_moe")
class ViTImageClassifier(ImageClassifier):
    """A `ViTBackbone` (ViT or V-MoE) with pooling and a classification head.

    Args:
        backbone: a `ViTBackbone`.
        num_classes: number of classes.
        preprocessor, pooling, multi_label, representation_dim, head_bias,
            output_activation, dropout, head_dtype, pooled_norm, head, head_position,
            pooling_query_key_norm: arguments of `ImageClassifier`.
        **kwargs: arguments of `keras_hub.models.ImageClassifier`.

    Input shape:
        (B, height, width, channels), in [-1, 1].

    Output shape:
        (B, num_classes).

    Raises:
        ValueError: if an argument is out of range or arguments do not fit together.

    Reference:
        *An Image is Worth 16x16 Words*; *Scaling Vision Transformers* (MAP head).

    Example:

    >>> import numpy as np
    >>> from keras_moe.models import ViTBackbone, ViTImageClassifier
    >>> backbone = ViTBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=2,
    ...     num_heads=2, mlp_dim=16, moe={"moe_layers": "every_2", "num_experts": 4},
    ... )
    >>> classifier = ViTImageClassifier(backbone, num_classes=3)
    >>> images, labels = np.zeros((4, 8, 8, 3), "float32"), np.array([0, 1, 2, 0])
    >>> history = classifier.fit(images, labels, verbose=0)
    >>> classifier.predict(images, verbose=0).shape
    (4, 3)
    """

    backbone_cls = ViTBackbone
