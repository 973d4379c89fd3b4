"""Grouped matmuls and MLPs: the kernels of every backend against the references."""

import functools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.layers import gelu_tanh
from keras_moe.layers.activations import entmax15
from keras_moe.ops import grouped
from tests.compare import assert_close, assert_same
from tests.forks import run_python
from tests.ops import grouped_reference
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

EQUAL_SIZES = (26, 26, 26, 26, 26)
KERNELS = ("hidden_kernel", "output_kernel")
BIASES = ("hidden_bias", "output_bias")
GATE = ("gate_kernel", "gate_bias")
# The names of the weights, and the activation of an MLP. One has a gradient of its own,
# and reads a whole row.
WEIGHTS = {
    "matmul": (("kernels",), None),
    "mlp": (KERNELS + BIASES, gelu_tanh),
    "gated": (KERNELS + BIASES + GATE, keras.activations.silu),
    "no bias": (KERNELS, entmax15),
    "gated, no bias": ((*KERNELS, "gate_kernel"), keras.activations.relu),
}
SHAPES = {
    "kernels": (D, H), "hidden_kernel": (D, H), "output_kernel": (H, D),
    "hidden_bias": (H,), "output_bias": (D,), "gate_kernel": (D, H), "gate_bias": (H,),
}  # fmt: skip
each_op = pytest.mark.parametrize("kind", ["matmul", "mlp"])
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="a kernel of JAX")
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA on TensorFlow")
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="a kernel of PyTorch")


def example(num_rows, num_experts, kind="mlp"):
    """Rows and weights, and the gradient in the outputs."""
    names, _ = WEIGHTS[kind]
    weights = [normal(i, num_experts, *SHAPES[name]) for i, name in enumerate(names)]
    width = H if kind == "matmul" else D
    return [normal(10, num_rows, D), *weights], normal(11, num_rows, width)


@functools.cache
def named(function, kind="mlp", activation=None):
    """`function` of sizes, rows and weights in the order of their names."""
    names, own = WEIGHTS[kind]
    options = {"activation": activation or own} if own else {}

    def run(sizes, rows, *weights):
        weights = dict(zip(names, weights, strict=True))
        return function(rows=rows, group_sizes=sizes, **weights, **options)

    return run


def op(kind="mlp"):
    function = grouped.grouped_matmul if kind == "matmul" else grouped.grouped_mlp
    return named(function, kind)


def reference(kind, arrays, sizes, cotangent):
    name = "grouped_matmul" if kind == "matmul" else "grouped_mlp"
    function = named(getattr(grouped_reference, name), kind)
    return outputs_and_gradients(function, arrays, sizes, cotangent, REFERENCE_FORM)


def check(kind, arrays, sizes, cotangent, form=FORMS[0]):
    """Outputs and gradients are the reference's; returns them."""
    actual = outputs_and_gradients(op(kind), arrays, sizes, cotangent, form)
    names, _ = WEIGHTS[kind]
    assert_equal(actual, reference(kind, arrays, sizes, cotangent), names)
    return actual


@pytest.mark.every_backend
@each_form
@pytest.mark.parametrize(
    ("kind", "sizes"), [("matmul", SIZES), ("matmul", EQUAL_SIZES), ("mlp", SIZES)]
)
def test_parity(form, kind, sizes):
    arrays, cotangent = example(ROWS, len(sizes), kind)
    outputs, rows, kernel, *_ = check(kind, arrays, sizes, cotangent, form)
    empty = [index for index, size in enumerate(sizes) if not size]
    for zeros in outputs[sum(sizes) :], rows[sum(sizes) :], kernel[empty]:
        assert_same(zeros, np.zeros_like(zeros))


@pytest.mark.every_backend
@pytest.mark.parametrize("kind", list(WEIGHTS)[2:])
def test_other_weights(kind):
    arrays, cotangent = example(40, 3, kind)
    form = "eager" if "eager" in FORMS and kind == "gated" else FORMS[0]
    check(kind, arrays, (30, 0, 6), cotangent, form)


@each_op
@pytest.mark.parametrize(
    ("num_rows", "num_experts"), [(50, 3), (1, 1), (1, 3), (40, 1), (5, 9)]
)
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_group_sizes(kind, num_rows, num_experts, data):
    sizes = data.draw(group_sizes(num_rows, num_experts))
    arrays, cotangent = example(num_rows, num_experts, kind)
    # Quicker to trace than to compile, with the same code.
    form = "graph" if "graph" in FORMS else FORMS[0]
    check(kind, arrays, sizes, cotangent, form)


@pytest.mark.every_backend
@on_tensorflow
@each_op
@pytest.mark.parametrize("num_rows", [0, 3, 1100])
def test_rows_unknown_while_tracing(kind, num_rows):
    # Fewer rows than the smallest block, and more than the largest, in one program.
    arrays, cotangent = example(num_rows, len(SIZES), kind)
    sizes = (0, num_rows // 2, 0, num_rows // 3, 0)
    check(kind, arrays, sizes, cotangent, "unknown")


@pytest.mark.every_backend
@on_tensorflow
@each_op
@pytest.mark.parametrize("form", [form for form in FORMS if "compiled" in form])
def test_one_program_for_all_values(kind, form):
    arrays, cotangent = example(ROWS, len(SIZES), kind)
    assert constants(op(kind), arrays, SIZES, cotangent, form) == 0


@pytest.mark.every_backend
@on_tensorflow
@pytest.mark.parametrize("kind", ["mlp", "gated"])
def test_gradients_of_a_program_traced_without_them(kind):
    import tensorflow as tf

    arrays, cotangent = example(ROWS, len(SIZES), kind)
    program = tf.function(op(kind), jit_compile=True)
    inputs = [tf.constant(SIZES), *map(tf.constant, arrays)]
    text = program.experimental_get_compiler_ir(*inputs)(stage="hlo")
    assert f"[{ROWS},{D}]" in text
    assert f"[{ROWS},{H}]" not in text
    program(*inputs)
    with tf.GradientTape() as tape:
        tape.watch(inputs[1:])
        outputs = program(*inputs)
    actual = outputs, *tape.gradient(outputs, inputs[1:], cotangent)
    expected = outputs_and_gradients(op(kind), arrays, SIZES, cotangent, "eager")
    assert_equal(actual, expected, WEIGHTS[kind][0])


@each_form
@each_op
def test_rows_of_nobody_are_never_read(form, kind):
    arrays, cotangent = example(ROWS, len(SIZES), kind)
    expected = outputs_and_gradients(op(kind), arrays, SIZES, cotangent, form)
    first = sum(SIZES)
    arrays[0][first:], cotangent[first:] = np.nan, np.inf
    actual = outputs_and_gradients(op(kind), arrays, SIZES, cotangent, form)
    assert_equal(actual, expected, WEIGHTS[kind][0], rtol=1e-6)
    assert_same(actual[0][first:], 0)
    assert_same(actual[1][first:], 0)


@each_form
@each_op
def test_neighbours_do_not_mix(form, kind):
    # A block reads beyond its rows, and the rows there may not be finite.
    arrays, cotangent = example(ROWS, len(SIZES), kind)
    arrays[0][75:78] = np.nan
    outputs, row_gradients, *weight_gradients = outputs_and_gradients(
        op(kind), arrays, SIZES, cotangent, form
    )
    for x in (outputs, row_gradients):
        assert np.all(np.isfinite(np.delete(x, slice(75, 78), axis=0)))
    # Those of a matmul have only the kernels in them.
    assert kind == "mlp" or np.all(np.isfinite(row_gradients))
    for x in weight_gradients:
        assert np.all(np.isfinite(np.delete(x, 2, axis=0)))


@pytest.mark.every_backend
@pytest.mark.parametrize(("kind", "scale", "rtol"), [
    # From the same rounded inputs: a result has 8 bits, and TensorFlow's has been
    # rounded once for each block of rows before they are added.
    ("matmul", 1.0, 2**-7),
    # Small enough for a sum of a few products of 8 bits each. Hidden layer,
    # activation and output are rounded to 8 bits one after the other.
    ("mlp", 0.3, 2**-6),
])  # fmt: skip
def test_bfloat16(kind, scale, rtol):
    arrays, cotangent = example(ROWS, len(SIZES), kind)
    arrays = [np.float32(scale) * x for x in arrays]
    actual = outputs_and_gradients(op(kind), arrays, SIZES, cotangent, dtype="bfloat16")
    arrays, cotangent = [rounded(x) for x in arrays], rounded(cotangent)
    expected = reference(kind, arrays, SIZES, cotangent)
    assert_equal(actual, expected, WEIGHTS[kind][0], rtol=rtol)


def other_matmuls(name):
    """The grouped matmuls of TPUs, or those of GPUs as Pallas interprets them."""
    from keras_moe.ops.kernels import _grouped_jax, _grouped_pallas

    if name == "ragged_dot":
        return _grouped_jax.RAGGED
    matmuls = _grouped_pallas.forward, _grouped_pallas.backward
    return [functools.partial(function, interpret=True) for function in matmuls]


each_other_platform = pytest.mark.parametrize("name", ["ragged_dot", "pallas"])


@pytest.mark.every_backend
@on_jax
@each_other_platform
@pytest.mark.parametrize("kind", ["mlp", "gated, no bias"])
def test_mlps_of_other_platforms(name, kind):
    import jax

    from keras_moe.ops.kernels import _block_loops, _grouped_jax

    names, activation = WEIGHTS[kind]
    (rows, *weights), cotangent = example(ROWS, len(SIZES), kind)
    rows[sum(SIZES) :] = cotangent[sum(SIZES) :] = np.nan
    weights = dict.fromkeys(_block_loops.Weights._fields) | dict(zip(names, weights))
    weights, sizes = _block_loops.Weights(**weights), np.array(SIZES, "int32")

    def run(forward, backward, rows, sizes, weights, cotangent):
        outputs, kept = forward(rows, sizes, weights, activation, True)
        gradients = backward(rows, sizes, weights, kept, cotangent, activation)
        return [outputs, *jax.tree.leaves(gradients)]

    loops = functools.partial(_block_loops.mlp_backward, vjp=jax.vjp)
    composed = _grouped_jax.composed_forward, _grouped_jax.composed_backward
    matmuls = other_matmuls(name)
    actual, expected = (
        jax.jit(functools.partial(run, *functions))(rows, sizes, weights, cotangent)
        for functions in (
            [functools.partial(function, matmuls=matmuls) for function in composed],
            (_block_loops.mlp_forward, loops),
        )
    )
    assert_close(actual, expected, 1e-4, 1e-4)


@pytest.mark.every_backend
@on_jax
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_the_gpu_kernel(dtype):
    # Several blocks of rows, of columns and of what is summed, none of them full.
    forward, backward = other_matmuls("pallas")
    sizes, num_rows, dim, width = (150, 0, 128, 5), 300, 136, 260
    rows, kernels = normal(0, num_rows, dim), normal(1, len(sizes), dim, width)
    cotangent, owned = normal(2, num_rows, width), sum(sizes)
    rows, kernels, cotangent = (
        keras.ops.cast(rounded(x), dtype) for x in (rows, kernels, cotangent)
    )
    # Neither rows of nobody nor those of other experts are read.
    rows = rows.at[owned:].set(np.nan).at[40].set(np.nan)
    cotangent = cotangent.at[owned:].set(np.inf).at[41].set(np.nan)
    group_sizes = np.array(sizes, "int32")
    actual = [forward(rows, kernels, group_sizes)]
    actual += backward(rows, kernels, group_sizes, cotangent)
    assert {str(x.dtype) for x in actual} == {dtype}
    outputs, row_gradients, kernel_gradients = map(
        keras.ops.convert_to_numpy, (keras.ops.cast(x, "float32") for x in actual)
    )
    x, w, dy = (
        np.array(keras.ops.cast(x, "float32")) for x in (rows, kernels, cotangent)
    )
    rtol = 2**-8 if dtype == "bfloat16" else 1e-5
    start = 0
    for expert, size in enumerate(sizes):
        own = slice(start, start + size)
        start += size
        for result, expected in (
            (outputs[own], x[own] @ w[expert]),
            (row_gradients[own], dy[own] @ w[expert].T),
            (kernel_gradients[expert], x[own].T @ dy[own]),
        ):
            assert_same(np.isnan(result), np.isnan(expected))
            result, expected = np.nan_to_num(result), np.nan_to_num(expected)
            assert_close(result, expected, rtol, 100 * rtol)
    assert_same(outputs[owned:], 0)
    assert_same(row_gradients[owned:], 0)


@pytest.mark.every_backend
@on_jax
def test_the_gpu_kernel_compiles_without_a_gpu():
    pytest.importorskip("jax_cuda13_plugin", reason="needs JAX's CUDA plugin")
    completed = run_python("-m", "tests.ops.grouped_on_h200", KERAS_BACKEND="jax")
    assert completed.returncode == 0, completed.stderr[-3000:]
    dropless, rows = map(int, completed.stdout.split()[-2:])
    # XLA's own form has all rows for each of the eight experts.
    assert dropless < 4 * rows


@pytest.mark.every_backend
@on_jax
@pytest.mark.parametrize("kind", ["matmul", "no bias"])
def test_forward_over_reverse_mode(kind):
    import jax

    arrays, cotangent = example(6, 3, kind)

    def gradients(function):
        def loss(inputs):
            outputs = named(function, kind, keras.activations.silu)((3, 0, 2), *inputs)
            return keras.ops.sum(outputs**2 * cotangent)

        return jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1])(arrays)

    name = "grouped_matmul" if kind == "matmul" else "grouped_mlp"
    functions = [getattr(module, name) for module in (grouped, grouped_reference)]
    assert_close(*map(gradients, functions), 1e-4, 1e-3)


@pytest.mark.every_backend
@on_jax
def test_ragged_matmuls_for_each_of_a_batch():
    import jax

    from keras_moe._backends.jax import traced_for

    (rows, *weights), _ = example(6, 3, "matmul")
    sizes = np.array([[3, 0, 2], [0, 6, 0]], "int32")

    def gradients(rows, sizes):
        def loss(rows, *weights):
            return keras.ops.sum(grouped.grouped_matmul(rows, *weights, sizes) ** 2)

        return jax.grad(loss, (0, 1))(rows, *weights)

    with traced_for("tpu"):
        together = jax.jit(jax.vmap(gradients, (None, 0)))(rows, sizes)
    for i, own in enumerate(sizes):
        for actual, expected in zip(together, gradients(rows, own)):
            assert_close(actual[i], expected, 1e-4, 1e-4)


@on_torch
@pytest.mark.parametrize("kind", ["mlp", "gated, no bias"])
def test_matmuls_on_accelerators_and_in_graphs(kind):
    from keras_moe.ops.kernels import _grouped_torch

    names, activation = WEIGHTS[kind]
    arrays, cotangent = example(ROWS, len(SIZES), kind)
    arrays[0][sum(SIZES) :] = np.nan

    def run(function, sizes, rows, hidden, output, *rest):
        if kind == "mlp":
            hidden_bias, bias = rest
            first = (hidden, hidden_bias)
        else:
            bias, first = None, (hidden, None, *rest, None)
        return function(activation, sizes, rows, output, bias, *first)

    actual, expected = (
        outputs_and_gradients(
            functools.partial(run, function), arrays, SIZES, cotangent
        )
        for function in (_grouped_torch.mlp_with_matmuls, _grouped_torch.mlp_with_loop)
    )
    assert_equal(actual, expected, names)


@on_torch
@pytest.mark.parametrize(("dtype", "capability", "is_used"), [
    ("bfloat16", (9, 0), True),
    ("bfloat16", (7, 5), False),
    ("float16", (9, 0), False),
    ("float32", (9, 0), False),
])  # fmt: skip
def test_the_kernel_of_gpus_without_a_gpu(monkeypatch, dtype, capability, is_used):
    """The products of both passes, as CUDA's kernel checks shapes and layouts."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from keras_moe.ops.kernels import _grouped_torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    # Fake tensors have no address.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    options = {"device": "cuda", "dtype": getattr(torch, dtype)}
    with FakeTensorMode():
        rows, cotangent = (torch.empty(ROWS, size, **options) for size in (D, H))
        kernels = torch.empty(len(SIZES), D, H, **options)
        assert _grouped_torch.kernel_is_valid(rows, kernels) == is_used
        if not is_used:
            return
        ends = torch.empty(len(SIZES), dtype=torch.int32, device="cuda")
        for x, y, shape in (
            (rows, kernels, cotangent.shape),
            (cotangent, kernels.mT, rows.shape),
            (rows.mT, cotangent, kernels.shape),
        ):
            product = torch.nn.functional.grouped_mm(x, y, offs=ends)
            assert (product.shape, product.dtype) == (shape, rows.dtype)


@on_torch
def test_frozen_weights_and_no_gradient_on_pytorch():
    import torch

    arrays, cotangent = example(ROWS, len(SIZES))
    tensors = dict(zip(("rows", *KERNELS, *BIASES), map(torch.tensor, arrays)))
    sizes = torch.tensor(SIZES, dtype=torch.int32)
    trained = ("rows", "output_kernel", "hidden_bias")

    def run():
        return grouped.grouped_mlp(group_sizes=sizes, activation=gelu_tanh, **tensors)

    plain = run()
    assert plain.grad_fn is None
    _, *gradients = outputs_and_gradients(op(), arrays, SIZES, cotangent)
    expected = dict(zip(tensors, gradients))
    for name in trained:
        tensors[name].requires_grad_()
    outputs = run()
    assert_close(outputs.detach(), plain, 1e-6, 1e-6)
    outputs.backward(torch.tensor(cotangent))
    for name, tensor in tensors.items():
        if name in trained:
            assert_close(tensor.grad, expected[name], 1e-5, 1e-5, err_msg=name)
        else:
            assert tensor.grad is None


@on_torch
@pytest.mark.parametrize("kind", ["mlp", "gated, no bias"])
@pytest.mark.parametrize("sizes", [(3, 0, 1), (0, 0, 0)])
def test_gradients_of_gradients_on_pytorch(kind, sizes):
    import torch

    arrays, cotangent = example(6, 3, kind)
    sizes = torch.tensor(sizes, dtype=torch.int32)

    def penalty(function):
        inputs = [torch.tensor(x).double().requires_grad_() for x in arrays]
        run = named(function, kind, keras.activations.silu)
        # A residual connection, as in a model.
        outputs = (run(sizes, *inputs) + inputs[0]) * torch.tensor(cotangent)
        gradients = torch.autograd.grad((outputs**2).sum(), inputs, create_graph=True)
        total = sum((x**2).sum() for x in gradients)
        return torch.autograd.grad(total, inputs, materialize_grads=True)

    # The reference multiplies in float32.
    functions = grouped.grouped_mlp, grouped_reference.grouped_mlp
    for x, y in zip(*map(penalty, functions), strict=True):
        assert_close(x, y, 1e-4, 1e-4 * max(y.abs().max(), 1))


@on_torch
@pytest.mark.parametrize("kind", list(WEIGHTS)[1:])
def test_few_rows_without_a_gradient_on_pytorch(kind):
    """One expert has no rows, and the last rows have no expert."""
    import torch

    arrays, _ = example(12, 4, kind)
    arrays[0][9:] = np.nan
    tensors = torch.tensor([4, 0, 3, 2]), *map(torch.tensor, arrays)
    with torch.no_grad():
        actual, expected = (
            named(function, kind)(*tensors)
            for function in (grouped.grouped_mlp, grouped_reference.grouped_mlp)
        )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.every_backend
@on_torch
def test_cotangents_and_inputs_of_any_layout():
    import torch

    arrays, cotangent = example(7, 2, "matmul")
    tensors, sizes = [*map(torch.tensor, arrays)], (3, 4)
    expected = reference("matmul", arrays, sizes, cotangent)
    for layout in (
        lambda x: x.mT.contiguous().mT,
        # A copy that does not begin at a multiple of 16 bytes.
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    ):
        copies, gradient = map(layout, tensors), layout(torch.tensor(cotangent))
        actual = outputs_and_gradients(op("matmul"), [*copies], sizes, gradient)
        assert_equal(actual, expected, ["kernels"])
    ones = torch.ones(()).expand(7, H)
    actual = outputs_and_gradients(op("matmul"), tensors, sizes, ones)
    assert np.all(np.isfinite(actual[1]))


def test_an_odd_width():
    # PyTorch's kernel takes multiples of 16 bytes only.
    rows, kernels = normal(0, 6, 3), normal(1, 2, 3, 5)
    outputs = grouped.grouped_matmul(rows, kernels, np.array([2, 4], "int32"))
    expected = np.concatenate([rows[:2] @ kernels[0], rows[2:] @ kernels[1]])
    assert_close(outputs, expected, 1e-5, 1e-6)
