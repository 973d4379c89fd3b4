"""Arguments that the functions refuse, in one table."""

import numpy as np
import pytest

from keras_moe import ops
from keras_moe.layers import gelu_tanh


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


# Arguments that are right: 2 groups of 6 tokens and 4 experts, 6 rows of 2 experts.
ROUTED = {"affinity": ones(2, 6, 4), "gates": ones(2, 6, 4)}
ROWS = {"rows": ones(6, 3), "group_sizes": ones(2, dtype="int32")}
RIGHT = {
    ops.expert_capacity: {"num_tokens": 12, "num_experts": 4, "capacity_factor": 1.0},
    ops.expert_types: {"num_ffn_experts": 4},
    ops.heterogeneous_capacity: {
        "num_tokens": 8, "expert_types": ops.ExpertTypes(4, 1), "tau": 1.0,
        "capacity_factor": 1.0,
    },
    ops.entmax: {"logits": ones(1, 2)},
    ops.token_choice: {**ROUTED, "num_selected_experts": 2, "capacity": 3},
    ops.dropless_token_choice: {**ROUTED, "num_selected_experts": 2},
    ops.expert_choice: {**ROUTED, "capacity": 3},
    ops.sinkhorn: {"logits": ones(2, 6, 4)},
    ops.sparse_transport: {"utility": ones(2, 6, 4)},
    ops.grouped_matmul: {**ROWS, "kernels": ones(2, 3, 5)},
    ops.grouped_mlp: {
        **ROWS, "hidden_kernel": ones(2, 3, 5), "output_kernel": ones(2, 5, 3),
        "hidden_bias": ones(2, 5), "output_bias": ones(2, 3),
        "gate_kernel": ones(2, 3, 5), "gate_bias": ones(2, 5), "activation": gelu_tanh,
    },
}  # fmt: skip


@pytest.mark.parametrize(("function", "wrong", "received"), [
    (ops.expert_capacity, {"num_experts": 0}, "num_experts=0"),
    (ops.expert_capacity, {"capacity_factor": 0.0}, "capacity_factor=0.0"),
    (ops.expert_capacity, {"rounding": "floor"}, "rounding='floor'"),
    (ops.expert_capacity, {"multiple_of": -4}, "multiple_of=-4"),
    (ops.expert_types, {"num_ffn_experts": 0}, "num_experts=0"),
    (ops.expert_types, {"zero_experts": -1}, "zero_experts=-1"),
    (ops.expert_types, {"constant_experts": "all"}, "constant_experts='all'"),
    (ops.heterogeneous_capacity, {"tau": 0.0}, "tau=0.0"),
    (ops.entmax, {"alpha": 1.0}, "alpha=1.0"),
    (ops.token_choice, {"num_selected_experts": 5}, "num_selected_experts=5"),
    (ops.token_choice, {"capacity": 0}, "capacity=0"),
    (ops.token_choice, {"priority": "loudest"}, "priority='loudest'"),
    (ops.token_choice, {"priority": ones(1, 6)}, "priority.shape=(1, 6)"),
    (ops.token_choice, {"gates": ones(2, 6, 3)}, "gates.shape=(2, 6, 3)"),
    (ops.token_choice, {"mask": ones(2, 5)}, "mask.shape=(2, 5)"),
    (ops.token_choice, {"in_place_experts": 4}, "in_place_experts=4"),
    (ops.dropless_token_choice, {"num_selected_experts": 5}, "num_selected_experts=5"),
    (ops.dropless_token_choice, {"normalize_gates": "x"}, "normalize_gates='x'"),
    (ops.expert_choice, {"capacity": 7}, "capacity=7"),
    (ops.expert_choice, {"mask": ones(6, 2)}, "mask.shape=(6, 2)"),
    (ops.expert_choice, {"normalize_gates": "before"}, "normalize_gates='before'"),
    (ops.sinkhorn, {"iterations": 0}, "iterations=0"),
    (ops.sinkhorn, {"logits": ones(6, 4)}, "(6, 4)"),
    (ops.sparse_transport, {"utility": ones(6, 4)}, "(6, 4)"),
    (ops.sparse_transport, {"side": "both"}, "side='both'"),
    (ops.sparse_transport, {"max_nonzeros": 0}, "max_nonzeros=0"),
    (ops.sparse_transport, {"solver": "sgd"}, "solver='sgd'"),
    (ops.sparse_transport, {"mask": ones(2, 5)}, "(2, 5)"),
    (ops.grouped_matmul, {"rows": ones(1, 6, 3)}, "(1, 6, 3)"),
    (ops.grouped_matmul, {"group_sizes": ones(1, dtype="int32")}, "(1,)"),
    (ops.grouped_matmul, {"rows": ones(6, 3, dtype="int32")}, "int32"),
    (ops.grouped_matmul, {"kernels": ones(2, 3, 5, dtype="float16")}, "float16"),
    *(
        (ops.grouped_mlp, {name: right[..., :-1]}, f"{name}={right[..., :-1].shape}")
        for name, right in RIGHT[ops.grouped_mlp].items()
        if name not in ("activation", "rows")
    ),
    (ops.grouped_mlp, {"gate_bias": ones(2, 5, dtype="float16")}, "float16"),
])  # fmt: skip
def test_bad_arguments(function, wrong, received):
    with pytest.raises(ValueError, match="Expected") as caught:
        function(**{**RIGHT[function], **wrong})
    assert received in str(caught.value)
    assert "received: " in str(caught.value)
