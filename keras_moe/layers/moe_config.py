"""Which blocks of an encoder are mixtures of experts, and of what: one description.

Axes: N tokens, S group_size, E experts, C capacity, K selected experts, H mlp.
"""

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_moe import losses
from keras_moe.checks import (
    check_bool,
    check_disjoint,
    check_integer,
    check_one_of,
    check_positive,
)
from keras_moe.layers import activations, pruning_config
from keras_moe.layers.block_config import BlockConfig
from keras_moe.layers.experts import Experts
from keras_moe.layers.moe import MoE
from keras_moe.layers.moe_layers import plain_moe_layers, resolve_moe_layers
from keras_moe.ops.expert_types import ExpertTypes, expert_types
from keras_moe.routers.pruned import pruned_router
from keras_moe.routers.registry import (
    router_class,
    router_class_for_types,
    router_name,
)
from keras_moe.routers.router import Router, RouterSite

# Stands for the default of the router's class.
AUTO = "auto"
EVALUATIONS = ("batch_invariant", "official")
# A router that is a layer has these among its own arguments.
_ROUTING_FIELDS = (
    "router_options",
    "num_selected_experts",
    "capacity_factor",
    "evaluation",
    "eval_capacity_factor",
    "eval_capacity",
    "dropless",
    "capacity_rounding",
    "capacity_multiple_of",
    "priority",
    "noise_std",
    "num_modalities",
    "expert_pools",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(BlockConfig):
    """The mixtures of experts of an encoder: which blocks, what experts, which router.

    Every backbone takes one as `moe`, or its fields as a dict. `from_preset` and the
    programs take the fields as overrides, by their names alone.

    Args:
        moe_layers: blocks that are MoE: indices from 0, `"every_2"`, `"last_2"`, or
            None for a dense encoder that keeps the other fields; see
            `keras_moe.layers.resolve_moe_layers`.
        num_experts: E.
        router: name of a router, `"softmax_token_choice"`, `"sinkhorn_token_choice"`,
            `"softmax_expert_choice"`, `"sinkhorn_expert_choice"`,
            `"sparsity_constrained_expert_choice"`, `"soft"` or one of
            `keras_moe.routers.register_router`; or a subclass of `Router`; or a router,
            of which each block gets a copy with a seed of its own. Its arguments say
            all about routing, and the fields about it are then refused.
        router_options: further arguments of the router's class, such as
            `{"affinity": SinkhornAffinity(iterations=50)}`; they override those that
            follow from the fields. A capacity among them is the router's own: K has
            no part in that of expert choice and soft routing.
        num_selected_experts: K, experts per token; with expert choice and soft routing,
            where no token selects, a factor of the capacity.
        expert_mlp_dim: H of each expert; None takes the encoder's `mlp_dim`.
        capacity_factor: c. The experts' capacity is C = S K c / E for every router, so
            that all cost alike: with expert choice and soft routing, too, a token has
            K c slots on average. `"auto"` is the router's own default: 1.05 for token
            choice, 1.1 for MoE++'s router, 1.0 for the others. Switch's and CLIP-UP's
            factor has no K in it: with K = 2 their 2.0 is 1.0 here, and their 4.0 2.0.
        evaluation: competition of tokens at inference, where there is neither noise nor
            dropout. `"batch_invariant"`: each image is a group, so that its result
            does not depend on the batch; token choice serves every token, unless a
            capacity for inference is set. `"official"`: the groups and the capacity
            of training, as the papers and their released code evaluate, or the
            capacity that is set for inference. None is `"batch_invariant"`, unless
            a capacity for inference is set: then `"official"`, with a warning. Soft
            routing does not depend on it.
        eval_capacity_factor: c at inference; None leaves it to `evaluation`. Soft
            routing, whose slots are weights, takes none.
        eval_capacity: C itself at inference, a number of tokens, instead of
            `eval_capacity_factor`; MoE++'s router, whose capacities differ by kind of
            expert, takes none.
        dropless: whether token choice serves every token while training, too.
        capacity_rounding: `"ceil"` or `"round"`; `"auto"` is the router's own default,
            as released: `"round"` for soft routing, else `"ceil"`.
        capacity_multiple_of: number of which capacities are multiples: they are
            rounded up where groups are larger than an image, which they never are
            with soft routing. V-MoE's presets have 4, as its released code has.
        priority: order in which token choice serves tokens when experts are full:
            `"first_come"`, `"max_gate"` (batch priority routing), `"sum_gates"`,
            `"shuffled"`, or modality ids such as `[1, 0]`; see
            `keras_moe.routers.TokenChoiceRouter`.
        noise_std: standard deviation of the sparse routers' training noise, times E;
            None is the router's own: 1.0 for softmax routers, 0.0 for those with
            transport plans and for MoE++'s, as published. Soft routing has its
            own in `router_options`.
        examples_per_group: number of images that compete for an expert's capacity; None
            takes the whole batch. With soft routing each image is by itself.
        auxiliary_losses: dict from name to weight or to options, such as
            `{"load_balance": {"weight": 0.01, "choices": "all"}}` or
            `keras_moe.losses.LIMOE_LOSSES["limoe_b16"]`; see `keras_moe.losses.get`.
            `"auto"` takes V-MoE's importance and load losses (load only with noise)
            for softmax token choice, and MoE++'s for its router; the other routers
            need none.
        expert_dropout: dropout rate inside the experts.
        shared_expert_initialization: whether all experts of a layer start from one
            draw; `"auto"` is True, as in V-MoE, except with MoE++'s router.
        dispatcher: `"index"` or `"einsum"`.
        zero_experts: number of MoE++'s experts that give 0, beside the `num_experts`;
            see `keras_moe.layers.MoE`. With experts of these three kinds the router is
            a `PathwayAwareRouter`, and all that is left to `"auto"` or None follows
            *MoE++*: capacity factor 1.1, no noise, gating residuals, the balance loss
            of weight 0.01, each expert drawn by itself.
        copy_experts: number of experts that give the token.
        constant_experts: number of experts that mix the token with a trained vector, or
            `"auto"`.
        tau: capacity of one of the `num_experts` over that of one of these experts.
        gating_residual: whether a map of each MoE block's logits is added to those of
            the next, by MoE++'s router; `"auto"` is True with zero-computation
            experts in several blocks.
        gated_experts: whether experts are gated, such as SwiGLU; see
            `keras_moe.layers.Experts`. MoE++'s are `gated_experts=True,
            expert_use_bias=False, expert_activation="silu"` with `expert_mlp_dim`
            8 D / 3.
        expert_use_bias: whether the experts' layers have biases.
        expert_activation: activation of the experts; None takes the encoder's.
        num_modalities: number of modalities with a kernel of their own in each router,
            which then need `modality_ids`; None has one kernel.
        expert_pools: numbers of the experts that serve each modality, a list for each,
            none of them in two; None lets every expert serve every modality.
        pruning: dict with `"kept_experts"`, the numbers of the experts that are left of
            the `num_experts`, by the block's name; `"method"`, see
            `keras_moe.routers.pruned.PrunedTokenChoiceRouter`; and `"removed"`, whether
            the layers have these experts alone. `keras_moe.analysis.prune_experts`
            writes it; None has all experts.

    Raises:
        ValueError: if a field is out of range; what depends on the router's class is
            checked where the layers are made.

    Reference:
        *Scaling Vision with Sparse Mixture of Experts*, section 3.1; *Routers in Vision
        Mixture of Experts*, section 2; *MoE++*, Table 2.

    Example:

    >>> from keras_moe.layers import MoEConfig
    >>> moe = MoEConfig(num_experts=8, router="soft")
    >>> MoEConfig.from_dict(moe.to_dict()) == moe
    True
    >>> moe.replace(num_experts=16).num_experts
    16
    """

    moe_layers: Any = "every_2"
    num_experts: int = 32
    router: Any = "softmax_token_choice"
    router_options: dict | None = None
    num_selected_experts: int = 2
    expert_mlp_dim: int | None = None
    capacity_factor: Any = AUTO
    evaluation: str | None = None
    eval_capacity_factor: float | None = None
    eval_capacity: int | None = None
    dropless: bool = False
    capacity_rounding: str = AUTO
    capacity_multiple_of: int | None = None
    priority: Any = "first_come"
    noise_std: float | None = None
    examples_per_group: int | None = 8
    auxiliary_losses: Any = AUTO
    expert_dropout: float = 0.0
    shared_expert_initialization: Any = AUTO
    dispatcher: str = "index"
    zero_experts: int = 0
    copy_experts: int = 0
    constant_experts: Any = 0
    tau: float = 0.75
    gating_residual: Any = AUTO
    gated_experts: bool = False
    expert_use_bias: bool = True
    expert_activation: Any = None
    num_modalities: int | None = None
    expert_pools: Any = None
    pruning: dict | None = None

    def __post_init__(self):
        for name in ("examples_per_group", "expert_mlp_dim", "num_modalities"):
            if getattr(self, name) is not None:
                self._set(**{name: check_integer(name, getattr(self, name))})
        for name in ("dropless", "gated_experts", "expert_use_bias"):
            check_bool(name, getattr(self, name))
        for name in ("gating_residual", "shared_expert_initialization"):
            if getattr(self, name) != AUTO:
                check_bool(name, getattr(self, name))
        if self.evaluation is not None:
            check_one_of("evaluation", self.evaluation, EVALUATIONS)
        if isinstance(self.auxiliary_losses, str):
            check_one_of("auxiliary_losses", self.auxiliary_losses, (AUTO,))
        check_positive("tau", self.tau)
        # Plain values of the config's own: the caller's may change, or not be JSON.
        self._set(
            moe_layers=plain_moe_layers(self.moe_layers),
            router=plain_router(self.router),
            router_options=_plain_options(self.router_options),
            auxiliary_losses=_plain_losses(self.auxiliary_losses),
            expert_activation=activations.plain(self.expert_activation),
            expert_pools=plain_value(self.expert_pools),
            pruning=pruning_config.plain_pruning(self.pruning),
            priority=_plain_priority(self.priority),
            **{
                name: plain_value(getattr(self, name))
                for name in ("num_selected_experts", "eval_capacity", "noise_std")
            },
        )
        if isinstance(self.router, dict):
            self._take_from_router()
        check_disjoint("expert_pools", self.expert_pools)
        # `expert_types` checks the counts.
        self._set(num_experts=self.expert_types.ffn)

    def _take_from_router(self):
        """Takes the counts of experts from a router that is a layer."""
        for name in _ROUTING_FIELDS:
            value = getattr(self, name)
            if value != getattr(type(self), name):
                raise ValueError(
                    f"Expected {name} among the arguments of the router itself, since "
                    f"router is a layer; received: {name}={value!r}"
                )
        router = keras.saving.deserialize_keras_object(self.router)
        expert_types = router.expert_types
        if self.num_experts not in (type(self).num_experts, expert_types.ffn):
            raise ValueError(
                f"Expected the num_experts={expert_types.ffn} of the router; received: "
                f"num_experts={self.num_experts}"
            )
        if self.gating_residual == AUTO:
            self._set(gating_residual=router.gating_residual)
        self._set(
            num_experts=expert_types.ffn,
            zero_experts=expert_types.zero,
            copy_experts=expert_types.copy,
            constant_experts=expert_types.constant,
        )

    def _set(self, **values):
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def expert_types(self) -> ExpertTypes:
        """How many experts a block has of each type."""
        return expert_types(
            self.num_experts,
            self.zero_experts,
            self.copy_experts,
            self.constant_experts,
        )

    @property
    def modality_count(self) -> int | None:
        """M if the routers tell modalities apart, which then need `modality_ids`."""
        if isinstance(self.router, dict):
            router = keras.saving.deserialize_keras_object(self.router)
            return router.modality_count
        fields = {**dataclasses.asdict(self), **(self.router_options or {})}
        if fields["num_modalities"] is not None:
            return fields["num_modalities"]
        if fields["expert_pools"] is not None:
            return len(fields["expert_pools"])
        # Where tokens do not choose, none is served before another.
        cls, _ = router_class(self.router)
        is_by_modality = isinstance(fields["priority"], (list, tuple))
        if is_by_modality and getattr(cls, "side", None) == "token":
            return len(fields["priority"])
        return None

    def feed_forwards(self, encoder: Any) -> list[keras.layers.Layer]:
        """The feed-forward layers of an encoder's blocks, not built.

        Args:
            encoder: `keras_moe.layers.EncoderSpec`.

        Returns:
            An `MLP` or an `MoE` for each block.

        Raises:
            ValueError: if the fields do not fit the router or the encoder; a dense
                encoder refuses the same.
        """
        indices = resolve_moe_layers(self.moe_layers, encoder.num_layers)
        residual = self._has_residual(len(indices))
        pruning_config.check_pruned_blocks(self.pruning, indices)
        first = min(indices, default=0)
        if not indices:
            self._moe(encoder, 0, residual, is_first=True)
        return [
            self._moe(encoder, index, residual, is_first=index == first)
            if index in indices
            else encoder.mlp(index)
            for index in range(encoder.num_layers)
        ]

    def _has_residual(self, num_moe_layers):
        if self.gating_residual == AUTO:
            return self.expert_types.zero_computation > 0 and num_moe_layers > 1
        if self.gating_residual and num_moe_layers == 1:
            raise ValueError(
                "Expected at least two MoE blocks for gating_residual=True, which adds "
                "the logits of the one before; received: "
                f"moe_layers={self.moe_layers}"
            )
        return self.gating_residual

    def make_router(
        self, site: RouterSite, gating_residual: bool | None = None
    ) -> Router:
        """The router of one block, not built.

        Args:
            site: place of the block.
            gating_residual: whether the encoder's routers add the logits of the one
                before, so that all are of one class; None is `site.gating_residual`.
        """
        if isinstance(self.router, dict):
            return keras.saving.deserialize_keras_object(self.router).at_site(site)
        if gating_residual is None:
            gating_residual = site.gating_residual
        cls, arguments = router_class_for_types(
            self.router, self.expert_types, gating_residual
        )
        return cls.from_moe_config(self, site, **arguments)

    def _moe(self, encoder, index, residual, is_first):
        site = RouterSite(
            encoder.num_tokens, encoder.seed_of(index, 3), residual and not is_first
        )
        router = self.make_router(site, residual)
        kept = pruning_config.kept_experts_of(self.pruning, index)
        if kept is not None:
            router = pruned_router(
                router, kept, self.pruning["method"], self.pruning["removed"]
            )
        shared = self.shared_expert_initialization
        if shared == AUTO:
            shared = router.shares_expert_initialization
        auxiliary_losses = self.auxiliary_losses
        if auxiliary_losses == AUTO:
            auxiliary_losses = router.default_auxiliary_losses()
        return MoE(
            router,
            Experts(
                router.expert_types.ffn,
                self.expert_mlp_dim or encoder.mlp_dim,
                activation=self.expert_activation or encoder.activation,
                dropout=self.expert_dropout,
                shared_initialization=shared,
                gated=self.gated_experts,
                use_bias=self.expert_use_bias,
                seed=encoder.seed_of(index, 2),
                dtype=encoder.dtype,
                name="experts",
            ),
            group_size=self.examples_per_group
            and self.examples_per_group * encoder.num_tokens,
            auxiliary_losses=auxiliary_losses,
            dispatcher=self.dispatcher,
            dtype=encoder.dtype,
            name="moe",
        )


def plain_router(router: Any) -> str | dict:
    """A router as its name, or as the config of a layer."""
    if isinstance(router, dict):
        router = keras.saving.deserialize_keras_object(router)
    if isinstance(router, Router):
        return keras.saving.serialize_keras_object(router)
    router_class(router)
    return router if isinstance(router, str) else router_name(router)


def _plain_priority(priority):
    """A priority as its name, or as a list of modality ids."""
    priority = plain_value(priority)
    return list(priority) if isinstance(priority, tuple) else priority


def _plain_options(options):
    """Options whose values are plain data, as a config needs them."""
    if options is None:
        return None
    if not isinstance(options, dict):
        raise ValueError(
            "Expected router_options to be None or a dict of arguments; "
            f"received: router_options={options!r}"
        )
    return plain_value(options)


def plain_value(value: Any) -> Any:
    """A copy of plain data, or the config of a Keras object, at any depth."""
    if isinstance(value, dict):
        return {name: plain_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain_value(each) for each in value)
    if isinstance(value, (np.ndarray, np.generic)):
        # NumPy's numbers are not JSON.
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return keras.saving.serialize_keras_object(value)


def _plain_losses(auxiliary_losses):
    if isinstance(auxiliary_losses, dict):
        losses.get(auxiliary_losses)
    if isinstance(auxiliary_losses, (str, dict)):
        return plain_value(auxiliary_losses)
    return losses.serialize(losses.get(auxiliary_losses))
