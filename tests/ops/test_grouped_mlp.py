"""Grouped MLPs: the kernels of every backend against the reference.

Axes: R rows, E experts, D hidden, H mlp.
"""

import functools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.layers import gelu_tanh
from keras_moe.layers.activations import entmax15
from keras_moe.ops.grouped import grouped_mlp, grouped_mlp_reference
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

KERNELS = ("hidden_kernel", "output_kernel")
BIASES = ("hidden_bias", "output_bias")
GATE = ("gate_kernel", "gate_bias")
# One activation has a gradient of its own, and reads a whole row.
WEIGHTS = {
    "plain": (KERNELS + BIASES, gelu_tanh),
    "gated": (KERNELS + BIASES + GATE, keras.activations.silu),
    "no bias": (KERNELS, entmax15),
    "gated, no bias": ((*KERNELS, "gate_kernel"), keras.activations.relu),
}


def example(num_rows, num_experts, names=KERNELS + BIASES):
    """Rows and weights, and the gradient in the outputs."""
    shapes = {
        "hidden_kernel": (num_experts, D, H),
        "output_kernel": (num_experts, H, D),
        "hidden_bias": (num_experts, H),
        "output_bias": (num_experts, D),
        "gate_kernel": (num_experts, D, H),
        "gate_bias": (num_experts, H),
    }
    weights = [normal(seed, *shapes[name]) for seed, name in enumerate(names)]
    return [normal(10, num_rows, D), *weights], normal(11, num_rows, D)


@functools.cache
def named(function, names, activation):
    """`function` of sizes, rows and weights in the order of `names`."""

    def run(sizes, rows, *weights):
        weights = dict(zip(names, weights, strict=True))
        return function(rows, sizes, **weights, activation=activation)

    return run


assert_plain = functools.partial(assert_equal, names=KERNELS + BIASES)


def actual_and_expected(
    arrays, sizes, cotangent, form, names=KERNELS + BIASES, activation=gelu_tanh
):
    return [
        outputs_and_gradients(
            named(function, names, activation), arrays, sizes, cotangent, form
        )
        for function, form in (
            (grouped_mlp, form),
            (grouped_mlp_reference, REFERENCE_FORM),
        )
    ]


@pytest.mark.every_backend
@each_form
def test_parity(form):
    arrays, cotangent = example(ROWS, len(SIZES))
    actual, expected = actual_and_expected(arrays, SIZES, cotangent, form)
    assert_plain(actual, expected)
    for zeros in actual[0][sum(SIZES) :], actual[1][sum(SIZES) :], actual[2][1]:
        np.testing.assert_array_equal(zeros, 0)


@pytest.mark.every_backend
@pytest.mark.parametrize("kind", list(WEIGHTS)[1:])
def test_other_weights(kind):
    names, activation = WEIGHTS[kind]
    arrays, cotangent = example(40, 3, names)
    form = "eager" if "eager" in FORMS and kind == "gated" else FORMS[0]
    actual, expected = actual_and_expected(
        arrays, (30, 0, 6), cotangent, form, names, activation
    )
    assert_equal(actual, expected, names)


def test_the_reference_is_an_mlp_per_expert():
    names, activation = WEIGHTS["gated"]
    (rows, *weights), cotangent = example(10, 3, names)
    actual = outputs_and_gradients(
        named(grouped_mlp_reference, names, activation),
        (rows, *weights),
        (4, 0, 5),
        cotangent,
        REFERENCE_FORM,
    )
    weights = dict(zip(names, weights))
    expected = np.zeros_like(rows)
    for expert, own in ((0, slice(0, 4)), (2, slice(4, 9))):
        w = {name: weight[expert] for name, weight in weights.items()}
        gate = rows[own] @ w["gate_kernel"] + w["gate_bias"]
        hidden = rows[own] @ w["hidden_kernel"] + w["hidden_bias"]
        hidden = gate / (1 + np.exp(-gate)) * hidden
        expected[own] = hidden @ w["output_kernel"] + w["output_bias"]
    np.testing.assert_allclose(actual[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_rows", "num_experts"), [(50, 3), (1, 1), (5, 9)])
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_group_sizes(num_rows, num_experts, data):
    sizes = data.draw(group_sizes(num_rows, num_experts))
    arrays, cotangent = example(num_rows, num_experts)
    # Quicker to trace than to compile, with the same code.
    form = "graph" if "graph" in FORMS else FORMS[0]
    assert_plain(*actual_and_expected(arrays, sizes, cotangent, form))


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "tensorflow", reason="shapes are known elsewhere")
@pytest.mark.parametrize("num_rows", [0, 3, 1100])
def test_rows_unknown_while_tracing(num_rows):
    # Fewer rows than a block, and more than the largest block, in one program.
    arrays, cotangent = example(num_rows, len(SIZES))
    sizes = (0, num_rows // 2, 0, num_rows // 3, 0)
    assert_plain(*actual_and_expected(arrays, sizes, cotangent, "unknown"))


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "tensorflow", reason="constants of XLA on TensorFlow")
@pytest.mark.parametrize("form", [form for form in FORMS if "compiled" in form])
def test_one_program_for_all_values(form):
    arrays, cotangent = example(ROWS, len(SIZES))
    run = named(grouped_mlp, KERNELS + BIASES, gelu_tanh)
    assert constants(run, arrays, SIZES, cotangent, form) == 0


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "tensorflow", reason="other backends know at each call")
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_gradients_of_a_program_traced_without_them(kind):
    import tensorflow as tf

    names, activation = WEIGHTS[kind]
    arrays, cotangent = example(ROWS, len(SIZES), names)
    run = named(grouped_mlp, names, activation)
    program = tf.function(run, jit_compile=True)
    inputs = [tf.constant(SIZES), *map(tf.constant, arrays)]
    text = program.experimental_get_compiler_ir(*inputs)(stage="hlo")
    assert f"[{ROWS},{D}]" in text
    assert f"[{ROWS},{H}]" not in text
    program(*inputs)
    with tf.GradientTape() as tape:
        tape.watch(inputs[1:])
        outputs = program(*inputs)
    actual = outputs, *tape.gradient(outputs, inputs[1:], cotangent)
    expected = outputs_and_gradients(run, arrays, SIZES, cotangent, "eager")
    assert_equal(actual, expected, names)


@each_form
def test_rows_of_nobody_are_never_read(form):
    run = named(grouped_mlp, KERNELS + BIASES, gelu_tanh)
    arrays, cotangent = example(ROWS, len(SIZES))
    expected = outputs_and_gradients(run, arrays, SIZES, cotangent, form)
    first = sum(SIZES)
    arrays[0][first:], cotangent[first:] = np.nan, np.inf
    actual = outputs_and_gradients(run, arrays, SIZES, cotangent, form)
    assert_plain(actual, expected, rtol=1e-6)
    np.testing.assert_array_equal(actual[0][first:], 0)
    np.testing.assert_array_equal(actual[1][first:], 0)


@each_form
def test_neighbours_do_not_mix(form):
    # A block reads beyond its rows, and the rows there may not be finite.
    run = named(grouped_mlp, KERNELS + BIASES, gelu_tanh)
    arrays, cotangent = example(ROWS, len(SIZES))
    arrays[0][75:78] = np.nan
    outputs, row_gradients, *weight_gradients = outputs_and_gradients(
        run, arrays, SIZES, cotangent, form
    )
    for x in (outputs, row_gradients):
        assert np.all(np.isfinite(np.delete(x, slice(75, 78), axis=0)))
    for x in weight_gradients:
        assert np.all(np.isfinite(np.delete(x, 2, axis=0)))


@pytest.mark.every_backend
def test_bfloat16():
    arrays, cotangent = example(ROWS, len(SIZES))
    # Small enough for a sum of a few products of 8 bits each.
    arrays = [0.3 * x for x in arrays]
    actual = outputs_and_gradients(
        named(grouped_mlp, KERNELS + BIASES, gelu_tanh),
        arrays,
        SIZES,
        cotangent,
        dtype="bfloat16",
    )
    arrays, cotangent = [rounded(x) for x in arrays], rounded(cotangent)
    expected = outputs_and_gradients(
        named(grouped_mlp_reference, KERNELS + BIASES, gelu_tanh),
        arrays,
        SIZES,
        cotangent,
        REFERENCE_FORM,
    )
    # From the same rounded inputs: hidden layer, activation and output are rounded to
    # 8 bits one after the other.
    assert_plain(actual, expected, rtol=2**-6)


@pytest.mark.every_backend
def test_nothing_to_do():
    for num_rows, sizes in ((0, (0, 0)), (3, (0, 0))):
        arrays, cotangent = example(num_rows, 2)
        actual = outputs_and_gradients(
            named(grouped_mlp, KERNELS + BIASES, gelu_tanh), arrays, sizes, cotangent
        )
        for x, like in zip(actual, (arrays[0], *arrays), strict=True):
            np.testing.assert_array_equal(x, np.zeros_like(like))


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "jax", reason="a kernel of JAX")
@pytest.mark.parametrize("kind", ["plain", "gated, no bias"])
def test_ragged_dot(kind):
    # Platforms other than CPUs take this kernel.
    import jax

    from keras_moe.ops.kernels import block_loops, grouped_jax

    names, activation = WEIGHTS[kind]
    (rows, *weights), cotangent = example(ROWS, len(SIZES), names)
    rows[sum(SIZES) :] = np.nan
    weights = dict.fromkeys(block_loops.Weights._fields) | dict(zip(names, weights))
    weights, sizes = block_loops.Weights(**weights), np.array(SIZES, "int32")

    def run(forward, backward, rows, sizes, weights, cotangent):
        outputs, kept = forward(rows, sizes, weights, activation, True)
        gradients = backward(rows, sizes, weights, activation, kept, cotangent)
        return [outputs, *jax.tree.leaves(gradients)]

    loops = functools.partial(block_loops.mlp_backward, vjp=jax.vjp)
    actual, expected = (
        jax.jit(functools.partial(run, *functions))(rows, sizes, weights, cotangent)
        for functions in (
            (grouped_jax.composed_forward, grouped_jax.composed_backward),
            (block_loops.mlp_forward, loops),
        )
    )
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "jax", reason="a program of JAX")
def test_a_symbolic_number_of_rows():
    import jax

    (rows, *weights), _ = example(7, 2)
    run = named(grouped_mlp, KERNELS + BIASES, gelu_tanh)
    (size,) = jax.export.symbolic_shape("r")
    specs = [
        jax.ShapeDtypeStruct((2,), "int32"),
        jax.ShapeDtypeStruct((size, D), "float32"),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights),
    ]
    sizes = np.array([3, 2], "int32")
    exported = jax.export.export(jax.jit(run))(*specs)
    actual = exported.call(sizes, rows, *weights)
    np.testing.assert_allclose(actual, run(sizes, rows, *weights), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(BACKEND != "torch", reason="two kernels of PyTorch")
@pytest.mark.parametrize("kind", ["plain", "gated, no bias"])
def test_matmuls_on_accelerators_and_in_graphs(kind):
    from keras_moe.ops.kernels import grouped_torch

    names, activation = WEIGHTS[kind]
    arrays, cotangent = example(ROWS, len(SIZES), names)
    arrays[0][sum(SIZES) :] = np.nan

    def run(function, sizes, rows, hidden, output, *rest):
        if kind == "plain":
            hidden_bias, bias = rest
            first = (hidden, hidden_bias)
        else:
            bias, first = None, (hidden, None, *rest, None)
        return function(activation, sizes, rows, output, bias, *first)

    actual, expected = (
        outputs_and_gradients(
            functools.partial(run, function), arrays, SIZES, cotangent
        )
        for function in (grouped_torch.mlp_with_matmuls, grouped_torch.mlp_with_loop)
    )
    assert_equal(actual, expected, names)


@pytest.mark.skipif(BACKEND != "torch", reason="a kernel of PyTorch")
def test_frozen_weights_and_no_gradient_on_pytorch():
    import torch

    arrays, cotangent = example(ROWS, len(SIZES))
    tensors = dict(zip(("rows", *KERNELS, *BIASES), map(torch.tensor, arrays)))
    sizes = torch.tensor(SIZES, dtype=torch.int32)
    trained = ("rows", "output_kernel", "hidden_bias")

    def run():
        return grouped_mlp(group_sizes=sizes, activation=gelu_tanh, **tensors)

    plain = run()
    assert plain.grad_fn is None
    _, *gradients = outputs_and_gradients(
        named(grouped_mlp, KERNELS + BIASES, gelu_tanh), arrays, SIZES, cotangent
    )
    expected = dict(zip(tensors, gradients))
    for name in trained:
        tensors[name].requires_grad_()
    outputs = run()
    np.testing.assert_allclose(outputs.detach(), plain, rtol=1e-6, atol=1e-6)
    outputs.backward(torch.tensor(cotangent))
    for name, tensor in tensors.items():
        if name in trained:
            np.testing.assert_allclose(
                tensor.grad, expected[name], rtol=1e-5, atol=1e-5, err_msg=name
            )
        else:
            assert tensor.grad is None


@pytest.mark.skipif(BACKEND != "torch", reason="loops elsewhere have one gradient")
@pytest.mark.parametrize("kind", ["plain", "gated, no bias"])
@pytest.mark.parametrize("sizes", [(3, 0, 1), (0, 0, 0)])
def test_gradients_of_gradients_on_pytorch(kind, sizes):
    import torch

    names, _ = WEIGHTS[kind]
    arrays, cotangent = example(6, 3, names)
    sizes = torch.tensor(sizes, dtype=torch.int32)

    def penalty(function):
        inputs = [torch.tensor(x).double().requires_grad_() for x in arrays]
        run = named(function, names, keras.activations.silu)
        # A residual connection, as in a model.
        outputs = (run(sizes, *inputs) + inputs[0]) * torch.tensor(cotangent)
        gradients = torch.autograd.grad((outputs**2).sum(), inputs, create_graph=True)
        total = sum((x**2).sum() for x in gradients)
        return torch.autograd.grad(total, inputs, materialize_grads=True)

    # The reference multiplies in float32.
    for x, y in zip(penalty(grouped_mlp), penalty(grouped_mlp_reference), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * max(y.abs().max(), 1))


@pytest.mark.skipif(BACKEND != "torch", reason="only there shapes are meta tensors")
def test_shape_inference():
    import torch

    from keras_moe.ops.kernels import block_loops, grouped_torch

    arrays, _ = example(6, 2)
    rows, hidden, output, *_ = (torch.tensor(x, device="meta") for x in arrays)
    sizes = torch.ones(2, dtype=torch.int32, device="meta")
    weights = block_loops.Weights(hidden, output, None, None, None, None)
    outputs = grouped_torch.grouped_mlp(rows, sizes, weights, gelu_tanh)
    assert outputs.is_meta
    assert outputs.shape == (6, D)


@pytest.mark.skipif(BACKEND != "torch", reason="a kernel of PyTorch")
@pytest.mark.parametrize("kind", WEIGHTS)
def test_few_rows_without_a_gradient_on_pytorch(kind):
    """One expert has no rows, and the last rows have no expert."""
    import torch

    names, activation = WEIGHTS[kind]
    (rows, *weights), _ = example(12, 4, names)
    rows[9:] = np.nan
    weights = dict(zip(names, map(torch.tensor, weights)))
    sizes = torch.tensor([4, 0, 3, 2])
    with torch.no_grad():
        actual, expected = (
            function(torch.tensor(rows), sizes, activation=activation, **weights)
            for function in (grouped_mlp, grouped_mlp_reference)
        )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
