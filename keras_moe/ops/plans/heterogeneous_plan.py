"""The plan of MoE++: experts with slots or rows, and experts that act in place.

Axes: G groups, S group_size, E experts with slots or rows, Z experts that act in place.
"""

from typing import Any, NamedTuple

from keras import ops


class HeterogeneousPlan(NamedTuple):
    """Token choice among experts, the last of which act on tokens in place.

    Dispatch and combine move the tokens of the experts that have slots or rows;
    `in_place_weights` weigh the outputs of the others, which are added to these.

    Attributes:
        plan: a `RoutingPlan` or `RaggedPlan` of the experts that have slots or rows;
            choices of the others count as dropped there.
        in_place: float32 (G, S, Z). 1 where the expert serves the token, else 0.
        in_place_weights: float32 (G, S, Z). The expert's weight in the token's output,
            0 where it does not serve the token.

    Reference:
        *MoE++*, section 3.1: zero-computation experts.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> gates = np.array([[[0.7, 0.1, 0.2], [0.1, 0.3, 0.6]]], "float32")
    >>> plan = ops.token_choice(gates, gates, 1, capacity=1, in_place_experts=1)
    >>> np.array(plan.plan.slot_tokens).tolist()  # nobody chose expert 1
    [[[0], [-1]]]
    >>> np.array(plan.in_place).tolist()  # and token 1 the last
    [[[0.0], [1.0]]]
    """

    plan: Any
    in_place: Any
    in_place_weights: Any

    @property
    def group_sizes(self) -> Any:
        """The number of rows of each expert that has rows, or None."""
        return self.plan.group_sizes

    def dispatch(self, tokens: Any) -> Any:
        """Fills the slots or rows; see `RoutingPlan.dispatch`."""
        return self.plan.dispatch(tokens)

    def combine(self, outputs: Any) -> Any:
        """Sums the outputs of slots or rows; see `RoutingPlan.combine`."""
        return self.plan.combine(outputs)

    def dense(self) -> "HeterogeneousPlan":
        """The same plan with slots or rows as equation 2's tensors."""
        return self._replace(plan=self.plan.dense())

    def served(self) -> tuple[Any, Any]:
        """The experts that served each token; see `RoutingPlan.served`.

        Returns:
            Two float32 (G, S, E + Z), with the experts that act in place last.
        """
        dispatched, combined = self.plan.served()
        return (
            ops.concatenate([dispatched, self.in_place], axis=-1),
            ops.concatenate([combined, self.in_place_weights], axis=-1),
        )
