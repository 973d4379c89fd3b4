"""Auxiliary losses as objects: a weight, a config, and a pure function to call.

Axes: G groups, S group_size, E experts.
"""

from typing import Any

import keras

from keras_moe.losses import router_losses
from keras_moe.ops.routing import Routing


class AuxiliaryLoss:
    """A weighted loss of what a router did, which an MoE layer adds in training.

    Subclasses implement `compute`. `load`, say, needs the router's noise and number
    of selected experts, so the router comes along.

    Args:
        weight: the factor of the loss in the model's total loss.

    Raises:
        ValueError: if `weight` is negative or not finite.

    Example:

    >>> from keras_moe import losses
    >>> losses.ImportanceLoss(weight=0.005).get_config()
    {'weight': 0.005}
    """

    def __init__(self, weight: float = 1.0):
        if not 0 <= weight < float("inf"):
            raise ValueError(
                f"Expected a finite weight of at least 0; received: weight={weight}"
            )
        self.weight = float(weight)

    def __call__(self, routing: Routing, router: Any, mask: Any = None) -> Any:
        """The weighted loss of each group, float32 (G,)."""
        return self.weight * self.compute(routing, router, mask)

    def compute(self, routing: Routing, router: Any, mask: Any = None) -> Any:
        """The loss of each group without its weight, float32 (G,)."""
        raise NotImplementedError

    def check_router(self, router: Any) -> None:
        """Raises ValueError if the loss is not defined for this router."""

    def get_config(self) -> dict:
        return {"weight": self.weight}

    @classmethod
    def from_config(cls, config: dict) -> "AuxiliaryLoss":
        return cls(**config)


@keras.saving.register_keras_serializable("keras_moe")
class ImportanceLoss(AuxiliaryLoss):
    """`importance_loss` with a weight.

    Args:
        weight: the factor of the loss in the model's total loss; V-MoE uses 0.005.

    Example:

    >>> from keras_moe import losses
    >>> losses.ImportanceLoss(weight=0.005).weight
    0.005
    """

    def compute(self, routing, router, mask=None):
        return router_losses.importance_loss(routing.logits, mask)


@keras.saving.register_keras_serializable("keras_moe")
class LoadLoss(AuxiliaryLoss):
    """`load_loss` with a weight; the router's noise is part of its definition.

    Args:
        weight: the factor of the loss in the model's total loss; V-MoE uses 0.005.

    Raises:
        ValueError: from the MoE layer, if its router adds no noise.

    Example:

    >>> from keras_moe import losses
    >>> losses.LoadLoss(weight=0.005).weight
    0.005
    """

    def compute(self, routing, router, mask=None):
        return router_losses.load_loss(
            routing.logits,
            routing.noisy_logits,
            router.noise_std / router.num_experts,
            router.num_selected_experts,
            mask,
        )

    def check_router(self, router):
        noise_std = getattr(router, "noise_std", 0.0)
        if self.weight > 0 and not noise_std > 0:
            raise ValueError(
                "Expected a router with noise_std > 0, since noise defines the load "
                f"loss; received: noise_std={noise_std}. Leave the load loss out of "
                "auxiliary_losses to train without noise."
            )


@keras.saving.register_keras_serializable("keras_moe")
class LoadBalanceLoss(AuxiliaryLoss):
    """`load_balance_loss` (GShard, Switch) with a weight.

    Args:
        weight: the factor of the loss in the model's total loss; Switch uses 0.01.

    Example:

    >>> from keras_moe import losses
    >>> losses.LoadBalanceLoss(weight=0.01).weight
    0.01
    """

    def compute(self, routing, router, mask=None):
        return router_losses.load_balance_loss(routing.gates, mask)


@keras.saving.register_keras_serializable("keras_moe")
class ZLoss(AuxiliaryLoss):
    """`z_loss` with a weight.

    Args:
        weight: the factor of the loss in the model's total loss; ST-MoE uses 0.001.

    Example:

    >>> from keras_moe import losses
    >>> losses.ZLoss(weight=0.001).weight
    0.001
    """

    def compute(self, routing, router, mask=None):
        return router_losses.z_loss(routing.logits, mask)


BY_NAME = {
    "importance": ImportanceLoss,
    "load": LoadLoss,
    "load_balance": LoadBalanceLoss,
    "z": ZLoss,
}


def get(identifier: Any) -> list[AuxiliaryLoss]:
    """Makes a list of auxiliary losses from what users write.

    Args:
        identifier: None; a dict from name to weight, with the names `"importance"`,
            `"load"`, `"load_balance"` and `"z"`; or a list of `AuxiliaryLoss` and
            of their serialised configs.

    Returns:
        A list of `AuxiliaryLoss`.

    Raises:
        ValueError: if a name is unknown or an entry is none of these.

    Example:

    >>> from keras_moe import losses
    >>> [type(loss).__name__ for loss in losses.get({"importance": 0.1, "z": 0.01})]
    ['ImportanceLoss', 'ZLoss']
    """
    if identifier is None:
        return []
    if isinstance(identifier, dict):
        unknown = [name for name in identifier if name not in BY_NAME]
        if unknown:
            raise ValueError(
                f"Expected names of auxiliary losses among {sorted(BY_NAME)}; "
                f"received: {unknown[0]!r}"
            )
        return [BY_NAME[name](weight) for name, weight in identifier.items()]
    if not isinstance(identifier, (list, tuple)):
        raise ValueError(
            "Expected auxiliary_losses to be None, a dict from name to weight or a "
            f"list of AuxiliaryLoss; received: auxiliary_losses={identifier!r}"
        )
    losses = [
        keras.saving.deserialize_keras_object(loss) if isinstance(loss, dict) else loss
        for loss in identifier
    ]
    for loss in losses:
        if not isinstance(loss, AuxiliaryLoss):
            raise ValueError(f"Expected an AuxiliaryLoss; received: {loss!r}")
    return losses


def serialize(losses: list[AuxiliaryLoss]) -> list[dict]:
    """The configs from which `get` makes the same losses again.

    Args:
        losses: a list of `AuxiliaryLoss`.

    Returns:
        A list of JSON-serialisable configs.

    Example:

    >>> from keras_moe import losses
    >>> losses.get(losses.serialize([losses.ZLoss(0.01)]))[0].weight
    0.01
    """
    return [keras.saving.serialize_keras_object(loss) for loss in losses]
