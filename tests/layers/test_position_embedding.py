import numpy as np
import pytest

from keras_moe.layers import resize_positions, sincos_table
from tests import golden
from tests.compare import assert_close, assert_same


def test_resizing_is_that_of_the_releases():
    arrays, config = golden.load("07_checkpoints/posemb_interpolation")
    assert len(config["cases"]) == 4
    for case in config["cases"]:
        old, new = case["old_grid"], case["new_grid"]
        resized = resize_positions(
            arrays[f"inputs/{case['i']}/pos_embedding"], (old, old), (new, new)
        )
        assert_close(resized, arrays[f"outputs/{case['i']}/pos_embedding"], 1e-5, 1e-6)


def test_resizing_to_the_same_grid_and_to_one_patch():
    table = np.arange(7, dtype="float32").reshape(1, 7, 1)
    assert_same(resize_positions(table, (2, 3), (2, 3)), table)
    one = resize_positions(table, (2, 3), (1, 1))[0, :, 0]
    assert_same(one, [0, 1])
    wide = resize_positions(np.full((1, 1, 2), 3.0), (1, 1), (2, 2))
    assert_same(wide, np.full((1, 4, 2), 3.0))


@pytest.mark.parametrize(("old", "new"), [((4, 5), (7, 9)), ((7, 6), (3, 2))])
def test_bicubic_resizing_is_that_of_pillow_and_timm(old, new):
    import jax

    table = np.random.default_rng(0).normal(size=(1, old[0] * old[1] + 1, 3))
    resized = resize_positions(table, old, new, "bicubic")
    grid = table[0, 1:].reshape(*old, 3)
    expected = jax.image.resize(grid, (*new, 3), "cubic", antialias=True)
    assert_same(resized[:, 0], table[:, 0])
    assert_close(resized[0, 1:].reshape(*new, 3), expected, 1e-5, 1e-5)


def test_sincos_by_hand():
    table = sincos_table((2, 3), 8)
    # Row 1, column 2: x = 2, y = 1, frequencies 1 and 1 / 10000.
    x, y = np.array([2.0, 2e-4]), np.array([1.0, 1e-4])
    expected = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)])
    assert_close(table[5], expected, 1e-6)
    with pytest.raises(ValueError, match="dim=6"):
        sincos_table((2, 2), 6)
