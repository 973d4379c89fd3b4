"""Auxiliary losses of routers; losses of classifiers, pairs and language models."""

from keras_moe.losses.auxiliary import (
    LIMOE_LOSSES,
    AuxiliaryLoss,
    get,
    limoe_losses,
    serialize,
)
from keras_moe.losses.classification import (
    SigmoidCrossentropy,
    SparseSigmoidCrossentropy,
)
from keras_moe.losses.contrastive import (
    TEMPERATURES,
    ContrastiveLoss,
    LogScaleBound,
    SigmoidContrastiveLoss,
    SoftmaxContrastiveLoss,
    Temperature,
    sigmoid_contrastive_loss,
    softmax_contrastive_loss,
)
from keras_moe.losses.language import (
    next_tokens,
    token_log_likelihoods,
)
from keras_moe.losses.router_losses import (
    global_entropy_loss,
    heterogeneous_balance_loss,
    importance_loss,
    load_balance_loss,
    load_loss,
    local_entropy_loss,
    merged_entropy_loss,
    mutual_information_loss,
    router_z_loss,
    target_entropy_loss,
)

__all__ = [
    "LIMOE_LOSSES", "TEMPERATURES", "AuxiliaryLoss", "ContrastiveLoss", "LogScaleBound",
    "SigmoidContrastiveLoss", "SigmoidCrossentropy", "SoftmaxContrastiveLoss",
    "SparseSigmoidCrossentropy", "Temperature", "get", "global_entropy_loss",
    "heterogeneous_balance_loss", "importance_loss", "limoe_losses",
    "load_balance_loss", "load_loss", "local_entropy_loss", "merged_entropy_loss",
    "mutual_information_loss", "next_tokens", "router_z_loss", "serialize",
    "sigmoid_contrastive_loss", "softmax_contrastive_loss", "target_entropy_loss",
    "token_log_likelihoods",
]  # fmt: skip
__dir__ = __all__.copy
