"""Expert choice routing: each expert selects C tokens.

Axes: G groups, S group_size, E experts, C capacity, K experts per token, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe._checks import unfit
from keras_moe._types import Tensor
from keras_moe.ops._primitives import vmap_groups
from keras_moe.ops.expert_choice import NORMALIZATIONS, expert_choice
from keras_moe.ops.plans import SlotPlan
from keras_moe.routers.sparse_router import SparseRouter


@keras.saving.register_keras_serializable("keras_moe")
class ExpertChoiceRouter(SparseRouter):
    """Each expert selects the C tokens with the largest affinity.

    Loads are balanced without an auxiliary loss; a token may be selected by several
    experts or by none. Groups are single examples at inference.

    Args:
        num_experts: number E of experts.
        num_selected_experts: K in the capacity C = S K c / E; 1 in the papers.
        **kwargs: arguments of `SparseRouter`. `capacity_factor` is 1.0 by default. With
            a fixed `capacity`, set `eval_capacity` too, since an example is smaller
            than a group. `normalize_gates="after"` divides the combine weights by their
            sum over the token's experts (*CLIP-UP*, appendix B.3); None keeps them.

    Output shape: `(SlotPlan, Routing)`; see their attributes.

    Reference: *Routers in Vision Mixture of Experts*, sections 2.3 to 2.5, Algorithm 2.

    Example:

    >>> from keras_moe.routers import ExpertChoiceRouter
    >>> router = ExpertChoiceRouter(num_experts=4, capacity_factor=2.0)
    >>> plan, routing = router(np.ones((1, 6, 8), "float32"))
    >>> tuple(plan.slot_tokens.shape)
    (1, 4, 3)
    """

    side = "expert"
    normalizations = NORMALIZATIONS

    def __init__(self, num_experts: int, num_selected_experts: int = 1, **kwargs):
        super().__init__(num_experts, num_selected_experts, **kwargs)
        is_limited = self.eval_capacity_factor is not None or self.eval_capacity
        if self.capacity and self.evaluation == "batch_invariant" and not is_limited:
            # Examples are smaller than the groups of training.
            expected = "eval_capacity_factor or evaluation='official' with capacity"
            raise unfit(expected, capacity=self.capacity, eval_capacity_factor=None)

    def limits(self, training):
        limits = super().limits(training)
        return super().limits(True) if limits == (None, None) else limits

    def group_capacity(self, num_tokens: int | Tensor, training: bool | None) -> Any:
        """The capacity C for groups of `num_tokens` tokens, at most `num_tokens`."""
        capacity = super().group_capacity(num_tokens, training)
        # An expert cannot select a token twice.
        if isinstance(capacity, int) and isinstance(num_tokens, int):
            return min(capacity, num_tokens)
        return ops.minimum(capacity, num_tokens)

    def max_nonzeros(self, num_tokens, training):
        return self.group_capacity(num_tokens, training)

    def allocate(self, affinity, gates, mask=None, training=None, modality_ids=None):
        capacity = self.group_capacity(ops.shape(affinity)[1], training)
        filled_slots = None
        if mask is not None:
            # Padding does not count towards a group's capacity.
            real = ops.sum(ops.cast(mask, "int32"), axis=1)
            filled_slots = self.group_capacity(real, training)

        def allocate(affinity, gates, mask, filled_slots):
            return expert_choice(
                affinity,
                gates,
                capacity,
                mask,
                normalize_gates=self.normalize_gates,
                filled_slots=filled_slots,
            )

        return vmap_groups(allocate, affinity, gates, mask, filled_slots)

    def total_slots(self, num_tokens: int) -> int:
        return self.num_experts * self.group_capacity(num_tokens, None)

    def experts_per_token(self, num_tokens: int) -> float:
        return self.total_slots(num_tokens) / num_tokens

    @property
    def summary(self) -> str:
        """A short label such as "c=1"."""
        if self.capacity is not None:
            return f"C={self.capacity}"
        return f"c={self._selected * self.capacity_factor:g}"

    def compute_output_spec(self, tokens, training=None, **kwargs):
        # JAX cannot trace the choice among an unknown number of tokens.
        num_groups, num_tokens, _ = tokens.shape
        capacity = num_tokens and self.group_capacity(num_tokens, training)
        slots = (num_groups, self.num_experts, capacity)
        plan = SlotPlan(
            keras.KerasTensor(slots, "int32"),
            keras.KerasTensor((num_groups, num_tokens, self.num_experts), "int32"),
            keras.KerasTensor(slots, "float32"),
        )
        return plan, self.routing_spec(num_groups, num_tokens)
