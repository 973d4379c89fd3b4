"""Gathers and weighted sums of rows against NumPy and against each other."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.ops import _rows
from tests.compare import assert_close, assert_same
from tests.gradients import gradient_and_outputs
from tests.ops.programs import BACKEND, normal, rounded

# Each with its reference, which is the same function on other backends.
FORMS = ("", "_reference") if BACKEND == "torch" else ("",)
each_form = pytest.mark.parametrize("form", FORMS)
D = 5


def plan(num_tokens, num_choices, num_rows, kept):
    """The row of each choice, and the token of each row; -1 for none."""
    generator = np.random.default_rng(0)
    rows = generator.permutation(num_rows)[: num_tokens * num_choices]
    rows = rows.reshape(num_tokens, num_choices)
    rows[generator.random(rows.shape) >= kept] = -1
    tokens = np.full(num_rows, -1)
    token, _ = np.nonzero(rows >= 0)
    tokens[rows[rows >= 0]] = token
    return rows.astype("int32"), tokens.astype("int32")


def results(form, plan, tokens, outputs, weights, dtype="float32"):
    """The rows, the sums, and the gradients in the three arrays."""
    rows, row_tokens = (ops.convert_to_tensor(x) for x in plan)
    to_rows, to_tokens = normal(6, *outputs.shape), normal(7, *tokens.shape)

    def run(tokens, outputs, weights):
        taken = getattr(_rows, f"gather_rows{form}")(
            ops.cast(tokens, dtype), row_tokens, rows
        )
        total = getattr(_rows, f"combine_rows{form}")(
            ops.cast(outputs, dtype), weights, rows, row_tokens
        )
        names = [keras.backend.standardize_dtype(x.dtype) for x in (taken, total)]
        assert names == [dtype, "float32"]
        taken = ops.cast(taken, "float32")
        loss = ops.sum(ops.multiply(taken, to_rows))
        loss = loss + ops.sum(ops.multiply(total, to_tokens))
        return loss, [ops.stop_gradient(x) for x in (taken, total)]

    gradients, moved = gradient_and_outputs(run, tokens, outputs, weights)
    return [*moved, *gradients]


def expected(plan, tokens, outputs, weights):
    rows, row_tokens = plan
    to_rows, to_tokens = normal(6, *outputs.shape), normal(7, *tokens.shape)
    taken, total = np.zeros_like(outputs), np.zeros_like(tokens)
    gradients = [np.zeros_like(x) for x in (tokens, outputs, weights)]
    for row, token in enumerate(row_tokens):
        if token >= 0:
            taken[row] = tokens[token]
    for token, choice in np.argwhere(rows >= 0):
        row = rows[token, choice]
        total[token] += weights[token, choice] * outputs[row]
        gradients[0][token] += to_rows[row]
        gradients[1][row] = weights[token, choice] * to_tokens[token]
        gradients[2][token, choice] = outputs[row] @ to_tokens[token]
    return [taken, total, *gradients]


@pytest.mark.every_backend
@each_form
@pytest.mark.parametrize(
    ("num_tokens", "num_choices", "num_rows", "kept"),
    [(6, 2, 12, 1.0), (6, 3, 20, 0.5), (4, 1, 4, 0.0), (0, 2, 3, 1.0), (1, 1, 1, 1.0)],
)
def test_outputs_and_gradients(form, num_tokens, num_choices, num_rows, kept):
    indices = plan(num_tokens, num_choices, num_rows, kept)
    tokens, outputs = normal(1, num_tokens, D), normal(2, num_rows, D)
    arrays = tokens, outputs, normal(3, num_tokens, num_choices)
    assert_close(
        results(form, indices, *arrays), expected(indices, *arrays), 1e-5, 1e-6
    )


@each_form
def test_rows_of_nobody_are_never_read(form):
    indices = plan(6, 3, 20, 0.5)
    tokens, outputs, weights = normal(1, 6, D), normal(2, 20, D), normal(3, 6, 3)
    answer = results(form, indices, tokens, outputs, weights)
    outputs[indices[1] < 0] = np.nan
    assert_same(results(form, indices, tokens, outputs, weights), answer)


@each_form
def test_half_precision_is_summed_in_float32(form):
    indices = plan(4, 3, 12, 1.0)
    arrays = rounded(normal(1, 4, D)), rounded(normal(2, 12, D)), normal(3, 4, 3)
    answer = expected(indices, *arrays)
    actual = results(form, indices, *arrays, dtype="bfloat16")
    for number in (0, 1, 4):
        assert_close(actual[number], answer[number], 1e-5, 1e-6)
    # Gradients have the 8 bits of the arrays.
    for number in (2, 3):
        assert_close(actual[number], answer[number], 2**-7, 2**-7)


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND == "jax", reason="float64 takes an option of JAX's")
@each_form
def test_double_precision_is_summed_in_float32(form):
    indices = plan(4, 3, 20, 0.5)
    arrays = normal(1, 4, D), normal(2, 20, D), normal(3, 4, 3)
    actual = results(form, indices, *arrays, dtype="float64")
    assert_close(actual, expected(indices, *arrays), 1e-5, 1e-6)


@pytest.mark.skipif(BACKEND != "torch", reason="a kernel of PyTorch")
def test_gradients_have_gradients_on_pytorch():
    import torch

    rows, tokens = (torch.tensor(x) for x in plan(4, 3, 20, 0.5))

    def penalty(form):
        shapes = (4, D), (20, D), (4, 3)
        inputs = [
            torch.tensor(normal(i, *shape), requires_grad=True)
            for i, shape in enumerate(shapes)
        ]
        table, outputs, weights = inputs
        take = getattr(_rows, f"gather_rows{form}")
        add = getattr(_rows, f"combine_rows{form}")
        total = add(outputs * take(table, tokens, rows), weights, rows, tokens)
        gradients = torch.autograd.grad((total**2).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum((x**2).sum() for x in gradients), inputs)

    assert_close(penalty(""), penalty("_reference"), 1e-4, 1e-4)
