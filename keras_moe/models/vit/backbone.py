"""ViT and V-MoE: one backbone, whose blocks are dense or mixtures of experts.

Axes: B batch, N tokens, D hidden, H mlp, E experts.
"""

import copy
import inspect
from typing import Any

import keras
import keras_hub
import numpy as np

from keras_moe import losses
from keras_moe.layers import (
    MLP,
    ClassToken,
    EncoderBlock,
    Experts,
    LayerNorm,
    MoE,
    MoEEncoderBlock,
    PatchEmbedding,
    PositionEmbedding,
    activations,
    resolve_moe_layers,
)
from keras_moe.models.builtin import check_argument_names
from keras_moe.models.description import Part
from keras_moe.models.preset_loading import PresetMixin
from keras_moe.ops.capacity import expert_capacity
from keras_moe.ops.checks import check_integer, check_one_of
from keras_moe.routers import (
    ROUTERS,
    SoftmaxAffinity,
    SoftRouter,
    TokenChoiceRouter,
)


@keras.saving.register_keras_serializable("keras_moe")
class ViTBackbone(PresetMixin, keras_hub.models.Backbone):
    """A vision transformer whose feed-forward layers are dense or mixtures of experts.

    With `moe_layers=None` it is a ViT; with `moe_layers="every_2"` a V-MoE. Images
    are in [-1, 1].

    `backbone.routing` holds the symbolic routing record of each MoE block, so
    `keras.Model(backbone.input, backbone.routing).predict(images)` returns what the
    routers did.

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
        position_embedding: `"learned"` or `"sincos"`.
        activation: of the feed-forward layers.
        dropout_rate: on embeddings, attention outputs and dense feed-forward layers.
        attention_dropout: on attention weights.
        layer_norm_epsilon: of all normalisations.
        moe_layers: which blocks are MoE: None, indices, `"every_2"`, `"last_2"`; see
            `keras_moe.layers.resolve_moe_layers`.
        num_experts: E.
        router: `"softmax_token_choice"`, `"sinkhorn_token_choice"`,
            `"softmax_expert_choice"`, `"sinkhorn_expert_choice"`,
            `"sparsity_constrained_expert_choice"`, `"soft"`; see
            `keras_moe.routers.get`.
        router_options: further arguments of the router's class, such as
            `{"affinity": SinkhornAffinity(iterations=50)}`; they go before those
            that follow from the backbone's.
        num_selected_experts: K, experts per token.
        expert_mlp_dim: H of each expert; None takes `mlp_dim`.
        capacity_factor: c. The experts' capacity is C = S K c / E for every router, so
            that all cost alike: with expert choice and soft routing, too, a token has
            K c slots on average.
        eval_capacity_factor: c at inference, in the groups of training. None makes
            the result of an image independent of the batch: token choice serves every
            token, and expert choice chooses within the image. Not for soft routing,
            which always does.
        dropless: with token choice, serve every token while training, too.
        capacity_rounding: `"ceil"` or `"round"`.
        capacity_multiple_of: round capacities up to a multiple of this where groups
            are larger than an image.
        priority: with token choice, who is served first when experts are full:
            `"first_come"`, `"max_gate"` (batch priority routing) or `"sum_gates"`.
        noise_std: of the sparse routers' training noise, times E; soft routing has its
            own in `router_options`.
        images_per_group: how many images compete for an expert's capacity; None
            takes the whole batch. With soft routing each image is by itself.
        auxiliary_losses: a dict from name to weight; see `keras_moe.layers.MoE`.
            `"auto"` takes V-MoE's importance and load losses (load only with noise)
            for softmax token choice; the other routers need none.
        expert_dropout: inside the experts.
        shared_expert_initialization: start all experts of a layer from one draw.
        dispatcher: `"index"` or `"einsum"`.
        seed: of noise and dropout, each site with one of its own that follows from
            it; weights draw from Keras's global seed.
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
        position_embedding: str = "learned",
        activation: Any = "gelu_tanh",
        dropout_rate: float = 0.0,
        attention_dropout: float = 0.0,
        layer_norm_epsilon: float = 1e-6,
        moe_layers: Any = None,
        num_experts: int = 32,
        router: str = "softmax_token_choice",
        router_options: dict | None = None,
        num_selected_experts: int = 2,
        expert_mlp_dim: int | None = None,
        capacity_factor: float = 1.05,
        eval_capacity_factor: float | None = None,
        dropless: bool = False,
        capacity_rounding: str = "ceil",
        capacity_multiple_of: int | None = 4,
        priority: str = "first_come",
        noise_std: float = 1.0,
        images_per_group: int | None = 8,
        auxiliary_losses: Any = "auto",
        expert_dropout: float = 0.0,
        shared_expert_initialization: bool = True,
        dispatcher: str = "index",
        seed: int | None = None,
        dtype: Any = None,
        **kwargs,
    ):
        config = dict(locals())
        for name in ("self", "__class__", "dtype", "kwargs"):
            config.pop(name, None)
        check_argument_names(kwargs, ["name", "trainable"], "ViTBackbone", config)
        # Plain values of our own: the caller's may change, or not be JSON.
        config["image_shape"] = tuple(image_shape)
        config["activation"] = activations.serialize(activations.get(activation))
        if moe_layers is not None and not isinstance(moe_layers, str):
            config["moe_layers"] = list(resolve_moe_layers(moe_layers, num_layers))
        if not isinstance(auxiliary_losses, (str, dict)):
            config["auxiliary_losses"] = losses.serialize(losses.get(auxiliary_losses))
        config["router_options"] = _plain(router_options)
        config = copy.deepcopy(config)

        # === Layers ===
        layers = _layers(dtype=dtype, **config)
        inputs = keras.Input(shape=tuple(image_shape), name="images")
        x = layers["patch_embedding"](inputs)
        if class_token:
            x = layers["class_token"](x)
        x = layers["position_embedding"](x)
        x = layers["embedding_dropout"](x)

        # === Functional model ===
        routing = {}
        for block in layers["blocks"]:
            if isinstance(block, MoEEncoderBlock):
                x, routing[block.name] = block(x)
            else:
                x = block(x)
        outputs = layers["final_norm"](x)
        super().__init__(inputs=inputs, outputs=outputs, dtype=dtype, **kwargs)
        # Plain attributes: Keras would wrap the dict of symbolic records.
        object.__setattr__(self, "_routing", routing)

        # === Config ===
        object.__setattr__(self, "_config", config)

    @property
    def routing(self) -> dict:
        """The symbolic `Routing` of each MoE block, by the block's name."""
        return dict(self._routing)

    @property
    def image_shape(self) -> tuple:
        """(height, width, channels)."""
        return self._config["image_shape"]

    @property
    def grid(self) -> tuple[int, int]:
        """The number of patches down and across."""
        return self.get_layer("patch_embedding").grid(self.image_shape)

    @property
    def hidden_dim(self) -> int:
        """D."""
        return self._config["hidden_dim"]

    @property
    def class_token(self) -> bool:
        """Whether the first token is a class token."""
        return self._config["class_token"]

    def get_config(self):
        return {**super().get_config(), **copy.deepcopy(self._config)}

    def save_own_variables(self, store):
        # Keras saves blocks by class and order, so a dense and an MoE block could
        # change places on loading: the file says which is which.
        store["moe_blocks"] = self._moe_blocks()

    def load_own_variables(self, store):
        if "moe_blocks" not in store.keys():  # noqa: SIM118
            return
        stored = np.array(store["moe_blocks"])
        if not np.array_equal(stored, self._moe_blocks()):
            raise ValueError(
                "Expected weights of a model with the same blocks: "
                f"num_layers={len(self._moe_blocks())}, "
                f"moe_layers={np.flatnonzero(self._moe_blocks()).tolist()}; received: "
                f"num_layers={len(stored)}, "
                f"moe_layers={np.flatnonzero(stored).tolist()}"
            )

    def _moe_blocks(self):
        num_layers = self._config["num_layers"]
        return np.array([f"block_{i}" in self._routing for i in range(num_layers)])

    @staticmethod
    def describe_parts(**config) -> tuple[list[Part], int, int]:
        """The parts with their costs, the number of tokens N, and D.

        Args:
            **config: the arguments of the constructor. No weight is allocated.
        """
        config = {**_defaults(), **config}
        layers = _layers(dtype="float32", **config)
        dim = layers["patch_embedding"].hidden_dim
        image_shape = config["image_shape"]
        rows, columns = layers["patch_embedding"].grid(tuple(image_shape))
        num_patches, channels = rows * columns, image_shape[-1]
        num_tokens = num_patches + ("class_token" in layers)
        embedding = layers["patch_embedding"].parameters(channels)
        if "class_token" in layers:
            embedding += dim
        if layers["position_embedding"].kind == "learned":
            embedding += num_tokens * dim
        parts = [
            Part(
                "embedding",
                "patches",
                embedding,
                embedding,
                layers["patch_embedding"].flops(num_patches, channels),
            )
        ]
        for block in layers["blocks"]:
            kind = "dense"
            if isinstance(block, MoEEncoderBlock):
                router = block.feed_forward.router
                kind = f"MoE {router.num_experts}, {router.summary}"
            parts.append(
                Part(
                    block.name,
                    kind,
                    block.parameters(dim),
                    block.active_parameters(num_tokens, dim),
                    block.flops(num_tokens, dim),
                )
            )
        parts.append(Part("final_norm", "norm", 2 * dim, 2 * dim, 0))
        return parts, num_tokens, dim


def _defaults():
    parameters = inspect.signature(ViTBackbone.__init__).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty and name != "dtype"
    }


def _router(
    name,
    num_tokens,
    num_experts,
    num_selected_experts,
    capacity_factor,
    eval_capacity_factor,
    dropless,
    capacity_rounding,
    capacity_multiple_of,
    priority,
    noise_std,
    seed,
    given,
):
    """The router of that name; `given` arguments of its class go before ours."""
    cls, arguments = ROUTERS[check_one_of("router", name, list(ROUTERS))]
    names = inspect.signature(cls.__init__).parameters
    # An image is one modality, and every block has a seed of its own.
    not_here = ("self", "kwargs", "num_experts", "seed")
    not_here = (*not_here, "num_modalities", "expert_pools")
    names = [name for name in names if name not in not_here]
    check_argument_names(given, names, f"{cls.__name__} in a ViTBackbone")
    dropless = given.get("dropless", dropless)
    if cls is not TokenChoiceRouter and dropless:
        raise ValueError(
            "Expected a token choice router for dropless=True; "
            f"received: router={name!r}"
        )
    if cls is SoftRouter:
        if eval_capacity_factor is not None:
            raise ValueError(
                "Expected eval_capacity_factor=None for router='soft', which drops "
                f"nothing; received: eval_capacity_factor={eval_capacity_factor}"
            )
        given = {"capacity_rounding": capacity_rounding, **given}
        factor = given.pop("capacity_factor", None)
        if given.get("num_slots") is None:
            # A number of slots gives the weights a shape before they are built.
            given["num_slots"] = expert_capacity(
                num_tokens,
                num_experts,
                factor or capacity_factor,
                1 if factor else num_selected_experts,
                rounding=given["capacity_rounding"],
            )
        return cls(num_experts, **{"seed": seed, **given})
    if given.get("capacity") is not None or dropless:
        capacity_factor = None
    ours = {
        "capacity_factor": capacity_factor,
        "eval_capacity_factor": eval_capacity_factor,
        "capacity_rounding": capacity_rounding,
        "capacity_multiple_of": capacity_multiple_of,
        "noise_std": noise_std,
        "seed": seed,
    }
    if cls is TokenChoiceRouter:
        ours.update(
            num_selected_experts=num_selected_experts,
            dropless=dropless,
            priority=priority,
        )
    else:
        # The papers evaluate in the groups of training.
        ours["batch_invariant"] = eval_capacity_factor is None
        for factor in ("capacity_factor", "eval_capacity_factor"):
            if ours[factor] is not None:
                ours[factor] *= num_selected_experts
    return cls(num_experts, **{**arguments, **ours, **given})


def _losses(auxiliary_losses, router):
    """The auxiliary losses; `"auto"` is V-MoE's for the router that needs them."""
    if not isinstance(auxiliary_losses, str):
        return auxiliary_losses
    check_one_of("auxiliary_losses", auxiliary_losses, ("auto",))
    is_vmoe = isinstance(router, TokenChoiceRouter) and isinstance(
        router.affinity, SoftmaxAffinity
    )
    if not is_vmoe:
        return None
    # The noise defines the load loss.
    return {"importance": 0.005, **({"load": 0.005} if router.noise_std > 0 else {})}


def _plain(options):
    """Options of which each value is plain data, as a config needs them."""
    if options is None:
        return None
    if not isinstance(options, dict):
        raise ValueError(
            "Expected router_options to be None or a dict of arguments; "
            f"received: router_options={options!r}"
        )
    return {
        name: value
        if value is None
        or isinstance(value, (bool, int, float, str, list, tuple, dict))
        else keras.saving.serialize_keras_object(value)
        for name, value in options.items()
    }


def _layers(
    image_shape,
    patch_size,
    hidden_dim,
    num_layers,
    num_heads,
    mlp_dim,
    class_token,
    position_embedding,
    activation,
    dropout_rate,
    attention_dropout,
    layer_norm_epsilon,
    moe_layers,
    num_experts,
    router,
    router_options,
    num_selected_experts,
    expert_mlp_dim,
    capacity_factor,
    eval_capacity_factor,
    dropless,
    capacity_rounding,
    capacity_multiple_of,
    priority,
    noise_std,
    images_per_group,
    auxiliary_losses,
    expert_dropout,
    shared_expert_initialization,
    dispatcher,
    seed,
    dtype,
):
    """The backbone's layers, not built: nothing is allocated."""
    if len(image_shape) != 3 or not all(
        isinstance(size, int) and size > 0 for size in image_shape
    ):
        raise ValueError(
            "Expected image_shape (height, width, channels) of positive integers; "
            f"received: image_shape={image_shape}"
        )
    check_integer("num_layers", num_layers)
    check_integer("hidden_dim", hidden_dim)
    check_integer("num_heads", num_heads)
    if images_per_group is not None:
        check_integer("images_per_group", images_per_group)
    if hidden_dim % num_heads:
        raise ValueError(
            "Expected num_heads to divide hidden_dim; received: "
            f"num_heads={num_heads}, hidden_dim={hidden_dim}"
        )
    moe_indices = resolve_moe_layers(moe_layers, num_layers)

    def seeds(index, site):
        # Every site that draws has a seed of its own; the head's is `seed + 1`.
        return None if seed is None else seed + 4 * index + site

    patch_embedding = PatchEmbedding(
        hidden_dim, patch_size, dtype=dtype, name="patch_embedding"
    )
    grid = patch_embedding.grid(tuple(image_shape))
    layers = {"patch_embedding": patch_embedding}
    if class_token:
        layers["class_token"] = ClassToken(dtype=dtype, name="class_token")
    layers["position_embedding"] = PositionEmbedding(
        grid, position_embedding, dtype=dtype, name="position_embedding"
    )
    layers["embedding_dropout"] = keras.layers.Dropout(
        dropout_rate, seed=seeds(0, 0), dtype=dtype, name="embedding_dropout"
    )
    num_tokens = grid[0] * grid[1] + int(class_token)

    def moe(index):
        router_layer = _router(
            router,
            num_tokens,
            num_experts,
            num_selected_experts,
            capacity_factor,
            eval_capacity_factor,
            dropless,
            capacity_rounding,
            capacity_multiple_of,
            priority,
            noise_std,
            seeds(index, 3),
            given=dict(router_options or {}),
        )
        return MoE(
            router_layer,
            Experts(
                num_experts,
                expert_mlp_dim or mlp_dim,
                activation=activation,
                dropout=expert_dropout,
                shared_initialization=shared_expert_initialization,
                seed=seeds(index, 2),
                dtype=dtype,
                name="experts",
            ),
            group_size=images_per_group and images_per_group * num_tokens,
            auxiliary_losses=_losses(auxiliary_losses, router_layer),
            dispatcher=dispatcher,
            dtype=dtype,
            name="moe",
        )

    if not moe_indices:
        moe(0)  # A dense model refuses the same arguments.
    layers["blocks"] = []
    for index in range(num_layers):
        if index in moe_indices:
            block_class, feed_forward = MoEEncoderBlock, moe(index + 1)
        else:
            block_class = EncoderBlock
            feed_forward = MLP(
                mlp_dim,
                activation,
                dropout_rate,
                seeds(index + 1, 2),
                dtype=dtype,
                name="mlp",
            )
        layers["blocks"].append(
            block_class(
                num_heads,
                feed_forward,
                dropout=dropout_rate,
                attention_dropout=attention_dropout,
                layer_norm_epsilon=layer_norm_epsilon,
                seed=seeds(index + 1, 0),
                dtype=dtype,
                name=f"block_{index}",
            )
        )
    layers["final_norm"] = LayerNorm(layer_norm_epsilon, dtype=dtype, name="final_norm")
    return layers
