"""Auxiliary losses as objects: a weight, a config, and a pure function to call.

Axes: G groups, S group_size, E experts.
"""

from typing import Any

import keras

from keras_moe.checks import check_one_of
from keras_moe.losses import router_losses
from keras_moe.losses.auxiliary_loss import AuxiliaryLoss
from keras_moe.losses.modality_losses import (
    GlobalEntropyLoss,
    LocalEntropyLoss,
    MergedEntropyLoss,
    MutualInformationLoss,
    TargetEntropyLoss,
)
from keras_moe.ops.token_choice import selected_experts

# The choices of a token that a balance loss counts.
CHOICES = ("first", "all")


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
        choices: the choices of a token that count: `"first"`, as in GShard, Switch and
            ST-MoE, or `"all"`, the router's K.

    Raises:
        ValueError: if an argument is out of range; from the MoE layer, with
            `choices="all"`, if its router has no `num_selected_experts`.

    Example:

    >>> from keras_moe import losses
    >>> losses.LoadBalanceLoss(weight=0.01).get_config()
    {'weight': 0.01, 'choices': 'first'}
    """

    def __init__(self, weight: float = 1.0, choices: str = "first"):
        super().__init__(weight)
        self.choices = check_one_of("choices", choices, CHOICES)
        self.needs_selected_experts = choices == "all"

    def compute(self, routing, router, mask=None, modality_ids=None):
        counted = router.num_selected_experts if self.choices == "all" else 1
        return router_losses.load_balance_loss(routing.gates, mask, counted)

    def get_config(self):
        return {**super().get_config(), "choices": self.choices}


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
