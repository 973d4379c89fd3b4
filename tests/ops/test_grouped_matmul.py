"""Grouped matmul: the kernels of every backend against the reference.

Axes: R rows, E experts, D hidden, H mlp.
"""

import functools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.ops.grouped import grouped_matmul, grouped_matmul_reference
from tests.ops.programs import (
    BACKEND,
    FORMS,
    REFERENCE_FORM,
    ROWS,
    SIZES,
    D,
    H,
    assert_equal,
    constants,
    each_form,
    group_sizes,
    normal,
    outputs_and_gradients,
    rounded,
)


def example(num_rows, num_experts):
    """Rows, kernels and the gradient in the outputs."""
    return (
        normal(0, num_rows, D),
        normal(1, num_experts, D, H),
        normal(2, num_rows, H),
    )


def program(function, form=FORMS[0], dtype="float32"):
    """A function's outputs and its gradients in rows and kernels, as NumPy arrays."""
    ordered = _sizes_first(function)

    def run(rows, kernels, sizes, cotangent):
        return outputs_and_gradients(
            ordered, (rows, kernels), sizes, cotangent, form, dtype
        )

    return run


@functools.cache
def _sizes_first(function):
    return lambda sizes, rows, kernels: function(rows, kernels, sizes)


def reference():
    return program(grouped_matmul_reference, REFERENCE_FORM)


@pytest.mark.every_backend
@each_form
@pytest.mark.parametrize("sizes", [SIZES, (26, 26, 26, 26, 26)])
def test_parity(form, sizes):
    rows, kernels, cotangent = example(ROWS, len(sizes))
    actual = program(grouped_matmul, form)(rows, kernels, sizes, cotangent)
    expected = reference()(rows, kernels, sizes, cotangent)
    assert_equal(actual, expected, ["kernels"])
    np.testing.assert_array_equal(actual[0][sum(sizes) :], 0)


def test_the_reference_is_a_matmul_per_expert():
    rows, kernels, cotangent = example(10, 3)
    actual = reference()(rows, kernels, (4, 0, 5), cotangent)
    first, last = slice(0, 4), slice(4, 9)
    outputs, row_gradients = np.zeros((10, H)), np.zeros((10, D))
    outputs[first] = rows[first] @ kernels[0]
    outputs[last] = rows[last] @ kernels[2]
    row_gradients[first] = cotangent[first] @ kernels[0].T
    row_gradients[last] = cotangent[last] @ kernels[2].T
    kernel_gradients = np.stack(
        [
            rows[first].T @ cotangent[first],
            np.zeros((D, H)),
            rows[last].T @ cotangent[last],
        ]
    )
    assert_equal(actual, (outputs, row_gradients, kernel_gradients), ["kernels"])


@pytest.mark.parametrize(
    ("num_rows", "num_experts"), [(50, 3), (1, 1), (1, 3), (40, 1), (5, 9)]
)
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_group_sizes(num_rows, num_experts, data):
    sizes = data.draw(group_sizes(num_rows, num_experts))
    rows, kernels, cotangent = example(num_rows, num_experts)
    # Quicker to trace than to compile, with the same code.
    form = "graph" if "graph" in FORMS else FORMS[0]
    actual = program(grouped_matmul, form)(rows, kernels, sizes, cotangent)
    expected = reference()(rows, kernels, sizes, cotangent)
    assert_equal(actual, expected, ["kernels"])


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "tensorflow", reason="shapes are known elsewhere")
@pytest.mark.parametrize("num_rows", [0, 3, 1100])
def test_rows_unknown_while_tracing(num_rows):
    # Fewer rows than the smallest block, and more than the largest, in one program.
    rows, kernels, cotangent = example(num_rows, len(SIZES))
    sizes = (0, num_rows // 2, 0, num_rows // 3, 0)
    expected = reference()(rows, kernels, sizes, cotangent)
    actual = program(grouped_matmul, "unknown")(rows, kernels, sizes, cotangent)
    assert_equal(actual, expected, ["kernels"])


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "tensorflow", reason="constants of XLA on TensorFlow")
@pytest.mark.parametrize("form", [form for form in FORMS if "compiled" in form])
def test_one_program_for_all_values(form):
    rows, kernels, cotangent = example(ROWS, len(SIZES))
    run = _sizes_first(grouped_matmul)
    assert constants(run, (rows, kernels), SIZES, cotangent, form) == 0


@each_form
def test_rows_of_nobody_are_never_read(form):
    rows, kernels, cotangent = example(ROWS, len(SIZES))
    expected = program(grouped_matmul, form)(rows, kernels, SIZES, cotangent)
    first = sum(SIZES)
    rows[first:], cotangent[first:] = np.nan, np.inf
    actual = program(grouped_matmul, form)(rows, kernels, SIZES, cotangent)
    assert_equal(actual, expected, ["kernels"], rtol=1e-6)
    np.testing.assert_array_equal(actual[0][first:], 0)
    np.testing.assert_array_equal(actual[1][first:], 0)


@each_form
def test_neighbours_do_not_mix(form):
    # A block reads beyond its rows, and the rows there may not be finite.
    rows, kernels, cotangent = example(ROWS, len(SIZES))
    rows[75:78] = np.nan
    outputs, row_gradients, kernel_gradients = program(grouped_matmul, form)(
        rows, kernels, SIZES, cotangent
    )
    assert np.all(np.isfinite(np.delete(outputs, slice(75, 78), axis=0)))
    assert np.all(np.isfinite(row_gradients))
    assert np.all(np.isfinite(np.delete(kernel_gradients, 2, axis=0)))


@pytest.mark.every_backend
def test_bfloat16():
    arrays = rows, kernels, cotangent = example(ROWS, len(SIZES))
    actual = program(grouped_matmul, dtype="bfloat16")(rows, kernels, SIZES, cotangent)
    rows, kernels, cotangent = map(rounded, arrays)
    expected = reference()(rows, kernels, SIZES, cotangent)
    # From the same rounded inputs: a result has 8 bits, and TensorFlow's has been
    # rounded once for each block of rows before they are added.
    assert_equal(actual, expected, ["kernels"], rtol=2**-7)


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "jax", reason="a kernel of JAX")
def test_ragged_dot():
    # Platforms other than CPUs take this kernel.
    import jax

    from keras_moe.ops.kernels import block_loops, grouped_jax

    rows, kernels, cotangent = example(ROWS, len(SIZES))
    sizes = np.array(SIZES, "int32")
    actual, expected = (
        (
            jax.jit(forward)(rows, kernels, sizes),
            *jax.jit(backward)(rows, kernels, sizes, cotangent),
        )
        for forward, backward in (
            (grouped_jax.ragged_forward, grouped_jax.ragged_backward),
            (block_loops.matmul_forward, block_loops.matmul_backward),
        )
    )
    assert_equal(actual, expected, ["kernels"])


@pytest.mark.skipif(BACKEND != "torch", reason="a kernel of PyTorch")
@pytest.mark.parametrize("sizes", [SIZES, (26, 26, 26, 26, 26)])
def test_grouped_mm(sizes):
    import torch

    from keras_moe.ops.kernels import grouped_torch

    rows, kernels, cotangent = example(ROWS, len(SIZES))
    if not grouped_torch.kernel_is_valid(torch.tensor(rows), torch.tensor(kernels)):
        pytest.skip("this PyTorch has no such kernel on CPUs")
    actual, expected = (
        program(function)(rows, kernels, sizes, cotangent)
        for function in (
            grouped_torch.matmul_with_kernel,
            grouped_torch.matmul_with_loop,
        )
    )
    assert_equal(actual, expected, ["kernels"])


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "torch", reason="a kernel of PyTorch")
def test_cotangents_and_inputs_of_any_layout():
    import torch

    rows, kernels, cotangent = map(torch.tensor, example(7, 2))
    sizes = torch.tensor([3, 4], dtype=torch.int32)
    expected = reference()(rows, kernels, sizes, cotangent)
    for layout in (lambda x: x.mT.contiguous().mT, lambda x: _shifted(x)):
        actual = program(grouped_matmul)(
            layout(rows.detach()), layout(kernels.detach()), sizes, layout(cotangent)
        )
        assert_equal(actual, expected, ["kernels"])
    actual = program(grouped_matmul)(
        rows.detach(), kernels.detach(), sizes, torch.ones(()).expand(7, H)
    )
    assert np.all(np.isfinite(actual[1]))


def _shifted(x):
    """A copy that does not begin at a multiple of 16 bytes."""
    import torch

    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def test_an_odd_width():
    # PyTorch's kernel takes multiples of 16 bytes only.
    rows, kernels = normal(0, 6, 3), normal(1, 2, 3, 5)
    sizes = np.array([2, 4], "int32")
    outputs = keras.ops.convert_to_numpy(grouped_matmul(rows, kernels, sizes))
    expected = np.concatenate([rows[:2] @ kernels[0], rows[2:] @ kernels[1]])
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_nothing_to_do():
    for num_rows, width in ((0, H), (3, 0)):
        rows, kernels = (
            np.ones((num_rows, D), "float32"),
            np.ones((2, D, width), "float32"),
        )
        outputs = grouped_matmul(rows, kernels, np.zeros(2, "int32"))
        assert tuple(outputs.shape) == (num_rows, width)


@pytest.mark.skipif(BACKEND != "torch", reason="only there shapes are meta tensors")
def test_shape_inference():
    import torch

    rows, kernels = torch.ones(6, D, device="meta"), torch.ones(2, D, H, device="meta")
    sizes = torch.ones(2, dtype=torch.int32, device="meta")
    from keras_moe.ops.kernels import grouped_torch

    outputs = grouped_torch.grouped_matmul(rows, kernels, sizes)
    assert outputs.is_meta
    assert outputs.shape == (6, H)
