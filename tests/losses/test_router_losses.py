"""Auxiliary losses of routers: golden data, hand computation, masks and edges.

Axes: G groups, S group_size, E experts, K selected experts.
"""

import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_moe.losses import (
    AuxiliaryLoss,
    importance_loss,
    load_balance_loss,
    load_loss,
    router_z_loss,
)
from keras_moe.ops import token_choice
from tests import golden
from tests.gradients import gradient, one_program
from tests.losses.loss_table import (
    LOSSES_OF_TOKENS,
    normal,
    numbers,
    routing_of,
    with_gradient,
)


def value_of(name, logits, noise, noise_std, selected):
    """One loss by the name that the golden data has for it."""
    noisy = logits + noise_std * noise
    if name == "importance":
        return importance_loss(logits)
    if name == "load":
        return load_loss(logits, noisy, noise_std, selected)
    chosen = logits if name == "gshard_clean" else noisy
    return load_balance_loss(keras.ops.softmax(chosen, axis=-1))


@pytest.mark.every_backend
@pytest.mark.parametrize("name", ["importance", "load", "gshard_clean", "gshard_noisy"])
@pytest.mark.parametrize("case", golden.cases("03_router_losses/losses*"))
def test_golden_loss(case, name):
    arrays, config = golden.load(case)
    logits, noise = arrays["inputs/logits"], arrays["inputs/noise_unit_normal"]
    options = {
        "noise": keras.ops.convert_to_tensor(noise),
        # The std that is added: the reference divides its setting by E.
        "noise_std": config["noise_std"] / config["E"],
        "selected": config["K"],
    }
    loss, actual = with_gradient(lambda x: value_of(name, x, **options), logits)
    rtol = 1e-4 if name == "load" else 1e-5
    np.testing.assert_allclose(loss, arrays[f"outputs/{name}"], rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(
        actual, arrays[f"grads/{name}/logits"], rtol=1e-4, atol=1e-6
    )


@pytest.mark.every_backend
@pytest.mark.parametrize(
    "case", ["deterministic_k1", "noisy_k1_gshard", "noisy_k2_bpr"]
)
def test_golden_router(case):
    # A whole router layer of the V-MoE code, put together from functions.
    arrays, config = golden.load(f"03_router_losses/router_{case}")
    x, kernel = arrays["inputs/x"], arrays["params/dense/kernel"]
    metrics = {
        name.removeprefix("outputs/metrics/"): value
        for name, value in arrays.items()
        if name.startswith("outputs/metrics/")
    }
    cotangent = keras.ops.convert_to_tensor(arrays["inputs/cotangent_combine"])
    capacity = cotangent.shape[-1]
    std = 0.0 if config["deterministic"] else config["noise_std"] / config["E"]
    noise = keras.ops.convert_to_tensor(arrays["inputs/noise_unit_normal"])
    batch_priority = config["dispatcher"]["batch_priority"]

    def router(x, kernel):
        logits = keras.ops.matmul(x, kernel)
        noisy = logits + std * noise
        gates = keras.ops.softmax(noisy, axis=-1)
        plan = token_choice(
            keras.ops.stop_gradient(gates),
            gates,
            config["K"],
            capacity,
            priority="max_gate" if batch_priority else "first_come",
        )
        losses = {
            "importance_loss": importance_loss(logits),
            "gshard_loss": load_balance_loss(gates),
        }
        if not config["deterministic"]:
            losses["load_loss"] = load_loss(logits, noisy, std, config["K"])
        losses["auxiliary_loss"] = sum(
            config[f"{name}_weight"] * loss for name, loss in losses.items()
        )
        return losses, *plan.dense()

    losses, d, c = one_program(router)(*map(keras.ops.convert_to_tensor, (x, kernel)))
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(d), arrays["outputs/dispatch_mask"]
    )
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(c),
        arrays["outputs/combine_weights"],
        rtol=1e-5,
        atol=1e-6,
    )
    assert set(metrics) == set(losses)
    for name, expected in metrics.items():
        mine = keras.ops.convert_to_numpy(losses[name])
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-6, err_msg=name)
    for scalar, fn in {
        "sum_auxiliary_loss": lambda *a: keras.ops.sum(router(*a)[0]["auxiliary_loss"]),
        "sum_combine_cotangent": lambda *a: keras.ops.sum(router(*a)[2] * cotangent),
    }.items():
        of_x, of_kernel = gradient(fn, x, kernel)
        close = {"rtol": 1e-4, "atol": 1e-6, "err_msg": scalar}
        np.testing.assert_allclose(of_x, arrays[f"grads/{scalar}/x"], **close)
        expected = arrays[f"grads/{scalar}/params/dense/kernel"]
        np.testing.assert_allclose(of_kernel, expected, **close)


# By hand


def test_importance_by_hand():
    # Gates (3/4, 1/4) and (1/4, 3/4): balanced. Twice the first: 3/2 against 1/2.
    log3 = math.log(3)
    logits = np.array([[[log3, 0], [0, log3]], [[log3, 0], [log3, 0]]], "float32")
    # Mean 1, population std 1/2.
    np.testing.assert_allclose(numbers(importance_loss, logits), [0, 0.25], atol=1e-6)


def test_load_by_hand():
    # One token, no noise drawn, K=1: the threshold is the token's largest logit.
    # p = (1/2, 1 - Phi(1)) at std 1, so (std/mean)^2 = ((p0-p1)/(p0+p1))^2.
    logits = np.array([[[1.0, 0.0]]], "float32")
    tail = 0.5 * math.erfc(1 / math.sqrt(2))
    expected = ((0.5 - tail) / (0.5 + tail)) ** 2
    np.testing.assert_allclose(
        numbers(lambda x: load_loss(x, x, 1.0, 1), logits), [expected], rtol=1e-5
    )
    # K=2: the threshold is the smaller logit.
    expected = ((1 - tail - 0.5) / (1 - tail + 0.5)) ** 2
    np.testing.assert_allclose(
        numbers(lambda x: load_loss(x, x, 1.0, 2), logits), [expected], rtol=1e-5
    )


def test_load_balance_by_hand():
    gates = np.array(
        [
            [[0.7, 0.3], [0.4, 0.6]],  # f = 1/2 each: 2 * (0.55 + 0.45) / 2
            [[0.7, 0.3], [0.9, 0.1]],  # f = (1, 0): 2 * 0.8
            [[0.5, 0.5], [0.5, 0.5]],  # a tie counts for the lowest expert
        ],
        "float32",
    )
    actual = keras.ops.convert_to_numpy(load_balance_loss(gates))
    np.testing.assert_allclose(actual, [1.0, 1.6, 1.0], rtol=1e-6)


def test_load_balance_of_all_choices_by_hand():
    gates = np.array([[[0.75, 0.25, 0.0], [0.75, 0.0, 0.25]]], "float32")
    for selected, expected in (
        (1, 3 * 0.75),  # f = (1, 0, 0), P = (3/4, 1/8, 1/8)
        (2, 3 * (0.75 / 2 + 0.125 / 4 + 0.125 / 4)),
        (3, 1.0),  # All experts have all tokens.
    ):
        actual = load_balance_loss(gates, num_selected_experts=selected)
        actual = keras.ops.convert_to_numpy(actual)
        np.testing.assert_allclose(actual, [expected], rtol=1e-6)
    mask = np.array([[True, False]])
    actual = load_balance_loss(gates, mask, num_selected_experts=2)
    expected = 3 * (0.75 / 2 + 0.25 / 2)
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(actual), [expected], rtol=1e-6
    )


def test_the_choices_that_balance_are_an_argument():
    gates = np.array([[[0.75, 0.25, 0.0], [0.75, 0.0, 0.25]]], "float32")
    routing = routing_of(None)._replace(gates=gates)
    router = SimpleNamespace(num_selected_experts=2)
    actual = {}
    for choices, selected in (("first", 1), ("all", 2)):
        loss = AuxiliaryLoss("load_balance", 0.5, choices=choices)
        again = AuxiliaryLoss.from_config(loss.get_config())
        expected = load_balance_loss(gates, num_selected_experts=selected)
        actual[choices] = keras.ops.convert_to_numpy(again(routing, router))
        expected = 0.5 * keras.ops.convert_to_numpy(expected)
        np.testing.assert_allclose(actual[choices], expected, rtol=1e-6)
    assert (actual["first"].tolist(), actual["all"].tolist()) == ([1.125], [0.65625])


def test_z_by_hand():
    logits = np.array([[[0, 0, 0], [1, 1, 1]]], "float32")
    expected = (math.log(3) ** 2 + (1 + math.log(3)) ** 2) / 2
    np.testing.assert_allclose(numbers(router_z_loss, logits), [expected], rtol=1e-6)
    (actual,) = gradient(lambda x: keras.ops.sum(router_z_loss(x)), logits)
    # d lse^2 / d logits = 2 lse softmax, averaged over the two tokens.
    np.testing.assert_allclose(actual[0, 0], [math.log(3) / 3] * 3, rtol=1e-5)


# Properties of each


@pytest.mark.parametrize("name", LOSSES_OF_TOKENS)
def test_tokens_have_no_order(name):
    logits, order = normal(0, 2, 6, 4), np.random.default_rng(1).permutation(6)
    actual, expected = (
        numbers(LOSSES_OF_TOKENS[name], x, None) for x in (logits[:, order], logits)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:You are using a softmax over axis -1")
@pytest.mark.parametrize("name", LOSSES_OF_TOKENS)
@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        pytest.param((1, 4, 1), 1.0, id="one expert"),
        pytest.param((2, 1, 3), 1.0, id="one token"),
        pytest.param((1, 5, 3), 1e4, id="huge logits"),
        pytest.param((1, 5, 3), 0.0, id="all logits equal"),
    ],
)
def test_extremes_are_finite(name, shape, scale):
    logits = np.float32(scale) * normal(0, *shape)
    loss, actual = with_gradient(lambda x: LOSSES_OF_TOKENS[name](x, None), logits)
    assert np.all(np.isfinite(loss))
    assert np.all(np.isfinite(actual))


@pytest.mark.parametrize("name", ["importance", "load"])
def test_balance_is_zero_and_imbalance_is_not(name):
    balanced = 5 * np.eye(4, dtype="float32")[None]
    loss = LOSSES_OF_TOKENS[name]
    np.testing.assert_allclose(numbers(loss, balanced, None), [0], atol=1e-6)
    everyone_to_one = np.tile(balanced[:, :1], (1, 4, 1))
    assert numbers(loss, everyone_to_one, None)[0] > 0.5
