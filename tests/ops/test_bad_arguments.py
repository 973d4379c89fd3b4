"""Arguments that the functions refuse, in one table."""

import numpy as np
import pytest

from keras_moe.layers import gelu_tanh
from keras_moe.ops import (
    ExpertTypes,
    dropless_token_choice,
    entmax,
    expert_capacity,
    expert_choice,
    expert_types,
    grouped_matmul,
    grouped_mlp,
    heterogeneous_capacity,
    sinkhorn,
    sparse_transport,
    token_choice,
)


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


# Arguments that are right: 2 groups of 6 tokens and 4 experts, 6 rows of 2 experts.
ROUTED = {"affinity": ones(2, 6, 4), "gates": ones(2, 6, 4)}
ROWS = {"rows": ones(6, 3), "group_sizes": ones(2, dtype="int32")}
RIGHT = {
    expert_capacity: {"num_tokens": 12, "num_experts": 4, "capacity_factor": 1.0},
    expert_types: {"num_ffn_experts": 4},
    heterogeneous_capacity: {
        "num_tokens": 8,
        "expert_types": ExpertTypes(4, 1),
        "tau": 1.0,
        "capacity_factor": 1.0,
    },
    entmax: {"logits": ones(1, 2)},
    token_choice: {**ROUTED, "num_selected_experts": 2, "capacity": 3},
    dropless_token_choice: {**ROUTED, "num_selected_experts": 2},
    expert_choice: {**ROUTED, "capacity": 3},
    sinkhorn: {"logits": ones(2, 6, 4)},
    sparse_transport: {"utility": ones(2, 6, 4)},
    grouped_matmul: {**ROWS, "kernels": ones(2, 3, 5)},
    grouped_mlp: {
        **ROWS,
        "hidden_kernel": ones(2, 3, 5),
        "output_kernel": ones(2, 5, 3),
        "hidden_bias": ones(2, 5),
        "output_bias": ones(2, 3),
        "gate_kernel": ones(2, 3, 5),
        "gate_bias": ones(2, 5),
        "activation": gelu_tanh,
    },
}


@pytest.mark.parametrize(
    ("function", "wrong", "received"),
    [
        (expert_capacity, {"num_experts": 0}, "num_experts=0"),
        (expert_capacity, {"capacity_factor": 0.0}, "capacity_factor=0.0"),
        (expert_capacity, {"num_tokens": 0}, "num_tokens=0"),
        (expert_capacity, {"num_selected_experts": 0}, "num_selected_experts=0"),
        (expert_capacity, {"rounding": "floor"}, "rounding='floor'"),
        (expert_capacity, {"multiple_of": -4}, "multiple_of=-4"),
        (expert_types, {"num_ffn_experts": 0}, "num_experts=0"),
        (expert_types, {"zero_experts": -1}, "zero_experts=-1"),
        (expert_types, {"copy_experts": 0.5}, "copy_experts=0.5"),
        (expert_types, {"constant_experts": "all"}, "constant_experts='all'"),
        (heterogeneous_capacity, {"tau": 0.0}, "tau=0.0"),
        (heterogeneous_capacity, {"capacity_factor": -1.0}, "capacity_factor=-1.0"),
        (entmax, {"alpha": 1.0}, "alpha=1.0"),
        (entmax, {"alpha": "1.5"}, "alpha='1.5'"),
        (entmax, {"alpha": float("nan")}, "alpha=nan"),
        (token_choice, {"num_selected_experts": 5}, "num_selected_experts=5"),
        (token_choice, {"capacity": 0}, "capacity=0"),
        (token_choice, {"priority": "loudest"}, "priority='loudest'"),
        (token_choice, {"priority": ones(1, 6)}, "priority.shape=(1, 6)"),
        (token_choice, {"affinity": ones(6, 4)}, "affinity.shape=(6, 4)"),
        (token_choice, {"gates": ones(2, 6, 3)}, "gates.shape=(2, 6, 3)"),
        (token_choice, {"mask": ones(2, 5)}, "mask.shape=(2, 5)"),
        (token_choice, {"in_place_experts": 4}, "in_place_experts=4"),
        (dropless_token_choice, {"num_selected_experts": 5}, "num_selected_experts=5"),
        (dropless_token_choice, {"gates": ones(2, 6, 1)}, "gates.shape=(2, 6, 1)"),
        (dropless_token_choice, {"mask": ones(6, 2)}, "mask.shape=(6, 2)"),
        (dropless_token_choice, {"normalize_gates": "x"}, "normalize_gates='x'"),
        (expert_choice, {"capacity": 0}, "capacity=0"),
        (expert_choice, {"capacity": 7}, "capacity=7"),
        (expert_choice, {"gates": ones(2, 6, 1)}, "gates.shape=(2, 6, 1)"),
        (expert_choice, {"mask": ones(6, 2)}, "mask.shape=(6, 2)"),
        (expert_choice, {"normalize_gates": "before"}, "normalize_gates='before'"),
        (sinkhorn, {"iterations": 0}, "iterations=0"),
        (sinkhorn, {"tolerance": 0.0}, "tolerance=0.0"),
        (sinkhorn, {"logits": ones(6, 4)}, "(6, 4)"),
        (sparse_transport, {"utility": ones(6, 4)}, "(6, 4)"),
        (sparse_transport, {"side": "both"}, "side='both'"),
        (sparse_transport, {"max_nonzeros": 0}, "max_nonzeros=0"),
        (sparse_transport, {"solver": "sgd"}, "solver='sgd'"),
        (sparse_transport, {"iterations": 0}, "iterations=0"),
        (sparse_transport, {"learning_rate": -1.0}, "learning_rate=-1.0"),
        (sparse_transport, {"mask": ones(2, 5)}, "(2, 5)"),
        (grouped_matmul, {"rows": ones(1, 6, 3)}, "(1, 6, 3)"),
        (grouped_matmul, {"rows": ones(6, 2)}, "(6, 2)"),
        (grouped_matmul, {"kernels": ones(3, 5)}, "(3, 5)"),
        (grouped_matmul, {"group_sizes": ones(1, dtype="int32")}, "(1,)"),
        (grouped_matmul, {"rows": ones(6, 3, dtype="int32")}, "int32"),
        (grouped_matmul, {"kernels": ones(2, 3, 5, dtype="float16")}, "float16"),
        *(
            (grouped_mlp, {name: right[..., :-1]}, f"{name!r}: {right[..., :-1].shape}")
            for name, right in RIGHT[grouped_mlp].items()
            if name not in ("activation", "rows")
        ),
        (grouped_mlp, {"gate_bias": ones(2, 5, dtype="float16")}, "float16"),
    ],
)
def test_bad_arguments(function, wrong, received):
    with pytest.raises(ValueError, match="Expected") as caught:
        function(**{**RIGHT[function], **wrong})
    assert received in str(caught.value)
    assert "received: " in str(caught.value)
