"""Ops on rows by expert, and their gradients, in every form of a program."""

import functools
import re
from collections.abc import Callable, Sequence

import keras
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.compare import assert_close

BACKEND = keras.backend.backend()
# How a program may run a function: as its backend's training loop does, and the
# other ways that have code of their own.
FORMS = {
    "jax": ("compiled", "eager"),
    "tensorflow": ("compiled", "eager", "graph", "unknown", "compiled_unknown"),
    "torch": ("eager",),
}[BACKEND]
# The form in which a reference of plain operations is quick.
REFERENCE_FORM = "compiled" if BACKEND == "jax" else "eager"
each_form = pytest.mark.parametrize("form", FORMS)

# The size of rows and of hidden layers.
D, H = 8, 16
# Two experts with several blocks, one with none, and rows of nobody.
SIZES, ROWS = (75, 0, 3, 47, 1), 130


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


@st.composite
def group_sizes(draw, num_rows, num_experts):
    """Sizes that add up to the number of rows or less; zeros are frequent."""
    total = draw(st.one_of(st.just(num_rows), st.integers(0, num_rows)))
    cuts = st.one_of(st.integers(0, total), st.sampled_from([0, total]))
    ends = sorted(draw(cuts) for _ in range(num_experts - 1))
    return tuple(np.diff([0, *ends, total]).tolist())


def assert_equal(actual, expected, names, rtol=1e-5):
    """Outputs and gradients are as expected, relative to the largest of each."""
    for name, x, y in zip(("outputs", "rows", *names), actual, expected, strict=True):
        # A sum of many terms may be much smaller than they are.
        atol = rtol * max(np.abs(y).max(initial=0), 1)
        assert_close(x, y, rtol, atol, err_msg=name)


def rounded(x):
    """The float32 array as bfloat16 holds it."""
    return keras.ops.convert_to_numpy(
        keras.ops.cast(keras.ops.cast(x, "bfloat16"), "float32")
    )


def outputs_and_gradients(
    function: Callable,
    arrays: Sequence[np.ndarray],
    sizes: Sequence[int],
    cotangent: np.ndarray,
    form: str = FORMS[0],
    dtype: str = "float32",
) -> list[np.ndarray]:
    """Outputs of a function of sizes and rows, and its gradients in all arrays."""
    program, inputs = _program_and_inputs(
        function, arrays, sizes, cotangent, form, dtype
    )
    actual = program(*inputs)
    dtypes = [keras.backend.standardize_dtype(x.dtype) for x in actual]
    assert dtypes == [dtype] * len(dtypes)
    return [keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")) for x in actual]


def constants(
    function: Callable,
    arrays: Sequence[np.ndarray],
    sizes: Sequence[int],
    cotangent: np.ndarray,
    form: str,
) -> int:
    """The number of arguments that XLA on TensorFlow takes as constants."""
    program, inputs = _program_and_inputs(
        function, arrays, sizes, cotangent, form, "float32"
    )
    return len(inputs) - len(compiled_arguments(program, *inputs))


def compiled_arguments(program: Callable, *inputs) -> list[str]:
    """The types of what a program of TensorFlow does not take as a constant."""
    text = program.experimental_get_compiler_ir(*inputs)(stage="hlo")
    entry = text[text.index("\nENTRY ") :]
    return re.findall(r"= (\w+\[[\d,]*\])\S* parameter\(", entry)


def _program_and_inputs(function, arrays, sizes, cotangent, form, dtype):
    arrays = [keras.ops.cast(x, dtype) for x in arrays]
    cotangent = keras.ops.cast(cotangent, dtype)
    sizes = keras.ops.convert_to_tensor(np.array(sizes, "int32"))
    shapes = tuple(tuple(x.shape) for x in (*arrays[1:], cotangent))
    return _program(function, form, dtype, shapes), (sizes, cotangent, *arrays)


@functools.cache
def _program(function, form, dtype, shapes):
    return {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}[BACKEND](
        function, form, dtype, shapes
    )


def _jax(function, form, dtype, shapes):
    import jax

    def run(sizes, cotangent, *arrays):
        outputs, pullback = jax.vjp(functools.partial(function, sizes), *arrays)
        return outputs, *pullback(cotangent)

    return jax.jit(run) if form == "compiled" else run


def _tensorflow(function, form, dtype, shapes):
    import tensorflow as tf

    def run(sizes, cotangent, *arrays):
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            outputs = function(sizes, *arrays)
        return outputs, *tape.gradient(outputs, arrays, cotangent)

    if form == "eager":
        return run
    *shapes, (_, width) = shapes
    (_, dim, _), *_ = shapes
    unknown = [
        tf.TensorSpec((shapes[0][0],), "int32"),
        tf.TensorSpec((None, width), dtype),
        tf.TensorSpec((None, dim), dtype),
        *(tf.TensorSpec(shape, dtype) for shape in shapes),
    ]
    signature = unknown if "unknown" in form else None
    return tf.function(run, input_signature=signature, jit_compile="compiled" in form)


def _torch(function, form, dtype, shapes):
    import torch

    def run(sizes, cotangent, *arrays):
        arrays = [x.detach().requires_grad_() for x in arrays]
        outputs = function(sizes, *arrays)
        return outputs.detach(), *torch.autograd.grad(outputs, arrays, cotangent)

    return run
