"""Auxiliary losses of routers, and losses of classification heads."""

from keras_moe.losses.auxiliary import AggregateLoss, AuxiliaryLoss, get, serialize
from keras_moe.losses.classification import (
    SigmoidCrossentropy,
    SparseSigmoidCrossentropy,
)
from keras_moe.losses.entropy_losses import (
    global_entropy_loss,
    local_entropy_loss,
    merged_entropy_loss,
    mutual_information_loss,
    target_entropy_loss,
)
from keras_moe.losses.router_losses import (
    heterogeneous_balance_loss,
    importance_loss,
    load_balance_loss,
    load_loss,
    z_loss,
)

__all__ = [
    "AggregateLoss",
    "AuxiliaryLoss",
    "SigmoidCrossentropy",
    "SparseSigmoidCrossentropy",
    "get",
    "global_entropy_loss",
    "heterogeneous_balance_loss",
    "importance_loss",
    "load_balance_loss",
    "load_loss",
    "local_entropy_loss",
    "merged_entropy_loss",
    "mutual_information_loss",
    "serialize",
    "target_entropy_loss",
    "z_loss",
]
