"""Auxiliary losses as objects: a weight, a config, and a pure function to call.

Axes: G groups, S group_size, E experts.
"""

from typing import Any

import keras

from keras_moe.losses import entropy_losses, router_losses
from keras_moe.ops.checks import check_integer, check_not_negative
from keras_moe.ops.routing import Routing
from keras_moe.ops.token_choice import selected_experts


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
        """The weighted loss of each group, float32 (G,)."""
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

    def compute(self, routing, router, mask=None, modality_ids=None):
        return router_losses.importance_loss(routing.logits, mask)


@keras.saving.register_keras_serializable("keras_moe")
class LoadLoss(AuxiliaryLoss):
    """`load_loss` with a weight; the router's noise is part of its definition.

    Args:
        weight: the factor of the loss in the model's total loss; V-MoE uses 0.005.

    Raises:
        ValueError: from the MoE layer, if its router adds no noise or has no
            `num_selected_experts`.

    Example:

    >>> from keras_moe import losses
    >>> losses.LoadLoss(weight=0.005).weight
    0.005
    """

    needs_selected_experts = True

    def compute(self, routing, router, mask=None, modality_ids=None):
        return router_losses.load_loss(
            routing.logits,
            routing.noisy_logits,
            router.noise_std / router.num_experts,
            router.num_selected_experts,
            mask,
        )

    def check_router(self, router):
        super().check_router(router)
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

    def compute(self, routing, router, mask=None, modality_ids=None):
        return router_losses.load_balance_loss(routing.gates, mask)


@keras.saving.register_keras_serializable("keras_moe")
class HeterogeneousBalanceLoss(AuxiliaryLoss):
    """`heterogeneous_balance_loss` (MoE++) with a weight.

    The router says which experts are zero-computation experts, and what tau is.

    Args:
        weight: beta, the factor of the loss in the model's total loss; MoE++ uses 0.01.

    Raises:
        ValueError: from the MoE layer, if its router has no `num_selected_experts`.

    Reference:
        *MoE++*, equations 7 and 9.

    Example:

    >>> from keras_moe import losses
    >>> losses.HeterogeneousBalanceLoss(weight=0.01).weight
    0.01
    """

    needs_selected_experts = True

    def compute(self, routing, router, mask=None, modality_ids=None):
        selected = selected_experts(routing.affinity, router.num_selected_experts)
        return router_losses.heterogeneous_balance_loss(
            routing.gates, selected, router.kinds, router.tau, mask
        )


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

    def compute(self, routing, router, mask=None, modality_ids=None):
        return router_losses.z_loss(routing.logits, mask)


class _ModalityLoss(AuxiliaryLoss):
    """A loss over the tokens of one modality, or over all tokens if that is None.

    Subclasses implement `compute_tokens`, whose `mask` holds the modality's tokens.
    """

    def __init__(self, weight: float = 1.0, modality: int | None = None):
        super().__init__(weight)
        if modality is not None:
            modality = check_integer("modality", modality, minimum=0)
        self.modality = modality

    def check_router(self, router):
        super().check_router(router)
        pools = getattr(router, "expert_pools", None)
        count = getattr(router, "num_modalities", None) or (pools and len(pools))
        if self.weight > 0 and count and (self.modality or 0) >= count:
            raise ValueError(
                f"Expected a modality of the router's, 0 to {count - 1}; received: "
                f"modality={self.modality}, loss={type(self).__name__}"
            )

    def compute(self, routing, router, mask=None, modality_ids=None):
        if self.modality is not None:
            _check_modality_ids(self, modality_ids)
            mask = entropy_losses.modality_mask(modality_ids, self.modality, mask)
        return self.compute_tokens(routing, router, mask)

    def compute_tokens(self, routing: Routing, router: Any, mask: Any = None) -> Any:
        """The loss over the tokens that count, without its weight, float32 (G,)."""
        raise NotImplementedError

    def get_config(self):
        return {**super().get_config(), "modality": self.modality}


@keras.saving.register_keras_serializable("keras_moe")
class LocalEntropyLoss(_ModalityLoss):
    """`local_entropy_loss` with a weight, over the tokens of a modality.

    Args:
        weight: the factor of the loss in the model's total loss.
        modality: the id of the modality whose tokens count; None counts all.

    Raises:
        ValueError: if an argument is out of range; from the call, if there is a
            `modality` and no `modality_ids`.

    Reference:
        *LIMoE*, section 2.2.2.

    Example:

    >>> from keras_moe import losses
    >>> losses.LocalEntropyLoss(modality=1).get_config()
    {'weight': 1.0, 'modality': 1}
    """

    def compute_tokens(self, routing, router, mask=None):
        return entropy_losses.local_entropy_loss(routing.logits, mask)


@keras.saving.register_keras_serializable("keras_moe")
class GlobalEntropyLoss(_ModalityLoss):
    """`global_entropy_loss` with a weight, over the tokens of a modality.

    Args:
        weight: the factor of the loss in the model's total loss.
        threshold: the entropy from which on the loss is zero; None never has
            enough. LIMoE-H/14 uses log(4) for text and log(25) for images.
        modality: the id of the modality whose tokens count; None counts all.

    Raises:
        ValueError: if an argument is out of range; from the call, if there is a
            `modality` and no `modality_ids`.

    Reference:
        *LIMoE*, section 2.2.2; appendices A.3 and B.2 for thresholds.

    Example:

    >>> import math
    >>> from keras_moe import losses
    >>> round(losses.GlobalEntropyLoss(threshold=math.log(4)).threshold, 4)
    1.3863
    """

    def __init__(
        self,
        weight: float = 1.0,
        threshold: float | None = None,
        modality: int | None = None,
    ):
        super().__init__(weight, modality)
        self.threshold = entropy_losses.check_threshold(threshold)

    def compute_tokens(self, routing, router, mask=None):
        return entropy_losses.global_entropy_loss(routing.logits, self.threshold, mask)

    def get_config(self):
        return {**super().get_config(), "threshold": self.threshold}


@keras.saving.register_keras_serializable("keras_moe")
class MutualInformationLoss(AuxiliaryLoss):
    """`mutual_information_loss` of experts and modalities, with a weight.

    Args:
        weight: the factor of the loss in the model's total loss.
        num_modalities: M, the number of modalities.

    Raises:
        ValueError: if an argument is out of range; from the call, without
            `modality_ids`.

    Reference:
        *LIMoE*, appendix B.1.

    Example:

    >>> from keras_moe import losses
    >>> losses.MutualInformationLoss(weight=0.1).get_config()
    {'weight': 0.1, 'num_modalities': 2}
    """

    def __init__(self, weight: float = 1.0, num_modalities: int = 2):
        super().__init__(weight)
        self.num_modalities = check_integer("num_modalities", num_modalities)

    def compute(self, routing, router, mask=None, modality_ids=None):
        _check_modality_ids(self, modality_ids)
        return entropy_losses.mutual_information_loss(
            routing.logits, modality_ids, self.num_modalities, mask
        )

    def get_config(self):
        return {**super().get_config(), "num_modalities": self.num_modalities}


@keras.saving.register_keras_serializable("keras_moe")
class TargetEntropyLoss(_ModalityLoss):
    """`target_entropy_loss` with a weight; K is the router's.

    It takes the place of `LocalEntropyLoss` where K > 1.

    Args:
        weight: the factor of the loss in the model's total loss.
        modality: the id of the modality whose tokens count; None counts all.

    Raises:
        ValueError: if an argument is out of range; from the MoE layer, if its
            router has no `num_selected_experts`; from the call, if there is a
            `modality` and no `modality_ids`.

    Reference:
        *LIMoE*, appendix E.1.

    Example:

    >>> from keras_moe import losses
    >>> losses.TargetEntropyLoss(modality=0).get_config()
    {'weight': 1.0, 'modality': 0}
    """

    needs_selected_experts = True

    def compute_tokens(self, routing, router, mask=None):
        return entropy_losses.target_entropy_loss(
            routing.logits, router.num_selected_experts, mask
        )


@keras.saving.register_keras_serializable("keras_moe")
class MergedEntropyLoss(_ModalityLoss):
    """`merged_entropy_loss` with a weight; K is the router's.

    It takes the place of `LocalEntropyLoss` where K > 1.

    Args:
        weight: the factor of the loss in the model's total loss.
        modality: the id of the modality whose tokens count; None counts all.

    Raises:
        ValueError: if an argument is out of range; from the MoE layer, if its
            router has no `num_selected_experts`; from the call, if there is a
            `modality` and no `modality_ids`.

    Reference:
        *LIMoE*, appendix E.1.

    Example:

    >>> from keras_moe import losses
    >>> losses.MergedEntropyLoss(modality=0).get_config()
    {'weight': 1.0, 'modality': 0}
    """

    needs_selected_experts = True

    def compute_tokens(self, routing, router, mask=None):
        return entropy_losses.merged_entropy_loss(
            routing.logits, router.num_selected_experts, mask
        )


@keras.saving.register_keras_serializable("keras_moe")
class AggregateLoss(AuxiliaryLoss):
    """The weighted mean of losses, with one weight for all: LIMoE's recipe.

    The loss is `weight * sum_i w_i L_i / sum_i w_i` for losses L_i of weights w_i;
    with equal weights that is the plain mean of the paper.

    Args:
        losses: what `keras_moe.losses.get` takes: a dict from name to weight, or a
            list of `AuxiliaryLoss`.
        weight: the factor of the mean in the model's total loss; LIMoE uses 0.04.

    Raises:
        ValueError: if `weight` is out of range, or no loss has a weight above 0.

    Reference:
        *LIMoE*, appendix B.1, "Final aggregated auxiliary loss".

    Example:

    >>> from keras_moe import losses
    >>> parts = [losses.ZLoss(), losses.LocalEntropyLoss(modality=1)]
    >>> losses.AggregateLoss(parts).weight
    0.04
    """

    # Its parts say what they need.
    needs_expert_logits = False

    def __init__(self, losses: Any, weight: float = 0.04):
        super().__init__(weight)
        self.losses = get(losses)
        self.total_weight = sum(loss.weight for loss in self.losses)
        if not 0 < self.total_weight < float("inf"):
            raise ValueError(
                "Expected losses of which one has a weight above 0, and a finite sum "
                f"of weights; received: weights={[x.weight for x in self.losses]}"
            )

    def compute(self, routing, router, mask=None, modality_ids=None):
        # A loss of weight 0 need not be defined: load without noise is not.
        used = [loss for loss in self.losses if loss.weight > 0]
        total = sum(loss(routing, router, mask, modality_ids) for loss in used)
        return total / self.total_weight

    def check_router(self, router):
        super().check_router(router)
        if self.weight > 0:
            for loss in self.losses:
                loss.check_router(router)

    def get_config(self):
        return {**super().get_config(), "losses": serialize(self.losses)}


def _check_modality_ids(loss, modality_ids):
    if modality_ids is None:
        raise ValueError(
            f"Expected modality_ids, which say the tokens of {type(loss).__name__}; "
            f"received: modality_ids=None, loss={loss.get_config()}"
        )


BY_NAME = {
    "importance": ImportanceLoss,
    "load": LoadLoss,
    "load_balance": LoadBalanceLoss,
    "heterogeneous_balance": HeterogeneousBalanceLoss,
    "z": ZLoss,
    "local_entropy": LocalEntropyLoss,
    "global_entropy": GlobalEntropyLoss,
    "mutual_information": MutualInformationLoss,
    "target_entropy": TargetEntropyLoss,
    "merged_entropy": MergedEntropyLoss,
}


def get(identifier: Any) -> list[AuxiliaryLoss]:
    """Makes a list of auxiliary losses from what users write.

    Args:
        identifier: None; a dict from name to weight, with the names `"importance"`,
            `"load"`, `"load_balance"`, `"heterogeneous_balance"`, `"z"`,
            `"local_entropy"`, `"global_entropy"` (without threshold),
            `"mutual_information"` (of two modalities), `"target_entropy"` and
            `"merged_entropy"`; or a list of `AuxiliaryLoss` and of their serialised
            configs.

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
