"""The plan of token choice with a capacity.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_moe.ops.by_group import by_group
from keras_moe.ops.plans.choices import by_expert, expert_places, sum_of_choices
from keras_moe.ops.plans.dense_plan import DensePlan, tokens_in_slots
from keras_moe.ops.plans.shapes import checked_slots, checked_tokens
from keras_moe.ops.row_moves import take_rows


class RoutingPlan(NamedTuple):
    """Token choice: the slots that each token's K choices got.

    Memory grows with S x K and with E x C, never with S x E x C.

    Attributes:
        slot_tokens: int32 (G, E, C). The token in each slot, -1 where empty.
        token_slots: int32 (G, S, K). The flat slot `expert * C + position` of each
            choice of each token, -1 where the choice was dropped.
        combine_weights: float32 (G, S, K). The weight of each choice in the token's
            output, 0 where the choice was dropped.

    Reference:
        *Routers in Vision Mixture of Experts*, equation 2.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=1, capacity=1)
    >>> np.array(plan.slot_tokens).tolist()  # expert 0 was full for token 1
    [[[0], [2]]]
    >>> np.array(plan.token_slots).tolist()
    [[[0], [-1], [1]]]
    >>> slots = plan.dispatch(np.array([[[1.0], [2.0], [4.0]]], "float32"))
    >>> np.array(slots)[0, :, 0, 0].tolist()
    [1.0, 4.0]
    >>> np.array(plan.combine(slots))[0, :, 0].tolist()
    [0.75, 0.0, 3.0]
    """

    slot_tokens: Any
    token_slots: Any
    combine_weights: Any

    # Experts have slots, and no rows to count.
    group_sizes = None

    def dispatch(self, tokens: Any) -> Any:
        """Fills the slots from the tokens: `X^T D` of equation 2.

        Args:
            tokens: (G, S, D), any float dtype.

        Returns:
            The experts' inputs (G, E, C, D) in the dtype of `tokens`; empty slots hold
            zeros.

        Raises:
            ValueError: if the shape of `tokens` does not fit the plan.
        """
        tokens = checked_tokens(tokens, self.token_slots.shape[:2])
        return by_group(
            lambda x, *fields: _gather(x, RoutingPlan(*fields)), tokens, *self
        )

    def combine(self, outputs: Any) -> Any:
        """Sums each token's expert outputs by their combine weights.

        Args:
            outputs: the experts' outputs (G, E, C, D), any float dtype.

        Returns:
            Tokens (G, S, D) in the dtype of `outputs`, summed in float32. A token whose
            choices were all dropped gets zeros.

        Raises:
            ValueError: if the shape of `outputs` does not fit the plan.
        """
        outputs = checked_slots(outputs, self.slot_tokens.shape)
        return by_group(
            lambda x, *fields: _sum(x, RoutingPlan(*fields)), outputs, *self
        )

    def dense(self) -> DensePlan:
        """The same plan as equation 2's tensors, whose size is S x E x C.

        Returns:
            A `DensePlan`, whose `dispatch_weights` are boolean.
        """
        _, num_experts, capacity = ops.shape(self.slot_tokens)
        slots = ops.arange(num_experts * capacity, dtype="int32")
        weights = 0.0
        for k in range(self.token_slots.shape[-1]):
            one_hot = ops.cast(self.token_slots[..., k : k + 1] == slots, "float32")
            weights = weights + one_hot * self.combine_weights[..., k : k + 1]
        shape = (*ops.shape(weights)[:2], num_experts, capacity)
        num_tokens = ops.shape(self.token_slots)[1]
        return DensePlan(
            tokens_in_slots(self.slot_tokens, num_tokens), ops.reshape(weights, shape)
        )

    def served(self) -> tuple[Any, Any]:
        """The experts that served each token, and their weights.

        Returns:
            `(dispatched, combined)`, both float32 (G, S, E): 1 where the expert served
            the token, and the expert's weight in the token's output.
        """
        _, num_experts, capacity = ops.shape(self.slot_tokens)
        # floor(-1 / C) = -1 matches no expert: dropped choices vanish by themselves.
        chosen = ops.floor_divide(self.token_slots, capacity)
        return by_expert(chosen, self.combine_weights, num_experts)

    def of_experts(self, experts: Any) -> "RoutingPlan":
        """The plan of some experts alone; no other expert may serve a token.

        Args:
            experts: increasing numbers of the experts.

        Returns:
            A plan whose expert i is this plan's expert `experts[i]`.
        """
        num_experts, capacity = (
            self.slot_tokens.shape[1],
            ops.shape(self.slot_tokens)[2],
        )
        places = expert_places(experts, num_experts)
        served = self.token_slots >= 0
        slots = ops.where(served, self.token_slots, 0)
        expert = ops.take(
            ops.convert_to_tensor(places, "int32"),
            ops.floor_divide(slots, capacity),
            axis=0,
        )
        return self._replace(
            slot_tokens=ops.take(self.slot_tokens, list(experts), axis=1),
            token_slots=ops.where(served, expert * capacity + slots % capacity, -1),
        )


def _gather(tokens, plan):
    dim = tokens.shape[-1]
    inputs = take_rows(
        ops.reshape(tokens, (-1, dim)), _flat_tokens(plan), _flat_slots(plan)
    )
    return ops.reshape(inputs, (*ops.shape(plan.slot_tokens), dim))


def _sum(outputs, plan):
    return sum_of_choices(
        ops.reshape(outputs, (-1, outputs.shape[-1])),
        plan.combine_weights,
        _flat_slots(plan),
        _flat_tokens(plan),
    )


def _flat_slots(plan):
    """The slot among those of all groups of each choice, (G x S, K), or -1."""
    num_groups, num_experts, capacity = ops.shape(plan.slot_tokens)
    first = ops.arange(num_groups, dtype="int32") * (num_experts * capacity)
    slots = plan.token_slots
    slots = ops.where(slots >= 0, slots + first[:, None, None], -1)
    return ops.reshape(slots, (-1, slots.shape[-1]))


def _flat_tokens(plan):
    """The token among those of all groups in each slot, (G x E x C,), or -1."""
    num_groups, num_tokens, _ = ops.shape(plan.token_slots)
    first = ops.arange(num_groups, dtype="int32") * num_tokens
    tokens = plan.slot_tokens
    tokens = ops.where(tokens >= 0, tokens + first[:, None, None], -1)
    return ops.reshape(tokens, (-1,))
