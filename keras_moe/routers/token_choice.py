"""Token choice routing: each token selects K experts.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_moe import _checks
from keras_moe._types import Tensor
from keras_moe.ops._primitives import is_transformed, replica_sum, vmap_groups
from keras_moe.ops.plans import RaggedPlan, RoutingPlan
from keras_moe.ops.token_choice import (
    NORMALIZATIONS,
    PRIORITIES,
    dropless_token_choice,
    token_choice,
    top_experts,
)
from keras_moe.routers.affinities import SoftmaxAffinity
from keras_moe.routers.sparse_router import SparseRouter, is_sequence

GATES = ("softmax", "sigmoid")
# The priorities of `token_choice`, plus a random order.
NAMED_PRIORITIES = (*PRIORITIES, "shuffled")


@keras.saving.register_keras_serializable("keras_moe")
class TokenChoiceRouter(SparseRouter):
    """Each token selects the K experts with the largest affinity, as in V-MoE.

    In training, an expert serves at most C tokens of a group and the rest are dropped.
    At inference each example is a group and no token is dropped by default; use
    `evaluation="official"` for the papers' evaluation with a limited capacity.

    Args:
        num_experts: number E of experts.
        num_selected_experts: K, experts per token.
        dropless: whether training has no capacity limit either.
        priority: order in which tokens fill the capacity: `"first_come"`; `"max_gate"`
            (batch priority routing) or `"sum_gates"`, by their gates; `"shuffled"`, a
            random order in training; or all modality ids, such as `(1, 0)` to serve
            modality 1 first.
        excluded_experts: experts that no token may choose.
        gates: `"softmax"` over experts, or `"sigmoid"` of each logit, as in DeepSeek-V3
            and SigLino; only with `affinity="softmax"`, which then means the gates.
        selection_bias_rate: u, by how much a step of training moves each expert's
            selection bias, which is added to the gates when experts are chosen, but not
            to the combine weights: up if its load was below the mean, down if it was
            above. 0.001 in the paper; 0 for a fixed bias; None for no bias. Replaces
            auxiliary losses. Routers that are frozen keep their bias. A step is one of
            the optimizer that a task of this library was compiled with; in a model of
            your own, set `passes_per_step` to its number of accumulated batches.
        route_scale: factor on the combine weights, after `normalize_gates`.
        ensemble_size: M, members of an ensemble that shares the layers around the
            experts. Each has its own E / M experts with their columns of the kernel,
            and noise and auxiliary losses of its own. In a model, see
            `keras_moe.layers.MoEConfig`; in a call, `modality_ids` are the members.
        **kwargs: arguments of `SparseRouter`. `noise_std` is 0 by default with sigmoid
            gates or a selection bias. `capacity_factor` is 1.05 by default;
            CLIP-UP omits K, so that its 2.0 with K = 2 is 1.0 here.
            `normalize_gates="before"` divides combine weights by their sum over the
            token's K choices, `"after"` over those that got a slot (*CLIP-UP*, appendix
            B.3); None keeps them. With K=1 a normalised gate is 1, and has no gradient.

    Output shape: `(RoutingPlan, Routing)`, or `(RaggedPlan, Routing)` without a
    capacity; see their attributes.

    Reference: *Routers in Vision Mixture of Experts*, sections 2.1 and 2.2, Algorithm
    1; *LIMoE*, figure 6, for shuffled and modality priorities; *Auxiliary-Loss-Free
    Load Balancing Strategy for Mixture-of-Experts*, Algorithm 1, for the selection
    bias; *Sparse MoEs Meet Efficient Ensembles*, section 4, for `ensemble_size`.

    Example:

    >>> from keras_moe.routers import TokenChoiceRouter
    >>> router = TokenChoiceRouter(num_experts=4, num_selected_experts=2)
    >>> plan, routing = router(np.ones((1, 6, 8), "float32"))
    >>> tuple(routing.gates.shape)
    (1, 6, 4)
    """

    default_capacity_factor = 1.05
    normalizations = NORMALIZATIONS
    # Forward passes whose gradients make one step; `compile` of a task sets it.
    passes_per_step = 1

    def __init__(
        self,
        num_experts: int,
        num_selected_experts: int = 2,
        dropless: bool = False,
        priority: str | Sequence[int] = "first_come",
        excluded_experts: Sequence[int] = (),
        gates: str = "softmax",
        selection_bias_rate: float | None = None,
        route_scale: float = 1.0,
        ensemble_size: int = 1,
        **kwargs,
    ):
        self.gates = _checks.check_one_of("gates", gates, GATES)
        if selection_bias_rate is not None:
            _checks.check_not_negative("selection_bias_rate", selection_bias_rate)
        self.selection_bias_rate = selection_bias_rate
        self.route_scale = _checks.check_positive("route_scale", route_scale)
        self.ensemble_size = _checks.check_integer("ensemble_size", ensemble_size)
        is_plain = gates == "softmax" and selection_bias_rate is None
        if not is_plain and kwargs.get("noise_std") is None:
            kwargs["noise_std"] = 0.0
        super().__init__(num_experts, num_selected_experts, **kwargs)
        if not is_plain and type(self.affinity) is not SoftmaxAffinity:
            raise ValueError(
                "Expected affinity='softmax' for gates and choices without transport; "
                f"received: affinity={self.affinity}, gates={gates!r}, "
                f"selection_bias_rate={selection_bias_rate}"
            )
        if self.expert_pools is not None and selection_bias_rate is not None:
            raise ValueError(
                "Expected one pool of experts, whose load a selection bias balances; "
                f"received: expert_pools={self.expert_pools}, "
                f"selection_bias_rate={selection_bias_rate}"
            )
        self._check_members()
        self.num_selected_experts = _checks.check_selected(
            num_selected_experts, self.num_experts
        )
        if self.num_selected_experts == 1 and self.normalize_gates is not None:
            warnings.warn(
                f"normalize_gates={self.normalize_gates!r} makes the combine weight of "
                "a token's only expert 1, so that only auxiliary losses train the "
                "router. Use normalize_gates=None, or num_selected_experts=2.",
                stacklevel=_checks.outer_stack_level(),
            )
        self.dropless = _checks.check_bool("dropless", dropless)
        if dropless:
            names = ("capacity", "capacity_factor")
            given = {x: kwargs[x] for x in names if kwargs.get(x) is not None}
            if given:
                raise _checks.unfit(
                    "no capacity or capacity_factor if dropless=True", **given
                )
            self.capacity_factor = None
        self.excluded_experts = self.check_excluded(excluded_experts)
        self.priority = _check_priority(priority, super().modality_count)

    def default_auxiliary_losses(self):
        is_balanced = self.selection_bias_rate is not None
        if is_balanced or not isinstance(self.affinity, SoftmaxAffinity):
            return None
        # V-MoE's losses; the load loss is defined only with noise.
        load = {"load": 0.005} if self.noise_std > 0 else {}
        return {"importance": 0.005, **load}

    def check_excluded(self, excluded_experts: Sequence[int]) -> tuple[int, ...]:
        """Checks that K experts remain; returns the excluded ones sorted."""
        excluded = _checks.check_indices(
            "excluded_experts", excluded_experts, self.num_experts
        )
        pools = self.pools or [range(self.num_experts)]
        if min(len({*pool} - excluded) for pool in pools) < self.num_selected_experts:
            raise _checks.unfit(
                f"num_selected_experts={self.num_selected_experts} for every token",
                expert_pools=self.pools,
                excluded_experts=excluded_experts,
            )
        return tuple(sorted(excluded))

    def build(self, input_shape):
        super().build(input_shape)
        if self.selection_bias_rate is None:
            return
        # The bias, the choices of each expert in the last step (so far), and the number
        # of forward passes of an unfinished step.
        self.selection_bias = self._add_state("selection_bias", (self.num_experts,))
        self.expert_load = self._add_state("expert_load", (self.num_experts,))
        self.num_passes = self._add_state("num_passes", ())

    def _add_state(self, name, shape):
        kept = {"trainable": False, "autocast": False, "dtype": "float32"}
        return self.add_weight(shape, "zeros", name=name, **kept)

    def _check_members(self):
        members = self.ensemble_size
        if self.num_experts % members:
            expected = "num_experts to be a multiple of ensemble_size"
            raise _checks.unfit(
                expected, num_experts=self.num_experts, ensemble_size=members
            )
        modalities = self.num_modalities, self.expert_pools
        if members > 1 and modalities != (None, None):
            raise _checks.unfit(
                "ensemble_size=1 for a router with modalities",
                ensemble_size=members,
                num_modalities=self.num_modalities,
                expert_pools=self.expert_pools,
            )

    @property
    def pools(self) -> Sequence[Sequence[int]] | None:
        if self.ensemble_size == 1:
            return self.expert_pools
        size = self.num_experts // self.ensemble_size
        return [
            range(first, first + size) for first in range(0, self.num_experts, size)
        ]

    @property
    def noise_deviation(self) -> float:
        # Each member is a router of E / M experts.
        return self.ensemble_size * super().noise_deviation

    @property
    def choices_per_token(self) -> int:
        return self.ensemble_size * self.num_selected_experts

    @property
    def modality_count(self) -> int | None:
        """M if the router distinguishes modalities and needs `modality_ids`."""
        if isinstance(self.priority, list):
            return len(self.priority)
        return super().modality_count

    def route(
        self,
        logits: Tensor,
        allowed: Tensor | None,
        mask: Tensor | None,
        training: bool | None,
        modality_ids: Tensor | None = None,
    ) -> tuple[Any, Any]:
        if self.excluded_experts:
            kept = ops.convert_to_tensor(self.available_experts, "bool")
            kept = ops.broadcast_to(kept, ops.shape(logits))
            allowed = kept if allowed is None else ops.logical_and(allowed, kept)
        return super().route(logits, allowed, mask, training, modality_ids)

    def serves_every_token(self, training: bool | None) -> bool:
        """Whether there is no capacity limit."""
        return self.limits(training) == (None, None)

    def max_nonzeros(self, num_tokens, training):
        return self.num_selected_experts

    @property
    def available_experts(self) -> list[bool]:
        """Whether each expert can be chosen, and is balanced with the others."""
        return [e not in self.excluded_experts for e in range(self.num_experts)]

    def gates_of(self, logits: Tensor) -> Tensor:
        if self.gates == "sigmoid":
            return ops.sigmoid(logits)
        return super().gates_of(logits)

    def allocate(self, affinity, gates, mask=None, training=None, modality_ids=None):
        if self.selection_bias_rate is not None:
            # Tokens choose the K largest of g_i + b_i; g_i weighs the outputs.
            affinity = affinity + ops.convert_to_tensor(self.selection_bias)
        choices = None
        is_trained = self.trainable and self.kernel.trainable and not is_transformed()
        if training and self.selection_bias_rate and is_trained:
            choices = top_experts(affinity, gates, self.num_selected_experts)
            self._balance(choices[0], mask)
        capacity = self.group_capacity(ops.shape(affinity)[1], training)
        priority = self.served_by(affinity, modality_ids, training)
        return self.choose(affinity, gates, mask, capacity, priority, choices=choices)

    def _balance(self, experts, mask):
        """Moves the selection bias against the load, once for each step."""
        index = ops.arange(self.num_experts, dtype="int32")
        chosen = ops.cast(ops.expand_dims(experts, -1) == index, "float32")
        if mask is not None:
            chosen = ops.where(mask[..., None, None], chosen, 0.0)
        load = replica_sum(ops.sum(chosen, axis=(0, 1, 2)))
        is_last: Any = True
        if self.passes_per_step > 1:
            # The load of all passes of a step whose gradients are accumulated.
            states = (self.num_passes, self.expert_load)
            passes, before = map(ops.convert_to_tensor, states)
            load = load + ops.where(passes > 0, before, 0.0)
            is_last = passes + 1 >= self.passes_per_step
            self.num_passes.assign(ops.where(is_last, 0.0, passes + 1))
        self.expert_load.assign(load)
        # b_i <- b_i + u sign(mean load - load of i)
        available = self.available_experts
        mean = ops.sum(load) / sum(available)
        step = self.selection_bias_rate * ops.sign(mean - load)
        if self.passes_per_step > 1:
            step = ops.where(is_last, step, 0.0)
        if not all(available):
            step = ops.where(ops.convert_to_tensor(available, "bool"), step, 0.0)
        self.selection_bias.assign_add(step)

    def served_by(
        self, affinity: Tensor, modality_ids: Tensor | None, training: bool | None
    ) -> str | Tensor:
        """The `priority` argument of `token_choice`: a name, or ranks (G, S)."""
        if not isinstance(self.priority, str):
            return _ranks(modality_ids, self.priority)
        if self.priority != "shuffled":
            return self.priority
        if not training or self.serves_every_token(training):
            return "first_come"
        # Ties are rare, and keep the tokens' order.
        return keras.random.uniform(
            ops.shape(affinity)[:2], dtype="float32", seed=self.seed_generator
        )

    def choose(
        self,
        affinity: Tensor,
        gates: Tensor,
        mask: Tensor | None,
        capacity: int | Tensor | None,
        priority: str | Tensor,
        choices: tuple[Tensor, Tensor] | None = None,
        **arguments: Any,
    ) -> Any:
        """The token choice plan; dropless if `capacity` is None."""
        if capacity is None:
            plan = dropless_token_choice(
                affinity,
                gates,
                self.num_selected_experts,
                mask,
                normalize_gates=self.normalize_gates,
                choices=choices,
                **arguments,
            )
            return self._scaled(plan)

        numbers = None if isinstance(priority, str) else priority

        def allocate(affinity, gates, mask, numbers, *choices):
            return token_choice(
                affinity,
                gates,
                self.num_selected_experts,
                capacity,
                priority=priority if numbers is None else numbers,
                mask=mask,
                normalize_gates=self.normalize_gates,
                choices=None if choices[0] is None else choices,
                **arguments,
            )

        arrays = (affinity, gates, mask, numbers, *(choices or (None, None)))
        return self._scaled(vmap_groups(allocate, *arrays))

    def _scaled(self, plan):
        if self.route_scale == 1:
            return plan
        return plan._replace(combine_weights=self.route_scale * plan.combine_weights)

    def total_slots(self, num_tokens: int) -> int:
        return num_tokens * self.num_selected_experts

    def experts_per_token(self, num_tokens: int) -> float:
        return self.num_selected_experts

    @property
    def summary(self) -> str:
        """A short label such as "K=2"."""
        members = f", {self.ensemble_size} members" if self.ensemble_size > 1 else ""
        return f"K={self.num_selected_experts}{members}"

    def compute_output_spec(self, tokens, training=None, **kwargs):
        # JAX cannot trace the search in the sorted queues for unknown sizes.
        num_groups, num_tokens, _ = tokens.shape
        num_experts = len(self.expert_columns)
        choices = (num_groups, num_tokens, self.num_selected_experts)
        if self.serves_every_token(training):
            num_rows = None if None in choices else math.prod(choices)
            plan, of_experts = RaggedPlan, (num_experts,)
            shapes = ((num_rows,), choices, choices, choices, of_experts)
        else:
            capacity = num_tokens and self.group_capacity(num_tokens, training)
            plan, slots = RoutingPlan, (num_groups, num_experts, capacity)
            shapes = (slots, choices, choices)
        specs = {
            name: keras.KerasTensor(shape, "int32")
            for name, shape in zip(plan._fields, shapes)
        }
        specs["combine_weights"] = keras.KerasTensor(choices, "float32")
        return plan(**specs), self.routing_spec(num_groups, num_tokens)


def _check_priority(priority, num_modalities):
    """Checks that `priority` is a name or a permutation of all modality ids."""
    if isinstance(priority, str) or not is_sequence(priority):
        return _checks.check_one_of("priority", priority, NAMED_PRIORITIES)
    ids = [
        _checks.check_integer("priority", modality, minimum=0) for modality in priority
    ]
    count = len(ids) if num_modalities is None else num_modalities
    if not ids or sorted(ids) != list(range(count)):
        expected = f"one of {NAMED_PRIORITIES} or the {count} modality ids, each once"
        raise _checks.unfit(expected, priority=priority)
    return ids


def _ranks(modality_ids, priority):
    """Each token's rank by the priority of its modality."""
    modality_ids = ops.cast(modality_ids, "int32")
    ranks = ops.zeros_like(modality_ids)
    for rank, modality in enumerate(priority):
        ranks = ops.where(modality_ids == modality, rank, ranks)
    return ranks
