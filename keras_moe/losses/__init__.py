"""Auxiliary losses of routers, and losses of classification heads."""

from keras_moe.losses.auxiliary import (
    AggregateLoss,
    HeterogeneousBalanceLoss,
    ImportanceLoss,
    LoadBalanceLoss,
    LoadLoss,
    ZLoss,
    get,
    serialize,
)
from keras_moe.losses.auxiliary_loss import AuxiliaryLoss
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
from keras_moe.losses.modality_losses import (
    GlobalEntropyLoss,
    LocalEntropyLoss,
    MergedEntropyLoss,
    MutualInformationLoss,
    TargetEntropyLoss,
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
    "GlobalEntropyLoss",
    "HeterogeneousBalanceLoss",
    "ImportanceLoss",
    "LoadBalanceLoss",
    "LoadLoss",
    "LocalEntropyLoss",
    "MergedEntropyLoss",
    "MutualInformationLoss",
    "SigmoidCrossentropy",
    "SparseSigmoidCrossentropy",
    "TargetEntropyLoss",
    "ZLoss",
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
