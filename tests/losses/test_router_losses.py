"""Auxiliary losses of routers: golden data, hand computation, masks and edges."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_moe import losses
from tests import golden
from tests.compare import assert_close
from tests.losses.loss_table import LOSSES_OF_TOKENS, normal, routing_of, with_gradient


def value_of(name, logits, noise, noise_std, selected):
    """One loss by the name that the golden data has for it."""
    noisy = logits + noise_std * noise
    if name == "importance":
        return losses.importance_loss(logits)
    if name == "load":
        return losses.load_loss(logits, noisy, noise_std, selected)
    chosen = logits if name == "gshard_clean" else noisy
    return losses.load_balance_loss(keras.ops.softmax(chosen, axis=-1))


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
    assert_close(loss, arrays[f"outputs/{name}"], rtol, 1e-6)
    assert_close(actual, arrays[f"grads/{name}/logits"], 1e-4, 1e-6)


def test_load_balance_by_hand():
    gates = np.array(
        [
            [[0.7, 0.3], [0.4, 0.6]],  # f = 1/2 each: 2 * (0.55 + 0.45) / 2
            [[0.7, 0.3], [0.9, 0.1]],  # f = (1, 0): 2 * 0.8
            [[0.5, 0.5], [0.5, 0.5]],  # a tie counts for the lowest expert
        ],
        "float32",
    )
    actual = keras.ops.convert_to_numpy(losses.load_balance_loss(gates))
    assert_close(actual, [1.0, 1.6, 1.0], 1e-6)


def test_load_balance_of_all_choices_by_hand():
    gates = np.array([[[0.75, 0.25, 0.0], [0.75, 0.0, 0.25]]], "float32")
    for selected, expected in (
        (1, 3 * 0.75),  # f = (1, 0, 0), P = (3/4, 1/8, 1/8)
        (2, 3 * (0.75 / 2 + 0.125 / 4 + 0.125 / 4)),
        (3, 1.0),  # All experts have all tokens.
    ):
        actual = losses.load_balance_loss(gates, num_selected_experts=selected)
        actual = keras.ops.convert_to_numpy(actual)
        assert_close(actual, [expected], 1e-6)
    mask = np.array([[True, False]])
    actual = losses.load_balance_loss(gates, mask, num_selected_experts=2)
    expected = 3 * (0.75 / 2 + 0.25 / 2)
    assert_close(actual, [expected], 1e-6)
    # By an argument of the loss.
    routing = routing_of(None)._replace(gates=gates)
    router = SimpleNamespace(num_selected_experts=2)
    for choices, expected in (("first", 1.125), ("all", 0.65625)):
        loss = losses.AuxiliaryLoss("load_balance", 0.5, choices=choices)
        again = losses.AuxiliaryLoss.from_config(loss.get_config())
        assert_close(again(routing, router), [expected], 1e-6)


@pytest.mark.parametrize("name", LOSSES_OF_TOKENS)
@pytest.mark.parametrize(("shape", "scale"), [
    pytest.param((1, 4, 1), 1.0, id="one expert"),
    pytest.param((2, 1, 3), 1.0, id="one token"),
    pytest.param((1, 5, 3), 1e4, id="huge logits"),
    pytest.param((1, 5, 3), 0.0, id="all logits equal"),
])  # fmt: skip
def test_extremes_are_finite(name, shape, scale):
    logits = np.float32(scale) * normal(0, *shape)
    loss, actual = with_gradient(lambda x: LOSSES_OF_TOKENS[name](x, None), logits)
    assert np.all(np.isfinite(loss))
    assert np.all(np.isfinite(actual))
