"""Pure functions on `keras.ops`: capacity, allocation, dispatch and combine."""

from keras_moe.ops.capacity import expert_capacity
from keras_moe.ops.dispatch import (
    combine,
    combine_einsum,
    dispatch,
    dispatch_einsum,
)
from keras_moe.ops.routing import (
    Routing,
    RoutingPlan,
    dense_combine,
    dense_dispatch,
    served,
)
from keras_moe.ops.token_choice import token_choice

__all__ = [
    "Routing",
    "RoutingPlan",
    "combine",
    "combine_einsum",
    "dense_combine",
    "dense_dispatch",
    "dispatch",
    "dispatch_einsum",
    "expert_capacity",
    "served",
    "token_choice",
]
