"""Token choice without a capacity on several devices: rows in a block for each.

Axes: G groups, S group_size, K selected experts, P devices, T tokens of a device, R
rows of a device (T x K), E experts, D hidden.
"""

import math
from typing import Any, NamedTuple

from keras import ops

from keras_moe._types import Tensor
from keras_moe.ops._rows import combine_rows, gather_rows
from keras_moe.ops.plans import HeterogeneousPlan, RaggedPlan
from keras_moe.ops.token_choice import rows_by_expert

# Buffers for a quarter more than the mean: 1.25 / 1.05 of those of V-MoE's capacity.
# Auxiliary losses keep the load of a device's experts below it.
SLACK = 1.25
# The name of the operations of a gradient that balanced experts do not run.
FURTHER_ROUNDS = "further_rounds"


def rows_per_round(num_rows: int, num_devices: int) -> int:
    """How many rows a device's experts take at a time, in whole tiles of TPUs' memory.

    `num_rows` are the choices of a device's tokens, and the devices those among which
    the experts are split.
    """
    if num_devices == 1:
        return num_rows
    return min(8 * math.ceil(SLACK * num_rows / 8), num_devices * num_rows)


class RowBlocks(NamedTuple):
    """A `RaggedPlan` for each device's tokens, so that none sorts or gathers them all.

    Attributes:
        row_tokens: int32 (P, R). The device's token of each row, sorted by expert; rows
            of masked tokens come last, as -1.
        token_rows: int32 (P, T, K). The row of each choice, -1 where not routed.
        combine_weights: float32 (G, S, K). Each choice's weight, 0 where not routed.
        group_sizes: int32 (P, E). The number of the device's rows of each expert.
    """

    row_tokens: Tensor
    token_rows: Tensor
    combine_weights: Tensor
    group_sizes: Tensor

    def dispatch(self, tokens: Tensor) -> Tensor:
        """Each device's rows (P, R, D) of the tokens (G, S, D)."""
        tokens = self._by_device(tokens)
        arrays = [tokens, self.row_tokens, self.token_rows]
        return ops.vectorized_map(lambda arrays: gather_rows(*arrays), arrays)

    def combine(self, outputs: Tensor) -> Tensor:
        """Sums outputs (P, R, D) of experts; see `RoutingPlan.combine`."""
        weights = self._by_device(self.combine_weights)
        arrays = [outputs, weights, self.token_rows, self.row_tokens]
        total = ops.vectorized_map(lambda arrays: combine_rows(*arrays), arrays)
        shape = (*self.combine_weights.shape[:2], outputs.shape[-1])
        return ops.cast(ops.reshape(total, shape), outputs.dtype)

    def _by_device(self, x):
        return ops.reshape(x, (*self.token_rows.shape[:2], x.shape[-1]))


def in_blocks(plan: Any, num_blocks: int) -> Any:
    """A plan without a capacity in blocks, if their number divides the tokens."""
    if isinstance(plan, HeterogeneousPlan):
        return plan._replace(plan=in_blocks(plan.plan, num_blocks))
    if not isinstance(plan, RaggedPlan):
        return plan
    num_groups, num_tokens, num_choices = plan.token_experts.shape
    num_tokens = num_groups * num_tokens
    if num_tokens % num_blocks:
        return plan
    num_experts = plan.group_sizes.shape[0]
    shape = (num_blocks, num_tokens // num_blocks, num_choices)
    row_tokens, token_rows, group_sizes = ops.vectorized_map(
        lambda experts: rows_by_expert(experts, num_experts),
        ops.reshape(plan.token_experts, shape),
    )
    return RowBlocks(row_tokens, token_rows, plan.combine_weights, group_sizes)
