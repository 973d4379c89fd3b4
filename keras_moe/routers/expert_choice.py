"""Expert choice routing: each expert takes its C tokens.

Axes: G groups, S group_size, E experts, C capacity, K experts per token, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_integer
from keras_moe.ops.expert_choice import NORMALIZATIONS, expert_choice
from keras_moe.ops.plans import SlotPlan
from keras_moe.ops.primitives import vmap_groups
from keras_moe.routers.evaluation import check_evaluation
from keras_moe.routers.registry import register_router
from keras_moe.routers.sparse_router import SparseRouter


@register_router("sparsity_constrained_expert_choice", affinity="sparsity_constrained")
@register_router("sinkhorn_expert_choice", affinity="sinkhorn")
@register_router("softmax_expert_choice", affinity="softmax")
@keras.saving.register_keras_serializable("keras_moe")
class ExpertChoiceRouter(SparseRouter):
    """Every expert takes its C tokens of largest affinity.

    All experts serve alike, and no auxiliary loss is needed; a token may be served by
    several experts or by none. Who is served depends on the other tokens of the group.
    While training a group is `MoE.group_size` tokens of the batch; at inference each
    image is one, so that its result does not depend on its neighbours in the batch.

    Args:
        num_experts: E.
        affinity: name of the affinity, `"softmax"`, `"sinkhorn"` or
            `"sparsity_constrained"`, or an affinity with arguments of its own such as
            `SinkhornAffinity(iterations=50)`.
        combine: combine weights, `"softmax"`, or `"affinity"` for the transport plan
            itself, through which gradients then flow.
        normalize_gates: normalisation of the combine weights; `"after"` divides them by
            the sum over the experts that took the token (*CLIP-UP*, appendix B.3), and
            None, the papers' default, leaves them as they are.
        capacity_factor: C = S K c / E, so that a token meets K c experts on average;
            1.0 without this and without `capacity`. C is never more than S; masked
            tokens do not count.
        capacity: C itself, instead of `capacity_factor`; if each image is a group at
            inference, it needs a capacity of inference beside it, since an image is
            smaller than a group.
        num_selected_experts: K of the capacity. Experts choose, so no token selects K
            of them: the papers' formula has 1, the default. Backbones pass theirs on,
            so that all routers cost alike.
        eval_capacity_factor: c at inference; None is as in training.
        eval_capacity: C itself at inference, instead of `eval_capacity_factor`.
        batch_invariant: whether each image is a group at inference (True), or groups
            are those of training (False). None is True without a capacity of inference;
            with one it is False and warns, since results then depend on the batch.
        capacity_rounding: rounding of the capacity, `"ceil"` or `"round"`.
        capacity_multiple_of: divisor of the capacity, which is rounded up to a multiple
            of it unless each image is a group, or None.
        noise_std: standard deviation of the training noise, times `num_experts`; None
            is the affinity's: 1.0 for softmax, 0.0 for transport plans.
        noisy_combine: whether the softmax that weighs outputs has the noise, too; None
            is as in the released code: True.
        kernel_initializer: initializer of the kernel (D, E), or (M, D, E).
        num_modalities: M; each modality then has a kernel of its own over the shared
            experts, and calls take `modality_ids`.
        expert_pools: experts of each modality, those that its tokens may go to; an
            expert whose pool has fewer than C tokens leaves slots empty.
        seed: seed of the noise.
        **kwargs: arguments of `keras.layers.Layer`; `dtype` is always float32.

    Call arguments:
        tokens: (G, S, D).
        mask: boolean (G, S), False for tokens that are not routed.
        modality_ids: integers (G, S); tokens of ids that are not in [0, M) are not
            routed.
        training: whether noise is added.

    Output shape:
        `(SlotPlan, Routing)`; see their attributes.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        *Routers in Vision Mixture of Experts*, sections 2.3 to 2.5, Algorithm 2.

    Example:

    >>> import numpy as np
    >>> from keras_moe.routers import ExpertChoiceRouter
    >>> router = ExpertChoiceRouter(num_experts=4, capacity_factor=2.0)
    >>> plan, routing = router(np.ones((1, 6, 8), "float32"))
    >>> tuple(plan.slot_tokens.shape)
    (1, 4, 3)
    """

    side = "expert"
    normalizations = NORMALIZATIONS

    def __init__(
        self,
        num_experts: int,
        affinity: Any = "softmax",
        combine: str = "softmax",
        normalize_gates: str | None = None,
        capacity_factor: float | None = None,
        capacity: int | None = None,
        num_selected_experts: int = 1,
        eval_capacity_factor: float | None = None,
        eval_capacity: int | None = None,
        batch_invariant: bool | None = None,
        capacity_rounding: str = "ceil",
        capacity_multiple_of: int | None = None,
        noise_std: float | None = None,
        noisy_combine: bool | None = None,
        kernel_initializer: Any = "lecun_normal",
        num_modalities: int | None = None,
        expert_pools: Any = None,
        seed: int | None = None,
        **kwargs,
    ):
        if capacity is None and capacity_factor is None:
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
        self.batch_invariant = check_evaluation(
            eval_capacity_factor, eval_capacity, batch_invariant
        )
        has_own = eval_capacity_factor is not None or eval_capacity is not None
        if capacity is not None and self.batch_invariant and not has_own:
            raise ValueError(
                "Expected eval_capacity_factor or batch_invariant=False with capacity, "
                "since images are smaller than the groups of training; received: "
                f"capacity={capacity}, eval_capacity_factor=None"
            )
        # Private: a public `num_selected_experts` marks token choice.
        self._selected = check_integer("num_selected_experts", num_selected_experts)
        self.eval_capacity_factor = eval_capacity_factor
        self.eval_capacity = eval_capacity

    def groups_per_example(self, training: bool | None) -> bool:
        return not training and self.batch_invariant

    def group_capacity(self, num_tokens: Any, training: bool | None) -> Any:
        """The capacity C for groups of `num_tokens` tokens."""
        factor, capacity = self.capacity_factor, self.capacity
        evaluation = (self.eval_capacity_factor, self.eval_capacity)
        if not training and evaluation != (None, None):
            factor, capacity = evaluation
        if factor is not None:
            # Rounded up to a multiple, an image's few slots would be twice as many.
            by_image = self.groups_per_example(training)
            multiple_of = None if by_image else self.capacity_multiple_of
            capacity = self.capacity_of(num_tokens, factor, self._selected, multiple_of)
        # An expert cannot take a token twice.
        if isinstance(capacity, int) and isinstance(num_tokens, int):
            return min(capacity, num_tokens)
        return ops.minimum(capacity, num_tokens)

    def max_nonzeros(self, num_tokens, training):
        return self.group_capacity(num_tokens, training)

    def allocate(self, affinity, gates, mask=None, training=None, modality_ids=None):
        capacity = self.group_capacity(ops.shape(affinity)[1], training)
        filled_slots = None
        if mask is not None:
            # The capacity of a group that has its real tokens alone.
            real = ops.sum(ops.cast(mask, "int32"), axis=1)
            filled_slots = self.group_capacity(real, training)

        def allocate(affinity, gates, mask, filled_slots):
            return expert_choice(
                affinity, gates, capacity, mask, self.normalize_gates, filled_slots
            )

        return vmap_groups(allocate, affinity, gates, mask, filled_slots)

    def total_slots(self, num_tokens: int) -> int:
        return self.num_experts * self.group_capacity(num_tokens, None)

    def experts_per_token(self, num_tokens: int) -> float:
        return self.total_slots(num_tokens) / num_tokens

    @property
    def summary(self) -> str:
        """The sparsity of the router in a few characters."""
        if self.capacity is not None:
            return f"C={self.capacity}"
        return f"c={self._selected * self.capacity_factor:g}"

    def compute_output_spec(self, tokens, mask=None, modality_ids=None, training=None):
        num_groups, num_tokens, _ = tokens.shape
        capacity = None
        if num_tokens is not None:
            capacity = self.group_capacity(num_tokens, training)
        slots = (num_groups, self.num_experts, capacity)
        by_expert = (num_groups, num_tokens, self.num_experts)
        plan = SlotPlan(
            keras.KerasTensor(slots, "int32"),
            keras.KerasTensor(by_expert, "int32"),
            keras.KerasTensor(slots, "float32"),
        )
        return plan, self.routing_spec(num_groups, num_tokens)

    def get_config(self):
        config = super().get_config()
        config.update(
            num_selected_experts=self._selected,
            eval_capacity_factor=self.eval_capacity_factor,
            eval_capacity=self.eval_capacity,
            batch_invariant=self.batch_invariant,
        )
        return config
