"""How many tokens an expert takes."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.ops import ExpertTypes, expert_capacity, heterogeneous_capacity
from tests import golden
from tests.refusals import refuses


def test_golden_table():
    arrays, _ = golden.load("01_token_choice/compute_capacity_table")
    columns = "num_tokens", "num_experts", "capacity_factor", "ceil_or_round"
    rows = zip(
        *(arrays[f"inputs/{column}"].tolist() for column in columns),
        arrays["inputs/multiple_of"].tolist(),
        arrays["outputs/capacity"].tolist(),
    )
    for tokens, experts, factor, rounding, multiple_of, expected in rows:
        # The reference's 0 is our None.
        options = {"rounding": rounding, "multiple_of": multiple_of or None}
        if factor <= 0:
            refuses("received: ", expert_capacity, tokens, experts, factor, **options)
            continue
        if expected == -1:
            # The reference refuses what rounds to 0; here it is 1.
            expected = multiple_of or 1
        got = expert_capacity(tokens, experts, factor, **options)
        assert got == expected, (tokens, experts, factor, options)
        assert type(got) is int


def test_by_hand():
    assert expert_capacity(12, 4, 1.0) == 3
    assert expert_capacity(13, 4, 1.0) == 4
    assert expert_capacity(13, 4, 1.0, num_selected_experts=2) == 7
    assert expert_capacity(13, 4, 1.0, multiple_of=3) == 6
    assert expert_capacity(1, 64, 1.0) == 1
    assert type(expert_capacity(np.int64(13), 4, 1.0)) is int
    # Halves go to the even number, as in Python.
    assert expert_capacity(10, 4, 1.0, rounding="round") == 2
    assert expert_capacity(14, 4, 1.0, rounding="round") == 4
    assert expert_capacity(4, 16, 1.0, rounding="round") == 1


@pytest.mark.every_backend
@pytest.mark.skipif(keras.backend.backend() == "jax", reason="its sizes are numbers")
@pytest.mark.parametrize("rounding", ["ceil", "round"])
@pytest.mark.parametrize("multiple_of", [None, 4])
def test_tensors_have_the_capacity_of_numbers(rounding, multiple_of):
    arguments = {"rounding": rounding, "multiple_of": multiple_of}
    types = ExpertTypes(8, 1, 1, 2)
    for size in (1, 4, 7, 8, 9, 14, 15, 25, 35, 40, 41, 350, 400):
        tensor = ops.convert_to_tensor(np.array(size, "int32"))
        got = expert_capacity(tensor, 16, 1.05, 2, **arguments)
        assert int(got) == expert_capacity(size, 16, 1.05, 2, **arguments)
        for tau, factor in ((0.75, 1.0), (0.75, 1.1), (1 / 3, 1.0)):
            got = heterogeneous_capacity(tensor, types, tau, factor, 2, **arguments)
            expected = heterogeneous_capacity(size, types, tau, factor, 2, **arguments)
            assert tuple(map(int, got)) == expected
