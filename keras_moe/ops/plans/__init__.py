"""Plans: the tokens of each expert, and the weights of its outputs.

Equation 2 of *Routers in Vision Mixture of Experts* writes an MoE layer with a dispatch
tensor D and a combine tensor C of shape (G, S, E, C). Soft routing fills them
(`SoftPlan`). The sparse plans keep the entries that are not zero, by choice of the
token (`RoutingPlan`), by slot of the expert (`SlotPlan`) or, where no expert has a
capacity, by row (`RaggedPlan`). A `HeterogeneousPlan` adds experts without slots.

Plans are NamedTuples of tensors, so that they pass through every transformation of
the backends, and all of them answer alike:

- `plan.dispatch(tokens)` fills the experts' slots or rows;
- `plan.combine(outputs)` brings the experts' outputs back to the tokens;
- `plan.dense()` is the `DensePlan` of the tensors D and C;
- `plan.served()` says which expert served which token, and with what weight;
- `plan.group_sizes` is the number of rows of each expert, None if experts have slots.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden,
R rows (G x S x K).
"""

from keras_moe.ops.plans.dense_plan import DensePlan
from keras_moe.ops.plans.heterogeneous_plan import HeterogeneousPlan
from keras_moe.ops.plans.ragged_plan import RaggedPlan
from keras_moe.ops.plans.routing_plan import RoutingPlan
from keras_moe.ops.plans.slot_plan import SlotPlan
from keras_moe.ops.plans.soft_plan import SoftPlan

__all__ = [
    "DensePlan",
    "HeterogeneousPlan",
    "RaggedPlan",
    "RoutingPlan",
    "SlotPlan",
    "SoftPlan",
]
