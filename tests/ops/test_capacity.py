"""How many tokens an expert takes."""

import numpy as np
import pytest

from keras_moe.ops import expert_capacity
from tests import golden


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
        if expected == -1:
            with pytest.raises(ValueError, match="received: "):
                expert_capacity(tokens, experts, factor, **options)
        else:
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


@pytest.mark.parametrize(
    "case", ["k1_vanilla_factor105_round_mult1", "k2_bpr_factor05_mult4"]
)
def test_golden_capacity_of_a_dispatcher(case):
    _, config = golden.load(f"01_token_choice/{case}")
    assert config["actual_capacity"] == expert_capacity(
        config["S"],
        config["E"],
        config["capacity_factor"],
        num_selected_experts=config["K"],
        rounding=config["capacity_ceil_or_round"] or "ceil",
        multiple_of=config["capacity_multiple_of"],
    )
