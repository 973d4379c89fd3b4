"""Ops on rows by expert, and their gradients, in every form of a program."""

import functools
import re
from collections.abc import Callable, Sequence

import keras
import numpy as np

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


def outputs_and_gradients(
    function: Callable,
    arrays: Sequence[np.ndarray],
    sizes: Sequence[int],
    cotangent: np.ndarray,
    form: str = FORMS[0],
    dtype: str = "float32",
) -> list[np.ndarray]:
    """A function's outputs and its gradients in all of its float arguments.

    Args:
        function: function of `sizes` and of `arrays`, the first of which are rows.
        arrays: float arrays.
        sizes: number of rows of each expert.
        cotangent: gradient in the outputs.
        form: one of `FORMS`; `"unknown"` is one program for any number of rows.
        dtype: dtype in which the function gets the arrays.
    """
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
    """The number of arguments that XLA on TensorFlow takes as constants.

    Args:
        function: function of `sizes` and of `arrays`, the first of which are rows.
        arrays: float arrays.
        sizes: number of rows of each expert.
        cotangent: gradient in the outputs.
        form: one of the compiled forms.
    """
    program, inputs = _program_and_inputs(
        function, arrays, sizes, cotangent, form, "float32"
    )
    return len(inputs) - len(compiled_arguments(program, *inputs))


def compiled_arguments(program: Callable, *inputs) -> list[str]:
    """The types of all that a compiled function of TensorFlow takes as an argument.

    An input or a variable that is missing here is a constant of XLA's program, which is
    compiled again for each of its values.

    Args:
        program: a `tf.function` with `jit_compile=True`.
        *inputs: tensors.
    """
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
    return tf.function(
        run,
        input_signature=unknown if "unknown" in form else None,
        jit_compile="compiled" in form,
    )


def _torch(function, form, dtype, shapes):
    import torch

    def run(sizes, cotangent, *arrays):
        arrays = [x.detach().requires_grad_() for x in arrays]
        outputs = function(sizes, *arrays)
        return outputs.detach(), *torch.autograd.grad(outputs, arrays, cotangent)

    return run
