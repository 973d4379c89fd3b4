"""The choices of tokens: by expert, and summed with their weights.

Axes: G groups, S group_size, E experts, K selected experts, D hidden, R rows.
"""

from typing import Any

from keras import ops

from keras_moe.ops.row_moves import weighted_sum_of_rows


def by_expert(chosen: Any, weights: Any, num_experts: Any) -> tuple[Any, Any]:
    """The choices of each token as one-hot tensors."""
    experts = ops.arange(num_experts, dtype="int32")
    dispatched = combined = 0.0
    # An unrolled sum over K: one fused pass each, no (S, K, E) tensor.
    for k in range(chosen.shape[-1]):
        one_hot = ops.cast(chosen[..., k : k + 1] == experts, "float32")
        dispatched = dispatched + one_hot
        combined = combined + one_hot * weights[..., k : k + 1]
    return dispatched, combined


def expert_places(experts: Any, num_experts: int) -> list[int]:
    """The place of each expert among some of them; the others have the one behind."""
    experts = list(experts)
    return [
        experts.index(expert) if expert in experts else len(experts)
        for expert in range(num_experts)
    ]


def sum_of_choices(outputs: Any, weights: Any, rows: Any, owners: Any) -> Any:
    """The weighted sum of each token's choices, in float32."""
    num_groups, num_tokens, num_choices = ops.shape(weights)
    total = weighted_sum_of_rows(
        outputs, ops.reshape(weights, (-1, num_choices)), rows, owners
    )
    total = ops.reshape(total, (num_groups, num_tokens, outputs.shape[-1]))
    return ops.cast(total, outputs.dtype)
