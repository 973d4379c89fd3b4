"""The plan of soft routing.

Axes: G groups (images), S tokens of an image, E experts, C slots per expert, D hidden.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_moe.ops.plans.dense_plan import DensePlan, fill_slots
from keras_moe.ops.plans.shapes import checked_slots


class SoftPlan(NamedTuple):
    """Soft routing: slots are mixtures of tokens, and outputs mixtures of slots.

    Attributes:
        dispatch_weights: float32 (G, S, E, C). Each slot's weights of the tokens; a
            slot's sum to 1 (to 0 if no token counts).
        combine_weights: float32 (G, S, E, C). Each token's weights of the slots; a
            token's sum to 1 (to 0 if it is masked).

    Reference:
        *Routers in Vision Mixture of Experts*, equations 10 and 11.

    Example:

    >>> import numpy as np
    >>> from keras_moe import ops
    >>> weights = np.full((1, 4, 2, 1), 0.25, "float32")
    >>> plan = ops.SoftPlan(dispatch_weights=weights, combine_weights=2 * weights)
    >>> tokens = np.array([[[0.0], [1.0], [2.0], [5.0]]], "float32")
    >>> np.array(plan.dispatch(tokens))[0, :, 0, 0].tolist()  # the mean
    [2.0, 2.0]
    """

    dispatch_weights: Any
    combine_weights: Any

    # Experts have slots, and no rows to count.
    group_sizes = None

    def dispatch(self, tokens: Any) -> Any:
        """Mixes the tokens in their dtype; see `RoutingPlan.dispatch`."""
        return fill_slots(tokens, self.dispatch_weights)

    def combine(self, outputs: Any) -> Any:
        """Mixes the slots' outputs in their dtype; see `RoutingPlan.combine`."""
        groups, _, *slots = self.combine_weights.shape
        outputs = checked_slots(outputs, (groups, *slots))
        weights = ops.cast(self.combine_weights, outputs.dtype)
        return ops.einsum("gecd,gsec->gsd", outputs, weights)

    def dense(self) -> DensePlan:
        """The same tensors as a plan that combines in float32."""
        return DensePlan(*self)

    def served(self) -> tuple[Any, Any]:
        """The sums over each expert's slots; see `RoutingPlan.served`."""
        return self.dense().served()
