"""Pure functions on `keras.ops`: capacity, allocation and plans."""

from keras_moe.ops.capacity import expert_capacity, heterogeneous_capacity
from keras_moe.ops.cost import Cost
from keras_moe.ops.entmax import entmax
from keras_moe.ops.expert_choice import expert_choice
from keras_moe.ops.expert_types import EXPERT_TYPES, ExpertTypes, expert_types
from keras_moe.ops.grouped import grouped_matmul, grouped_mlp
from keras_moe.ops.plans import (
    DensePlan,
    HeterogeneousPlan,
    RaggedPlan,
    Routing,
    RoutingPlan,
    SlotPlan,
    SoftPlan,
)
from keras_moe.ops.sparse_transport import sparse_transport
from keras_moe.ops.token_choice import (
    dropless_token_choice,
    token_choice,
)
from keras_moe.ops.transport import Transport, sinkhorn

__all__ = [
    "EXPERT_TYPES", "Cost", "DensePlan", "ExpertTypes", "HeterogeneousPlan",
    "RaggedPlan", "Routing", "RoutingPlan", "SlotPlan", "SoftPlan", "Transport",
    "dropless_token_choice", "entmax", "expert_capacity", "expert_choice",
    "expert_types", "grouped_matmul", "grouped_mlp", "heterogeneous_capacity",
    "sinkhorn", "sparse_transport", "token_choice",
]  # fmt: skip
__dir__ = __all__.copy
