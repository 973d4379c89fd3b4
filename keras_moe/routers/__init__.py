"""Routers: the class is the allocation, the affinity is an argument."""

from keras_moe.routers.affinities import (
    Affinity,
    SinkhornAffinity,
    SoftmaxAffinity,
    SparsityConstrainedAffinity,
)
from keras_moe.routers.expert_choice import ExpertChoiceRouter
from keras_moe.routers.names import ROUTERS, get, register_router
from keras_moe.routers.pathway_aware import PathwayAwareRouter
from keras_moe.routers.router import Router
from keras_moe.routers.soft import SoftRouter
from keras_moe.routers.sparse_router import SparseRouter
from keras_moe.routers.token_choice import TokenChoiceRouter

__all__ = [
    "ROUTERS", "Affinity", "ExpertChoiceRouter", "PathwayAwareRouter", "Router",
    "SinkhornAffinity", "SoftRouter", "SoftmaxAffinity", "SparseRouter",
    "SparsityConstrainedAffinity", "TokenChoiceRouter", "get", "register_router",
]  # fmt: skip
__dir__ = __all__.copy
