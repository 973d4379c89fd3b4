"""LIMoE's entropy losses as objects, for the tokens of a modality.

Axes: G groups, S group_size, E experts, M modalities.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_integer
from keras_moe.losses import entropy_losses
from keras_moe.losses.auxiliary_loss import AuxiliaryLoss
from keras_moe.losses.reductions import over_counted_groups
from keras_moe.ops.routing import Routing


class _ModalityLoss(AuxiliaryLoss):
    """A loss over the tokens of one modality, or over all tokens if that is None.

    Subclasses implement `compute_tokens`, whose `mask` holds the modality's tokens.
    Groups without any such token do not count in the mean over groups.
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
        loss = self.compute_tokens(routing, router, mask)
        if mask is None:
            return loss
        return over_counted_groups(loss, ops.any(mask, axis=1))

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

    Warns:
        UserWarning: from the MoE layer, if `threshold` is above the logarithm of the
            number of experts that the tokens may go to: the loss cannot reach 0.

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

    def check_router(self, router):
        super().check_router(router)
        num_experts = getattr(router, "num_experts", None)
        if self.weight == 0 or num_experts is None:
            return
        pools = getattr(router, "expert_pools", None)
        if pools is not None and self.modality is not None:
            num_experts = len(pools[self.modality])
        entropy_losses.warn_of_unreachable_threshold(self.threshold, num_experts)

    def compute_tokens(self, routing, router, mask=None):
        # `check_router` warned of the threshold.
        return entropy_losses.entropy_to_threshold(routing.logits, self.threshold, mask)

    def get_config(self):
        return {**super().get_config(), "threshold": self.threshold}


@keras.saving.register_keras_serializable("keras_moe")
class MutualInformationLoss(AuxiliaryLoss):
    """`mutual_information_loss` of experts and modalities, with a weight.

    Groups with tokens of fewer than two modalities tell nothing of these, and do not
    count in the mean over groups.

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
        loss = entropy_losses.mutual_information_loss(
            routing.logits, modality_ids, self.num_modalities, mask
        )
        present = [
            ops.any(entropy_losses.modality_mask(modality_ids, modality, mask), axis=1)
            for modality in range(self.num_modalities)
        ]
        several = sum(ops.cast(has_tokens, "int32") for has_tokens in present) >= 2
        return over_counted_groups(loss, several)

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


def _check_modality_ids(loss, modality_ids):
    if modality_ids is None:
        raise ValueError(
            f"Expected modality_ids, which say the tokens of {type(loss).__name__}; "
            f"received: modality_ids=None, loss={loss.get_config()}"
        )
