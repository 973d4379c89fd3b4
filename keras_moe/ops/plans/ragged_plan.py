"""The plan of token choice without a capacity.

Axes: G groups, S group_size, E experts, K selected experts, D hidden, R rows.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_moe.ops.plans.choices import by_expert, expert_places, sum_of_choices
from keras_moe.ops.plans.dense_plan import DensePlan
from keras_moe.ops.plans.shapes import checked_rows, checked_tokens
from keras_moe.ops.row_moves import take_rows


class RaggedPlan(NamedTuple):
    """Token choice without capacity: rows sorted by expert, as many as it takes.

    Attributes:
        row_tokens: int32 (R,). The token of each row as `group * S + token`, sorted
            by expert and then by place; rows of masked tokens come last, as -1.
        token_rows: int32 (G, S, K). The row of each choice, -1 where not routed.
        combine_weights: float32 (G, S, K). The weight of each choice in the token's
            output, 0 where not routed.
        token_experts: int32 (G, S, K). The expert of each choice, E where not routed.
        group_sizes: int32 (E,). The number of rows of each expert.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.75, 0.25], [0.25, 0.75], [0.5, 0.5]]], "float32")
    >>> plan = ops.dropless_token_choice(gates, gates, num_selected_experts=1)
    >>> np.array(plan.row_tokens).tolist(), np.array(plan.group_sizes).tolist()
    ([0, 2, 1], [2, 1])
    >>> rows = plan.dispatch(np.array([[[1.0], [2.0], [4.0]]], "float32"))
    >>> np.array(rows)[:, 0].tolist()
    [1.0, 4.0, 2.0]
    >>> np.array(plan.combine(rows))[0, :, 0].tolist()
    [0.75, 1.5, 2.0]
    """

    row_tokens: Any
    token_rows: Any
    combine_weights: Any
    token_experts: Any
    group_sizes: Any

    def dispatch(self, tokens: Any) -> Any:
        """Fills the rows from the tokens.

        Args:
            tokens: (G, S, D), any float dtype.

        Returns:
            The experts' inputs (R, D), sorted by expert, in the dtype of `tokens`; rows
            of masked tokens hold zeros.

        Raises:
            ValueError: if the shape of `tokens` does not fit the plan.
        """
        tokens = checked_tokens(tokens, self.token_rows.shape[:2])
        flat = ops.reshape(tokens, (-1, tokens.shape[-1]))
        return take_rows(flat, self.row_tokens, self._choices())

    def combine(self, outputs: Any) -> Any:
        """Sums each token's expert outputs by their combine weights.

        Args:
            outputs: the experts' outputs (R, D), any float dtype.

        Returns:
            Tokens (G, S, D) in the dtype of `outputs`, summed in float32. A masked
            token gets zeros.

        Raises:
            ValueError: if the shape of `outputs` does not fit the plan.
        """
        outputs = checked_rows(outputs, self.row_tokens.shape)
        return sum_of_choices(
            outputs, self.combine_weights, self._choices(), self.row_tokens
        )

    def dense(self) -> DensePlan:
        """The same plan as equation 2's tensors with room for everybody, C = S.

        Returns:
            A `DensePlan`, whose `dispatch_weights` are boolean.
        """
        dispatched, combined = self.served()
        # The tokens of an expert stand in their order.
        position = ops.cumsum(dispatched, axis=1) - 1.0
        slots = ops.arange(ops.shape(dispatched)[1], dtype="float32")
        in_slot = ops.expand_dims(position, -1) == slots
        in_slot = ops.logical_and(in_slot, ops.expand_dims(dispatched > 0, -1))
        weights = ops.where(in_slot, ops.expand_dims(combined, -1), 0.0)
        return DensePlan(in_slot, weights)

    def served(self) -> tuple[Any, Any]:
        """The experts that served each token, and their weights.

        Returns:
            `(dispatched, combined)`, both float32 (G, S, E): 1 where the expert served
            the token, and the expert's weight in the token's output.
        """
        num_experts = ops.shape(self.group_sizes)[0]
        return by_expert(self.token_experts, self.combine_weights, num_experts)

    def of_experts(self, experts: Any) -> "RaggedPlan":
        """The plan of some experts alone; no other expert may serve a token.

        Args:
            experts: increasing numbers of the experts.

        Returns:
            A plan whose expert i is this plan's expert `experts[i]`.
        """
        places = ops.convert_to_tensor(
            # An expert behind the last serves nobody.
            expert_places(experts, self.group_sizes.shape[0] + 1),
            "int32",
        )
        return self._replace(
            token_experts=ops.take(places, self.token_experts, axis=0),
            group_sizes=ops.take(self.group_sizes, list(experts), axis=0),
        )

    def _choices(self):
        """The row of each token's K choices, (G x S, K)."""
        return ops.reshape(self.token_rows, (-1, self.token_rows.shape[-1]))
