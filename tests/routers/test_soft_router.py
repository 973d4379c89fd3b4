"""Soft routing against the reference's, and what must always hold."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.layers import Experts, MoE
from keras_moe.routers import SoftRouter
from tests import golden
from tests.calls import call
from tests.compare import assert_close, assert_same
from tests.training_gradients import training_gradients

to_numpy = ops.convert_to_numpy
CASES = golden.cases("05_soft_moe/*")
NAMES = {
    "slots": "Router/mu", "scale": "Router/scale",
    "hidden_kernel": "Mlp/Dense_0/kernel", "hidden_bias": "Mlp/Dense_0/bias",
    "output_kernel": "Mlp/Dense_1/kernel", "output_bias": "Mlp/Dense_1/bias",
}  # fmt: skip


def build(case, dtype=None):
    arrays, config = golden.load(case)
    mlp_dim = arrays["params/Mlp/Dense_0/bias"].shape[1]
    if config.get("capacity_factor") is not None:
        slots = {"capacity_factor": config["capacity_factor"]}
    else:
        slots = {"num_slots": config["num_slots"]}
    moe = MoE(
        SoftRouter(config["num_experts"], **slots),
        Experts(config["num_experts"], mlp_dim, dtype=dtype),
        dtype=dtype,
    )
    moe.build(arrays["inputs/x"].shape)
    for weight in moe.trainable_weights:
        weight.assign(arrays[f"params/{NAMES[weight.name]}"])
    return moe, arrays, config


@pytest.mark.every_backend
@pytest.mark.parametrize("case", CASES)
def test_golden_layer(case):
    moe, arrays, config = build(case)
    plan, routing = call(moe.router, arrays["inputs/x"])
    assert plan.combine_weights.shape[-1] == config["num_slots"]
    outputs, record = call(moe, arrays["inputs/x"], training=True)
    for actual, name in (
        (plan.dispatch_weights, "dispatch_weights"),
        (plan.combine_weights, "combine_weights"),
        (plan.dispatch(arrays["inputs/x"]), "slot_inputs"),
        (outputs, "y"),
    ):
        expected = arrays[f"outputs/{name}"]
        assert_close(actual, expected, 1e-5, 1e-6)
    assert_same(routing, record)
    assert_close(record.combined, arrays["outputs/combine_weights"].sum(-1), 1e-5)


@pytest.mark.every_backend
@pytest.mark.parametrize("case", CASES)
def test_golden_gradients(case):
    moe, arrays, _ = build(case)

    def scalar(outputs):
        return ops.sum(ops.multiply(outputs[0], arrays["inputs/cotangent"]))

    gradients = training_gradients(moe, arrays["inputs/x"], scalar)
    for weight, actual in zip(moe.trainable_weights, gradients):
        expected = arrays[f"grads/params/{NAMES[weight.name]}"]
        assert_close(actual, expected, 1e-4, 1e-6, err_msg=weight.path)


@pytest.mark.every_backend
def test_golden_half_precision():
    """The reference casts to bfloat16 around dispatch and combine."""
    moe, arrays, _ = build("05_soft_moe/slots2", dtype="mixed_bfloat16")
    outputs = to_numpy(ops.cast(moe(arrays["inputs/x"])[0], "float32"))
    expected = arrays["outputs/y_official_bfloat16_dispatch"]
    # Theirs runs the experts in float32, ours in bfloat16, which has 8 bits.
    assert_close(outputs, expected, atol=3e-2)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_weights_are_convex(normalize, scale):
    router = SoftRouter(3, num_slots=2, normalize=normalize)
    tokens = np.random.default_rng(0).normal(size=(2, 7, 5)).astype("float32") * scale
    plan, _ = call(router, tokens)
    into, out_of = map(to_numpy, plan)
    assert (into >= 0).all()
    assert (out_of >= 0).all()
    assert_close(into.sum(axis=1), 1.0, 1e-5)
    assert_close(out_of.sum(axis=(2, 3)), 1.0, 1e-5)
    parameters = router.cost((7, 5)).parameters
    assert parameters == router.count_params() == 5 * 6 + normalize


def test_a_number_of_slots_serves_any_number_of_tokens():
    moe = MoE(SoftRouter(4, num_slots=1), Experts(4, mlp_dim=8))
    symbol = keras.Input((None, 6))
    model = keras.Model(symbol, moe(symbol)[0])
    for length in (3, 9):
        assert model(np.ones((2, length, 6), "float32")).shape == (2, length, 6)
