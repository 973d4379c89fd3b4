"""ViT and V-MoE: one backbone, whose blocks are dense or mixtures of experts.

Axes: B batch, N tokens, D hidden, H mlp, E experts.
"""

from typing import Any

import keras

from keras_moe.checks import head_size
from keras_moe.layers import SelfAttention
from keras_moe.models.registry import register_backbone
from keras_moe.models.vision_backbone import VisionBackbone


@register_backbone
@keras.saving.register_keras_serializable("keras_moe")
class ViTBackbone(VisionBackbone):
    """A vision transformer whose feed-forward layers are dense or mixtures of experts.

    With `moe_layers=None` it is a ViT; with `moe_layers="every_2"` a V-MoE. Images
    are in [-1, 1].

    `backbone.routing` holds the symbolic routing record of each MoE block, so
    `keras.Model(backbone.input, backbone.routing).predict(images)` returns what the
    routers did. `backbone.features` holds `"tokens"`, `"pooled"`, `"grid"` (B, rows,
    columns, D) and the tokens behind each block (`"block_0"`, ...) in the same way.

    On JAX a backbone that one model calls twice keeps the auxiliary losses of one call
    only (Keras 3.15): concatenate the inputs, and call it once.

    Args:
        image_shape: (height, width, channels).
        patch_size: an int or (height, width); divides the image.
        hidden_dim: D.
        num_layers: blocks.
        num_heads: attention heads; divides D.
        mlp_dim: H.
        class_token: put a learned token before the patches.
        position_embedding: what is added to the tokens for their places: `"learned"`, a
            weight for each token; `"sincos"`, fixed sines and cosines for the patches
            (the class token has none); or None for nothing, so that the backbone
            does not know where a patch lies.
        position_interpolation: how learned embeddings are resized when weights of
            another image size or patch size are loaded, and patch kernels for the
            latter: `"bilinear"`, as the releases do it, or `"bicubic"`, as timm; see
            `keras_moe.layers.resize_positions` and `resize_patch_kernel`.
        embedding_norm: normalise the embedded tokens, as CLIP does.
        query_key_norm: normalise queries and keys in each head, as Soft MoE does.
        query_key_norm_bias: whether that normalisation has an offset beside its
            scale, as timm's `qk_norm` has.
        final_norm: normalise the last block's tokens; without, a classifier with
            `pooled_norm` normalises what it pools.
        activation: of the feed-forward layers.
        dropout_rate: on embeddings, attention outputs and dense feed-forward layers.
        attention_dropout: on attention weights.
        stochastic_depth: the last block's drop rate; the first block's is 0, and those
            between lie on a line. Drops residual branches for whole examples while
            training; see `keras_moe.layers.EncoderBlock`.
        layer_norm_epsilon: of all normalisations.
        moe_layers: which blocks are MoE: None, indices, `"every_2"`, `"last_2"`; see
            `keras_moe.layers.resolve_moe_layers`.
        num_experts: E.
        router: `"softmax_token_choice"`, `"sinkhorn_token_choice"`,
            `"softmax_expert_choice"`, `"sinkhorn_expert_choice"`,
            `"sparsity_constrained_expert_choice"`, `"soft"`; see
            `keras_moe.routers.get`. Or `"mumoe"`, for a `keras_moe.layers.MuMoEBlock`
            with `router_options` as its arguments, such as `{"factorization": "tr"}`;
            `num_experts` may then be one number for each level of hierarchy.
        router_options: further arguments of the router's class, such as
            `{"affinity": SinkhornAffinity(iterations=50)}`; they override those that
            follow from the backbone's. A capacity among them is the router's own: K has
            no part in that of expert choice and soft routing.
        num_selected_experts: K, experts per token; with expert choice and soft routing,
            where no token selects, a factor of the capacity.
        expert_mlp_dim: H of each expert; None takes `mlp_dim`.
        capacity_factor: c. The experts' capacity is C = S K c / E for every router, so
            that all cost alike: with expert choice and soft routing, too, a token has
            K c slots on average. `"auto"` is the router's own default: 1.05 for token
            choice, 1.1 for MoE++'s router, 1.0 for the others.
        evaluation: how tokens compete at inference, where noise and dropout never are.
            `"batch_invariant"`: each image is a group, so that its result does not
            depend on the batch; token choice serves every token, unless there is a
            capacity of inference. `"official"`: the groups and the capacity of
            training, as the papers and their released code evaluate, or another
            capacity of inference. None is `"batch_invariant"`, unless there is a
            capacity of inference: then `"official"`, with a warning. Soft routing is
            the same under each.
        eval_capacity_factor: c at inference; None is none, or that of training; see
            `evaluation`. Not for soft routing, whose slots are weights.
        eval_capacity: C itself at inference, a number of tokens, instead of
            `eval_capacity_factor`; not for MoE++'s router, whose capacities differ by
            kind of expert.
        dropless: with token choice, serve every token while training, too.
        capacity_rounding: `"ceil"` or `"round"`; `"auto"` is the router's own default,
            as released: `"round"` for soft routing, else `"ceil"`.
        capacity_multiple_of: round capacities up to a multiple of this where groups
            are larger than an image, which they never are with soft routing. The
            presets of V-MoE have 4, as its released code.
        priority: with token choice, who is served first when experts are full:
            `"first_come"`, `"max_gate"` (batch priority routing) or `"sum_gates"`.
        noise_std: standard deviation of the sparse routers' training noise, times E;
            None is the router's own: 1.0 for softmax routers, 0.0 for those by
            transport plans and for MoE++'s, as published. Soft routing has its
            own in `router_options`.
        images_per_group: how many images compete for an expert's capacity; None
            takes the whole batch. With soft routing each image is by itself.
        auxiliary_losses: a dict from name to weight; see `keras_moe.layers.MoE`.
            `"auto"` takes V-MoE's importance and load losses (load only with noise)
            for softmax token choice, and MoE++'s for its router; the other routers
            need none.
        expert_dropout: inside the experts.
        shared_expert_initialization: start all experts of a layer from one draw;
            `"auto"` does, as V-MoE, but not with MoE++'s router.
        dispatcher: `"index"` or `"einsum"`.
        zero_experts: MoE++'s experts that give 0, beside the `num_experts`; see
            `keras_moe.layers.MoE`. With experts of these three kinds the router is a
            `PathwayAwareRouter`, and all that is left to `"auto"` or None is as in
            *MoE++*: capacity factor 1.1, no noise, gating residuals, the balance loss
            of weight 0.01, each expert drawn by itself.
        copy_experts: those that give the token.
        constant_experts: those that mix it with a trained vector, or `"auto"`.
        tau: tokens for an expert of the `num_experts` over those for one of these.
        gating_residual: add a map of each MoE block's logits to those of the next, by
            MoE++'s router; `"auto"` does with zero-computation experts in several
            blocks.
        gated_experts: gated experts such as SwiGLU; see `keras_moe.layers.Experts`.
            MoE++'s are `gated_experts=True, expert_use_bias=False,
            expert_activation="silu"` with `expert_mlp_dim` 8 D / 3.
        expert_use_bias: give the experts' layers biases.
        expert_activation: of the experts; None takes `activation`.
        rematerialize: while training, keep only the blocks' inputs for the gradient:
            less memory, more time; see `keras_moe.layers.EncoderBlock`.
        seed: of noise, dropout and stochastic depth, each site with one of its own that
            follows from it; weights draw from Keras's global seed.
        dtype: dtype policy; routing is float32 under each.
        **kwargs: see `keras_hub.models.Backbone`.

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
    ...     num_heads=2, mlp_dim=16, moe_layers="every_2", num_experts=4,
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
        moe_layers: Any = None,
        num_experts: Any = 32,
        router: str = "softmax_token_choice",
        router_options: dict | None = None,
        num_selected_experts: int = 2,
        expert_mlp_dim: int | None = None,
        capacity_factor: Any = "auto",
        evaluation: str | None = None,
        eval_capacity_factor: float | None = None,
        eval_capacity: int | None = None,
        dropless: bool = False,
        capacity_rounding: str = "auto",
        capacity_multiple_of: int | None = None,
        priority: str = "first_come",
        noise_std: float | None = None,
        images_per_group: int | None = 8,
        auxiliary_losses: Any = "auto",
        expert_dropout: float = 0.0,
        shared_expert_initialization: Any = "auto",
        dispatcher: str = "index",
        zero_experts: int = 0,
        copy_experts: int = 0,
        constant_experts: Any = 0,
        tau: float = 0.75,
        gating_residual: Any = "auto",
        gated_experts: bool = False,
        expert_use_bias: bool = True,
        expert_activation: Any = None,
        rematerialize: bool = False,
        seed: int | None = None,
        dtype: Any = None,
        **kwargs,
    ):
        self._assemble(locals(), dtype, kwargs)

    @staticmethod
    def _token_mixer(
        index,
        num_tokens,
        seeds,
        dtype,
        hidden_dim,
        num_heads,
        query_key_norm,
        query_key_norm_bias,
        attention_dropout,
        layer_norm_epsilon,
        **_,
    ):
        return SelfAttention(
            num_heads,
            head_size(num_heads, hidden_dim),
            query_key_norm=query_key_norm,
            query_key_norm_bias=query_key_norm_bias,
            layer_norm_epsilon=layer_norm_epsilon,
            dropout=attention_dropout,
            # A seed of its own: both dropouts would drop alike otherwise.
            seed=seeds(1),
            dtype=dtype,
            name="attention",
        )
