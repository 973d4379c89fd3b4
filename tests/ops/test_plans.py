"""Dispatch and combine: golden data, both forms, precision, and what is never read."""

import keras
import numpy as np
import pytest

from keras_moe.ops import expert_choice, token_choice
from tests import golden
from tests.compare import assert_close, assert_same
from tests.gradients import gradient_and_outputs, one_program
from tests.ops.programs import normal


def _pair(form):
    return (
        one_program(lambda tokens, plan: form(plan).dispatch(tokens)),
        one_program(lambda outputs, plan: form(plan).combine(outputs)),
    )


FORMS = {"gather": _pair(lambda plan: plan), "einsum": _pair(lambda plan: plan.dense())}
GOLDEN = [
    *golden.cases("01_token_choice/k*"),
    *golden.cases("01_token_choice/groups*"),
    *golden.cases("02_expert_choice/*"),
]
each_form = pytest.mark.parametrize("form", FORMS)


def random_plan(selected=2, capacity=2, **options):
    """A plan for 2 groups of 7 tokens and 4 experts."""
    logits = normal(5, 2, 7, 4)
    gates = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return token_choice(gates, gates, selected, capacity, **options)


def to_numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


@pytest.mark.every_backend
@pytest.mark.parametrize(("case", "form"), [
    *((case, "gather") for case in GOLDEN),
    ("01_token_choice/k2_bpr_cap4", "einsum"),
    ("01_token_choice/groups_G3_not_multiple_of_E", "einsum"),
    *((case, "einsum") for case in GOLDEN if case.startswith("02")),
])  # fmt: skip
def test_golden_layer(case, form):
    """Masks exactly, and a whole layer with its gradients."""
    arrays, config = golden.load(case)
    batch = (lambda x: x[None]) if config["G"] is None else (lambda x: x)
    gates, x = batch(arrays["inputs/gates"]), batch(arrays["inputs/x"])
    kernel, bias = arrays["inputs/expert_kernel"], arrays["inputs/expert_bias"]
    cotangent = keras.ops.convert_to_tensor(batch(arrays["inputs/cotangent"]))
    to_slots, to_tokens = FORMS[form]

    def route(gates):
        if case.startswith("02"):
            return expert_choice(gates, gates, int(arrays["outputs/capacity"]))
        affinity, capacity = keras.ops.stop_gradient(gates), config["actual_capacity"]
        priority = "max_gate" if config["batch_priority"] else "first_come"
        return token_choice(affinity, gates, config["K"], capacity, priority)

    def layer(gates, x, kernel, bias):
        plan = route(gates)
        buffers = to_slots(x, plan)
        # An expert with a bias puts it into empty slots too; nobody reads it there.
        outputs = keras.ops.matmul(buffers, kernel) + bias[:, None]
        combined = to_tokens(outputs, plan)
        mask, weights = plan.dense()
        mask = keras.ops.cast(mask, "int32")
        return keras.ops.sum(combined * cotangent), (mask, weights, buffers, combined)

    gradients, (mask, *outputs) = gradient_and_outputs(layer, gates, x, kernel, bias)
    assert_same(mask > 0, batch(arrays["outputs/dispatch_mask"]))
    for name, mine in zip(("combine_weights", "buffers", "combined"), outputs):
        expected = batch(arrays[f"outputs/{name}"])
        assert_close(mine, expected, 1e-5, 1e-6, err_msg=name)
    for name, mine in zip(("gates", "x", "expert_kernel", "expert_bias"), gradients):
        expected = arrays[f"grads/{name}"].reshape(mine.shape)
        assert_close(mine, expected, 1e-4, 1e-6, err_msg=name)


@each_form
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_kept(form, dtype):
    to_slots, to_tokens = FORMS[form]
    plan = random_plan()
    tokens = keras.ops.cast(normal(0, 2, 7, 3), dtype)
    slots = to_slots(tokens, plan)
    back = to_tokens(slots, plan)
    assert keras.backend.standardize_dtype(slots.dtype) == dtype
    assert keras.backend.standardize_dtype(back.dtype) == dtype
    # Moving a token rounds nothing.
    assert set(np.unique(to_numpy(slots))) <= set(np.unique(to_numpy(tokens))) | {0.0}


@each_form
def test_combine_adds_up_in_float32(form):
    # In bfloat16 256 + 1 is 256, and 0.75 + 2**-12 is 0.75: sums there would lose both
    # ones, and rounded gates the 2 that is left of 8192.
    gates = np.array([[[1.0, 1.0, 1.0, 0.75 + 2**-12, 0.75]]], "float32")
    plan = token_choice(np.ones_like(gates), gates, 5, 1)
    outputs = [[[[256.0]], [[1.0]], [[1.0]], [[8192.0]], [[-8192.0]]]]
    outputs = keras.ops.cast(outputs, "bfloat16")
    assert to_numpy(FORMS[form][1](outputs, plan)).item() == 260.0


@pytest.mark.parametrize("place", [0, 6])
def test_neither_a_token_without_a_slot_nor_an_empty_slot_is_read(place):
    # The first and the last: where a gather with index 0 or -1 would look.
    mask = np.ones((2, 7), bool)
    mask[:, place] = False
    plan = random_plan(mask=mask, capacity=5)
    tokens = normal(0, 2, 7, 3)
    tokens[:, place] = np.nan
    empty = keras.ops.convert_to_numpy(plan.slot_tokens) == -1
    assert np.any(empty)
    slots = to_numpy(plan.dispatch(tokens))
    assert np.all(np.isfinite(slots))
    assert_same(slots[empty], 0)
    outputs = normal(1, 2, 4, 5, 3)
    outputs[empty] = np.nan
    assert np.all(np.isfinite(to_numpy(plan.combine(outputs))))


@each_form
def test_bad_shapes(form):
    to_slots, to_tokens = FORMS[form]
    plan = random_plan()
    for move, name, shapes in (
        (to_slots, "tokens", [(2, 8, 3), (3, 7, 3), (7, 3)]),
        (to_tokens, "outputs", [(2, 4, 3, 5), (2, 5, 2, 5), (2, 8, 5)]),
    ):
        for shape in shapes:
            message = r"Expected (.|\n)*received: "
            with pytest.raises(ValueError, match=message) as caught:
                move(np.zeros(shape, "float32"), plan)
            assert name in str(caught.value)
            assert str(shape) in str(caught.value)
