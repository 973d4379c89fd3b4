"""The base class of auxiliary losses.

Axes: G groups, S group_size, E experts.
"""

from typing import Any

from keras_moe.checks import check_not_negative
from keras_moe.ops.routing import Routing


class AuxiliaryLoss:
    """A weighted loss of what a router did, which an MoE layer adds in training.

    Subclasses implement `compute`. `load`, say, needs the router's noise and number
    of selected experts, so the router comes along. What a subclass reads it declares
    by `needs_expert_logits` and `needs_selected_experts`, and `check_router` refuses
    the routers without it.

    Args:
        weight: the factor of the loss in the model's total loss.

    Call arguments:
        routing: the `Routing`, by group.
        router: the router layer that made it.
        mask: boolean (G, S), False for tokens that do not count.
        modality_ids: int (G, S), the modality of each token.

    Raises:
        ValueError: if `weight` is negative or not finite.

    Example:

    >>> from keras_moe import losses
    >>> losses.ImportanceLoss(weight=0.005).get_config()
    {'weight': 0.005}
    """

    # Of the router: logits (G, S, E), which soft routers have by slot instead.
    needs_expert_logits = True
    # Of the router: K, which only token choice has.
    needs_selected_experts = False

    def __init__(self, weight: float = 1.0):
        self.weight = float(check_not_negative("weight", weight))

    def __call__(
        self,
        routing: Routing,
        router: Any,
        mask: Any = None,
        modality_ids: Any = None,
    ) -> Any:
        """The weighted loss of each group, float32 (G,); the MoE layer takes the mean.

        Where groups do not count, such as those without a loss's modality, theirs are
        0, and the others' are multiplied so that the mean is of these alone.
        """
        return self.weight * self.compute(routing, router, mask, modality_ids)

    def compute(
        self,
        routing: Routing,
        router: Any,
        mask: Any = None,
        modality_ids: Any = None,
    ) -> Any:
        """The loss of each group without its weight, float32 (G,)."""
        raise NotImplementedError

    def check_router(self, router: Any) -> None:
        """Raises ValueError if the loss is not defined for this router.

        A loss of weight 0 is never computed, and fits every router.
        """
        if self.weight == 0:
            return
        received = f"router={type(router).__name__}, loss={type(self).__name__}"
        if self.needs_expert_logits and not getattr(router, "has_expert_logits", True):
            raise ValueError(
                "Expected a router with one logit per expert; "
                f"received: {received}. Leave the loss out of auxiliary_losses."
            )
        selected = getattr(router, "num_selected_experts", None)
        if self.needs_selected_experts and selected is None:
            raise ValueError(
                "Expected a router with num_selected_experts; "
                f"received: {received}. Leave the loss out of auxiliary_losses."
            )

    def get_config(self) -> dict:
        return {"weight": self.weight}

    @classmethod
    def from_config(cls, config: dict) -> "AuxiliaryLoss":
        return cls(**config)
