"""Token choice routing: each token takes its K experts.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_bool, check_integer, check_selected
from keras_moe.ops.plans import RaggedPlan, RoutingPlan
from keras_moe.ops.primitives import vmap_groups
from keras_moe.ops.token_choice import (
    NORMALIZATIONS,
    dropless_token_choice,
    token_choice,
)
from keras_moe.routers.affinities import SoftmaxAffinity
from keras_moe.routers.evaluation import check_evaluation
from keras_moe.routers.modalities import check_priority, ranks
from keras_moe.routers.registry import register_router
from keras_moe.routers.sparse_router import SparseRouter


@register_router("sparsity_constrained_token_choice", affinity="sparsity_constrained")
@register_router("sinkhorn_token_choice", affinity="sinkhorn")
@register_router("softmax_token_choice", affinity="softmax")
@keras.saving.register_keras_serializable("keras_moe")
class TokenChoiceRouter(SparseRouter):
    """Every token takes its K experts of largest affinity, as in V-MoE.

    While training an expert serves at most its capacity of tokens per group. At
    inference every token is served by default and each image is a group by itself, so
    that its result does not depend on its neighbours in the batch. The papers'
    evaluation limits capacity in the groups of training: `eval_capacity_factor` or
    `eval_capacity` with `batch_invariant=False`.

    Args:
        num_experts: E.
        num_selected_experts: K, experts per token.
        affinity: name of the affinity, `"softmax"`, `"sinkhorn"` or
            `"sparsity_constrained"`, or an affinity with arguments of its own such as
            `SinkhornAffinity(iterations=50)`.
        combine: combine weights, `"softmax"`, or `"affinity"` for the transport plan
            itself, through which gradients then flow.
        normalize_gates: normalisation of the combine weights; `"before"` divides them
            by the sum of the token's K, `"after"` by the sum of those that got a slot
            (*CLIP-UP*, appendix B.3), and None, the papers' default, leaves them as
            they are.
        capacity_factor: c, with C = S K c / E while training; 1.05 without this,
            `capacity` and `dropless`. Switch and CLIP-UP leave K out: with K = 2, the
            latter's 2.0 is 1.0 here.
        capacity: C itself, a number of tokens, instead of `capacity_factor`.
        eval_capacity_factor: c at inference; None serves every token.
        eval_capacity: C itself at inference, instead of `eval_capacity_factor`.
        batch_invariant: whether each image is a group at inference (True), or groups
            are those of training (False). None is True without a capacity of inference;
            with one it is False and warns, since results then depend on the batch.
        dropless: whether every token is served while training, too, whatever an
            expert's load.
        capacity_rounding: rounding of the capacity, `"ceil"` or `"round"`.
        capacity_multiple_of: divisor of the capacity, which is rounded up to a multiple
            of it unless each image is a group, or None. The released V-MoEs take 4.
        priority: order in which the tokens of a group are served:
            `"first_come"` as they stand, `"max_gate"` (batch priority routing) or
            `"sum_gates"` by their gates (see `keras_moe.ops.token_choice`);
            `"shuffled"` in an order that each call draws anew; or modality ids, such as
            `(1, 0)` to serve all tokens of modality 1 before those of modality 0, and
            each modality's as they stand. Where tokens are shuffled, inference with a
            capacity is first come, since its results must be repeatable; *LIMoE*
            leaves that open.
        noise_std: standard deviation of the training noise, times `num_experts`; None
            is the affinity's: 1.0 for softmax, 0.0 for transport plans.
        noisy_combine: whether the softmax that weighs outputs has the noise, too; None
            is as in the released code: True for softmax, False for transport plans.
        kernel_initializer: initializer of the kernel (D, E), or (M, D, E).
        num_modalities: M; each modality then has a kernel of its own over the shared
            experts, and calls take `modality_ids`.
        expert_pools: experts of each modality, those that its tokens may go to.
        excluded_experts: experts that no token chooses; the softmax is over the
            others. See `keras_moe.analysis.exclude_experts`.
        seed: seed of the noise and of shuffled tokens.
        **kwargs: arguments of `keras.layers.Layer`; `dtype` is always float32.

    Call arguments:
        tokens: (G, S, D).
        mask: boolean (G, S), False for tokens that are not routed.
        modality_ids: integers (G, S), for `num_modalities`, `expert_pools` and a
            `priority` of modalities; tokens of ids that are not in [0, M) are not
            routed.
        training: whether noise is added and the capacity limits.

    Output shape:
        `(RoutingPlan, Routing)`, or `(RaggedPlan, Routing)` where every token is
        served; see their attributes.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        *Routers in Vision Mixture of Experts*, sections 2.1 and 2.2, Algorithm 1;
        *LIMoE*, figure 6, for the orders shuffled, image first and text first.

    Example:

    >>> import numpy as np
    >>> from keras_moe.routers import TokenChoiceRouter
    >>> router = TokenChoiceRouter(num_experts=4, num_selected_experts=2)
    >>> plan, routing = router(np.ones((1, 6, 8), "float32"))
    >>> tuple(routing.gates.shape)
    (1, 6, 4)
    """

    side = "token"
    default_capacity_factor = 1.05
    normalizations = NORMALIZATIONS

    def __init__(
        self,
        num_experts: int,
        num_selected_experts: int = 2,
        affinity: Any = "softmax",
        combine: str = "softmax",
        normalize_gates: str | None = None,
        capacity_factor: float | None = None,
        capacity: int | None = None,
        eval_capacity_factor: float | None = None,
        eval_capacity: int | None = None,
        batch_invariant: bool | None = None,
        dropless: bool = False,
        capacity_rounding: str = "ceil",
        capacity_multiple_of: int | None = None,
        priority: Any = "first_come",
        noise_std: float | None = None,
        noisy_combine: bool | None = None,
        kernel_initializer: Any = "lecun_normal",
        num_modalities: int | None = None,
        expert_pools: Any = None,
        excluded_experts: Any = (),
        seed: int | None = None,
        **kwargs,
    ):
        if dropless and (capacity is not None or capacity_factor is not None):
            raise ValueError(
                "Expected neither capacity nor capacity_factor with dropless=True; "
                f"received: capacity={capacity}, capacity_factor={capacity_factor}"
            )
        if capacity is None and capacity_factor is None and not dropless:
            capacity_factor = self.default_capacity_factor
        super().__init__(
            num_experts,
            affinity=affinity,
            combine=combine,
            normalize_gates=normalize_gates,
            capacity_factor=capacity_factor,
            capacity=capacity,
            capacity_rounding=capacity_rounding,
            capacity_multiple_of=capacity_multiple_of,
            noise_std=noise_std,
            noisy_combine=noisy_combine,
            kernel_initializer=kernel_initializer,
            num_modalities=num_modalities,
            expert_pools=expert_pools,
            seed=seed,
            **kwargs,
        )
        self.num_selected_experts = check_selected(
            num_selected_experts, self.num_experts
        )
        smallest = min(map(len, self.expert_pools or [range(self.num_experts)]))
        if self.num_selected_experts > smallest:
            raise ValueError(
                "Expected pools of at least num_selected_experts="
                f"{num_selected_experts} experts; received: expert_pools={expert_pools}"
            )
        self.batch_invariant = check_evaluation(
            eval_capacity_factor, eval_capacity, batch_invariant
        )
        self.eval_capacity_factor = eval_capacity_factor
        self.eval_capacity = eval_capacity
        self.dropless = check_bool("dropless", dropless)
        self.excluded_experts = self._check_excluded(excluded_experts)
        self.priority = check_priority(priority, super().modality_count)

    @classmethod
    def own_fields(cls, config, site):
        return {
            "num_selected_experts": config.num_selected_experts,
            "dropless": config.dropless,
            "priority": config.priority,
        }

    def default_auxiliary_losses(self):
        if not isinstance(self.affinity, SoftmaxAffinity):
            return None
        # V-MoE's; the noise defines the load loss.
        load = {"load": 0.005} if self.noise_std > 0 else {}
        return {"importance": 0.005, **load}

    def _check_excluded(self, excluded_experts):
        if not isinstance(excluded_experts, (list, tuple)):
            raise ValueError(
                "Expected excluded_experts to be a sequence of experts; "
                f"received: excluded_experts={excluded_experts!r}"
            )
        excluded = {check_integer("excluded_experts", e, 0) for e in excluded_experts}
        pools = self.expert_pools or [range(self.num_experts)]
        left = min(len(set(pool) - excluded) for pool in pools)
        if any(e >= self.num_experts for e in excluded) or (
            left < self.num_selected_experts
        ):
            raise ValueError(
                f"Expected excluded_experts below num_experts={self.num_experts} that "
                f"leave num_selected_experts={self.num_selected_experts} or more; "
                f"received: excluded_experts={excluded_experts!r}"
            )
        return tuple(sorted(excluded))

    @contextlib.contextmanager
    def excluding(self, experts: Any) -> Iterator[None]:
        """A context in which no token chooses these experts, either.

        Args:
            experts: sequence of numbers of experts.

        Raises:
            ValueError: if there is no such expert, or fewer than K are left.
        """
        kept = self.excluded_experts
        self.excluded_experts = self._check_excluded((*kept, *experts))
        try:
            yield
        finally:
            self.excluded_experts = kept

    @property
    def modality_count(self) -> int | None:
        """M if the router tells modalities apart; calls then take `modality_ids`."""
        if isinstance(self.priority, list):
            return len(self.priority)
        return super().modality_count

    def by_modality(self) -> str:
        """The arguments that tell modalities apart, for messages."""
        return f"{super().by_modality()}, priority={self.priority}"

    def route(
        self,
        logits: Any,
        allowed: Any,
        mask: Any,
        training: bool | None,
        modality_ids: Any = None,
    ) -> tuple[Any, Any]:
        if self.excluded_experts:
            kept = [e not in self.excluded_experts for e in range(self.num_experts)]
            kept = ops.convert_to_tensor(kept, "bool")
            kept = ops.broadcast_to(kept, ops.shape(logits))
            allowed = kept if allowed is None else ops.logical_and(allowed, kept)
        return super().route(logits, allowed, mask, training, modality_ids)

    def serves_every_token(self, training: bool | None) -> bool:
        """Whether no expert can be full.

        Args:
            training: whether the router trains.
        """
        if training:
            return self.dropless
        return self.eval_capacity_factor is None and self.eval_capacity is None

    def groups_per_example(self, training: bool | None) -> bool:
        return not training and self.batch_invariant

    def group_capacity(self, num_tokens: Any, training: bool | None) -> Any:
        """The capacity C, or None if it is unlimited.

        Args:
            num_tokens: tokens of a group.
            training: whether the capacity is that of training.
        """
        if self.serves_every_token(training):
            return None
        capacity = self.capacity if training else self.eval_capacity
        if capacity is not None:
            return capacity
        factor = self.capacity_factor if training else self.eval_capacity_factor
        return self.capacity_of(
            num_tokens, factor, self.num_selected_experts, self.multiple_of(training)
        )

    def multiple_of(self, training: bool | None) -> int | None:
        """The number whose multiples capacities are, or None.

        Args:
            training: whether the capacity is that of training.
        """
        # The rounding would multiply an image's few slots.
        return None if self.groups_per_example(training) else self.capacity_multiple_of

    def max_nonzeros(self, num_tokens, training):
        return self.num_selected_experts

    def allocate(self, affinity, gates, mask=None, training=None, modality_ids=None):
        capacity = self.group_capacity(ops.shape(affinity)[1], training)
        priority = self.served_by(affinity, modality_ids, training)
        return self.choose(affinity, gates, mask, capacity, priority)

    def served_by(self, affinity: Any, modality_ids: Any, training: bool | None) -> Any:
        """The `priority` of `token_choice`: a name, or numbers (G, S).

        Args:
            affinity: float32 (G, S, E).
            modality_ids: integers (G, S), or None.
            training: whether the router trains.
        """
        if isinstance(self.priority, list):
            return ranks(modality_ids, self.priority)
        if self.priority != "shuffled":
            return self.priority
        if not training or self.serves_every_token(training):
            return "first_come"
        # Equal numbers are rare, and keep the order of their tokens.
        return keras.random.uniform(
            ops.shape(affinity)[:2], dtype="float32", seed=self.seed_generator
        )

    def choose(
        self,
        affinity: Any,
        gates: Any,
        mask: Any,
        capacity: Any,
        priority: Any,
        **arguments: Any,
    ) -> Any:
        """The plan of token choice, which serves each token if there is no capacity.

        Args:
            affinity: float32 (G, S, E).
            gates: float32 (G, S, E).
            mask: boolean (G, S), or None.
            capacity: C, or None.
            priority: name of an order, or numbers (G, S).
            **arguments: further arguments of `token_choice`.
        """
        if capacity is None:
            return dropless_token_choice(
                affinity,
                gates,
                self.num_selected_experts,
                mask,
                self.normalize_gates,
                **arguments,
            )

        numbers = None if isinstance(priority, str) else priority

        def allocate(affinity, gates, mask, numbers):
            return token_choice(
                affinity,
                gates,
                self.num_selected_experts,
                capacity,
                priority=priority if numbers is None else numbers,
                mask=mask,
                normalize_gates=self.normalize_gates,
                **arguments,
            )

        return vmap_groups(allocate, affinity, gates, mask, numbers)

    def total_slots(self, num_tokens: int) -> int:
        return num_tokens * self.num_selected_experts

    def experts_per_token(self, num_tokens: int) -> float:
        return self.num_selected_experts

    @property
    def summary(self) -> str:
        """The sparsity of the router in a few characters."""
        return f"K={self.num_selected_experts}"

    def compute_output_spec(self, tokens, mask=None, modality_ids=None, training=None):
        num_groups, num_tokens, _ = tokens.shape
        by_choice = (num_groups, num_tokens, self.num_selected_experts)
        if self.serves_every_token(training):
            num_rows = None
            if None not in by_choice:
                num_rows = num_groups * num_tokens * self.num_selected_experts
            plan = RaggedPlan(
                keras.KerasTensor((num_rows,), "int32"),
                keras.KerasTensor(by_choice, "int32"),
                keras.KerasTensor(by_choice, "float32"),
                keras.KerasTensor(by_choice, "int32"),
                keras.KerasTensor((self.expert_types.ffn,), "int32"),
            )
        else:
            capacity = None
            if num_tokens is not None:
                capacity = self.group_capacity(num_tokens, training)
            slots = (num_groups, self.expert_types.ffn, capacity)
            plan = RoutingPlan(
                keras.KerasTensor(slots, "int32"),
                keras.KerasTensor(by_choice, "int32"),
                keras.KerasTensor(by_choice, "float32"),
            )
        return plan, self.routing_spec(num_groups, num_tokens)

    def get_config(self):
        config = super().get_config()
        config.update(
            num_selected_experts=self.num_selected_experts,
            eval_capacity_factor=self.eval_capacity_factor,
            eval_capacity=self.eval_capacity,
            batch_invariant=self.batch_invariant,
            dropless=self.dropless,
            excluded_experts=self.excluded_experts,
            priority=self.priority,
        )
        return config
