"""The plan of expert choice.

Axes: G groups, S group_size, E experts, C capacity, D hidden.
"""

import math
from typing import Any, NamedTuple

from keras import ops

from keras_moe.ops.by_group import by_group
from keras_moe.ops.empty import take
from keras_moe.ops.plans.dense_plan import DensePlan, tokens_in_slots
from keras_moe.ops.plans.shapes import checked_slots, checked_tokens


class SlotPlan(NamedTuple):
    """Expert choice: the tokens that each expert took, and their weights.

    Attributes:
        slot_tokens: int32 (G, E, C). The token in each slot, -1 where empty.
        token_slots: int32 (G, S, E). The flat slot `expert * C + position` in which
            the expert serves the token, -1 where it does not.
        slot_weights: float32 (G, E, C). The weight of the slot in its token's output,
            0 where empty.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]]], "float32")
    >>> plan = ops.expert_choice(gates, gates, capacity=1)
    >>> np.array(plan.token_slots).tolist()  # nobody took token 1
    [[[0, -1], [-1, -1], [-1, 1]]]
    >>> slots = plan.dispatch(np.array([[[1.0], [2.0], [4.0]]], "float32"))
    >>> np.array(plan.combine(slots))[0, :, 0].tolist()
    [0.75, 0.0, 3.0]
    """

    slot_tokens: Any
    token_slots: Any
    slot_weights: Any

    # Experts have slots, and no rows to count.
    group_sizes = None

    def dispatch(self, tokens: Any) -> Any:
        """Fills the slots from the tokens; see `RoutingPlan.dispatch`."""
        tokens = checked_tokens(tokens, self.token_slots.shape[:2])
        return by_group(lambda x, *fields: _gather(x, SlotPlan(*fields)), tokens, *self)

    def combine(self, outputs: Any) -> Any:
        """Adds each slot's output to its token; see `RoutingPlan.combine`."""
        outputs = checked_slots(outputs, self.slot_tokens.shape)
        return by_group(
            lambda x, *fields: _scatter(x, SlotPlan(*fields)), outputs, *self
        )

    def dense(self) -> DensePlan:
        """The same plan as equation 2's tensors; see `RoutingPlan.dense`."""
        in_slot = tokens_in_slots(self.slot_tokens, ops.shape(self.token_slots)[1])
        return DensePlan(
            in_slot, ops.cast(in_slot, "float32") * self.slot_weights[:, None]
        )

    def served(self) -> tuple[Any, Any]:
        """The experts that served each token; see `RoutingPlan.served`."""
        kept = self.token_slots >= 0
        weights = _in_group(self.slot_weights, ops.where(kept, self.token_slots, 0))
        return ops.cast(kept, "float32"), ops.where(kept, weights, 0.0)


def _gather(tokens, plan):
    filled = plan.slot_tokens >= 0
    # A token may be in the slots of all experts: the gradient is a scatter.
    flat = ops.reshape(tokens, (-1, tokens.shape[-1]))
    inputs = take(flat, _flat_tokens(plan, filled))
    return ops.where(filled[..., None], inputs, ops.zeros_like(inputs))


def _scatter(outputs, plan):
    # From the slots' side: a token has up to E of them, mostly none.
    num_groups, num_tokens, _ = ops.shape(plan.token_slots)
    dim = outputs.shape[-1]
    filled = plan.slot_tokens >= 0
    weighted = ops.where(
        filled[..., None],
        plan.slot_weights[..., None] * ops.cast(outputs, "float32"),
        0.0,
    )
    # PyTorch's `segment_sum` would cost ten times as much.
    total = ops.scatter_update(
        ops.zeros((num_groups * num_tokens, dim), "float32"),
        ops.reshape(_flat_tokens(plan, filled), (-1, 1)),
        ops.reshape(weighted, (-1, dim)),
        reduction="add",
    )
    total = ops.reshape(total, (num_groups, num_tokens, dim))
    return ops.cast(total, outputs.dtype)


def _flat_tokens(plan, filled):
    """The token among those of all groups in each slot, (G, E, C), 0 where empty."""
    num_groups, num_tokens, _ = ops.shape(plan.token_slots)
    first = ops.arange(num_groups, dtype="int32") * num_tokens
    return ops.where(filled, plan.slot_tokens + first[:, None, None], 0)


def _in_group(values, places):
    """`values[g].ravel()[places[g]]`: (G, E, C) at (G, S, E)."""
    shape = ops.shape(places)
    # Sizes in full: without groups there is none to infer.
    size, count = (math.prod(ops.shape(x)[1:]) for x in (values, places))
    flat = ops.reshape(values, (shape[0], size))
    picked = ops.take_along_axis(flat, ops.reshape(places, (shape[0], count)), axis=1)
    return ops.reshape(picked, shape)
