import numpy as np
import pytest

from keras_moe import layers
from keras_moe.layers.position_embedding import axis_weights, sincos_table
from tests import golden
from tests.compare import assert_close, assert_same
from tests.refusals import refuses

WEIGHTS = {"bilinear": "linear", "bicubic": "bicubic"}
# timm's `resample_patch_embed` of the kernels 0, 1, ... of 2 x 2 to 3 x 3, and of 4 x 4
# to 2 x 2: bilinear without antialiasing, bicubic with.
TIMM = {
    ("bilinear", 2): [-1 / 3, 0, 1 / 3, 1 / 3, 2 / 3, 1, 1, 4 / 3, 5 / 3],
    ("bilinear", 4): [10, 18, 42, 50],
    ("bicubic", 2): [
        *(-0.2171, 0.0775, 0.3721),
        *(0.3721, 0.6667, 0.9612),
        *(0.9612, 1.2558, 1.5504),
    ],
    ("bicubic", 4): [3.8647, 13.7482, 43.3989, 53.2825],
}


def resized(images, size, interpolation):
    """(B, height, width, channels) of one patch each, resized."""
    rows, columns = (
        axis_weights(old, new, WEIGHTS[interpolation])
        for old, new in zip(images.shape[1:3], size)
    )
    return np.einsum("yr,xc,brci->byxi", rows, columns, images)


@pytest.mark.parametrize("interpolation", WEIGHTS)
@pytest.mark.parametrize(
    ("old", "new"),
    [((4, 4), (8, 8)), ((3, 5), (7, 6)), ((1, 2), (4, 2)), ((14, 14), (16, 16))],
)
def test_an_enlarged_patch_keeps_its_token(old, new, interpolation):
    generator = np.random.default_rng(0)
    kernel, patches = (generator.normal(size=(n, *old, 3)) for n in (5, 7))
    kernel = kernel.transpose(1, 2, 3, 0)
    other = layers.resize_patch_kernel(kernel, new, interpolation)
    assert other.shape == (*new, 3, 5)
    assert_close(
        np.einsum("byxi,yxid->bd", resized(patches, new, interpolation), other),
        np.einsum("byxi,yxid->bd", patches, kernel),
        1e-9,
        1e-9,
    )


@pytest.mark.parametrize("interpolation", WEIGHTS)
def test_a_smaller_kernel_is_the_nearest(interpolation):
    generator = np.random.default_rng(0)
    kernel = generator.normal(size=(6, 5, 1, 1))
    matrix = resized(np.eye(30).reshape(30, 6, 5, 1), (3, 2), interpolation)
    # Equation 4: least squares over all patches.
    expected = np.linalg.lstsq(matrix.reshape(30, 6), kernel.ravel(), rcond=None)[0]
    actual = layers.resize_patch_kernel(kernel, (3, 2), interpolation)
    assert_close(actual.ravel(), expected, 1e-9, 1e-12)


@pytest.mark.parametrize(("case", "expected"), TIMM.items())
def test_numbers_of_timm(case, expected):
    interpolation, old = case
    kernel = np.arange(float(old * old)).reshape(old, old, 1, 1)
    actual = layers.resize_patch_kernel(kernel, {2: 3, 4: 2}[old], interpolation)
    assert_close(actual.ravel(), expected, 1e-4, 1e-4)


def test_the_same_size_the_dtype_and_numpys_integers():
    kernel = np.random.default_rng(0).normal(size=(4, 3, 2, 5)).astype("float32")
    actual = layers.resize_patch_kernel(kernel, (4, 3))
    assert_close(actual, kernel, 1e-6, 1e-6)
    assert actual.dtype == np.float32
    assert layers.resize_patch_kernel(kernel.astype("float16"), 8).dtype == np.float16
    assert layers.PatchEmbedding(8, np.int64(4)).patch_size == (4, 4)
    assert layers.PatchEmbedding(8, np.array([4, 2])).patch_size == (4, 2)


def test_resizing_is_that_of_the_releases():
    arrays, config = golden.load("07_checkpoints/posemb_interpolation")
    assert len(config["cases"]) == 4
    for case in config["cases"]:
        old, new = case["old_grid"], case["new_grid"]
        resized = layers.resize_positions(
            arrays[f"inputs/{case['i']}/pos_embedding"], (old, old), (new, new)
        )
        assert_close(resized, arrays[f"outputs/{case['i']}/pos_embedding"], 1e-5, 1e-6)
    table = np.arange(7, dtype="float32").reshape(1, 7, 1)
    assert_same(layers.resize_positions(table, (2, 3), (2, 3)), table)
    one = layers.resize_positions(table, (2, 3), (1, 1))[0, :, 0]
    assert_same(one, [0, 1])
    wide = layers.resize_positions(np.full((1, 1, 2), 3.0), (1, 1), (2, 2))
    assert_same(wide, np.full((1, 4, 2), 3.0))


@pytest.mark.parametrize(("old", "new"), [((4, 5), (7, 9)), ((7, 6), (3, 2))])
def test_bicubic_resizing_is_that_of_pillow_and_timm(old, new):
    import jax

    table = np.random.default_rng(0).normal(size=(1, old[0] * old[1] + 1, 3))
    resized = layers.resize_positions(table, old, new, "bicubic")
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
    refuses("dim=6", sincos_table, (2, 2), 6)
