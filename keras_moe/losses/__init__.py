"""Auxiliary losses of routers, and losses of classification heads."""

from keras_moe.losses.auxiliary import (
    AuxiliaryLoss,
    ImportanceLoss,
    LoadBalanceLoss,
    LoadLoss,
    ZLoss,
    get,
    serialize,
)
from keras_moe.losses.classification import SigmoidCrossentropy
from keras_moe.losses.router_losses import (
    importance_loss,
    load_balance_loss,
    load_loss,
    z_loss,
)

__all__ = [
    "AuxiliaryLoss",
    "ImportanceLoss",
    "LoadBalanceLoss",
    "LoadLoss",
    "SigmoidCrossentropy",
    "ZLoss",
    "get",
    "importance_loss",
    "load_balance_loss",
    "load_loss",
    "serialize",
    "z_loss",
]
