"""Equation 2's two tensors, for inspection and for small groups on TPUs.

Axes: G groups, S group_size, E experts, C capacity, D hidden.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_moe.ops.plans.shapes import checked_slots, checked_tokens


class DensePlan(NamedTuple):
    """Any plan as the dispatch tensor D and the combine tensor C of equation 2.

    Memory grows with G x S x E x C.

    Attributes:
        dispatch_weights: boolean (G, S, E, C). D, whether the token is in the slot; for
            soft routing float32, the token's weight in the slot.
        combine_weights: float32 (G, S, E, C). C, the weight of the slot in the token's
            output.

    Reference:
        *Routers in Vision Mixture of Experts*, equation 2.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.75, 0.25], [0.5, 0.5]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=1, capacity=1)
    >>> dense = plan.dense()
    >>> np.array(dense.dispatch_weights)[0, :, :, 0].tolist()
    [[True, False], [False, False]]
    >>> slots = dense.dispatch(np.array([[[1.0], [2.0]]], "float32"))
    >>> np.array(dense.combine(slots))[0, :, 0].tolist()
    [0.75, 0.0]
    """

    dispatch_weights: Any
    combine_weights: Any

    # Experts have slots, and no rows to count.
    group_sizes = None

    def dispatch(self, tokens: Any) -> Any:
        """Fills the slots by an einsum; see `RoutingPlan.dispatch`."""
        return fill_slots(tokens, self.dispatch_weights)

    def combine(self, outputs: Any) -> Any:
        """Sums each token's slots by an einsum; see `RoutingPlan.combine`."""
        groups, _, *slots = self.combine_weights.shape
        outputs = checked_slots(outputs, (groups, *slots))
        # In float32: bfloat16 sums over all slots would lose the small weights.
        total = ops.einsum(
            "gecd,gsec->gsd", ops.cast(outputs, "float32"), self.combine_weights
        )
        return ops.cast(total, outputs.dtype)

    def dense(self) -> "DensePlan":
        """The plan itself."""
        return self

    def served(self) -> tuple[Any, Any]:
        """The sums over each expert's slots; see `RoutingPlan.served`."""
        dispatched = ops.cast(self.dispatch_weights, "float32")
        return ops.sum(dispatched, axis=-1), ops.sum(self.combine_weights, axis=-1)


def fill_slots(tokens: Any, dispatch_weights: Any) -> Any:
    """`X^T D` in the dtype of the tokens."""
    tokens = checked_tokens(tokens, dispatch_weights.shape[:2])
    weights = ops.cast(dispatch_weights, tokens.dtype)
    return ops.einsum("gsd,gsec->gecd", tokens, weights)


def tokens_in_slots(slot_tokens: Any, num_tokens: Any) -> Any:
    """D of a sparse plan."""
    tokens = ops.reshape(ops.arange(num_tokens, dtype="int32"), (1, -1, 1, 1))
    return ops.expand_dims(slot_tokens, 1) == tokens
