"""The whole router layer against the reference's, with its noise."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe import losses
from keras_moe.routers import TokenChoiceRouter
from tests import golden
from tests.training_gradients import training_gradients

WEIGHTS = {
    "gshard_loss_weight": "load_balance",
    "importance_loss_weight": "importance",
    "load_loss_weight": "load",
}


@pytest.fixture(
    params=[
        case
        for case in golden.cases("03_router_losses/router_*")
        if "expert_choice" not in case
    ]
)
def case(request, monkeypatch):
    arrays, config = golden.load(request.param)
    training = not config["deterministic"]
    dispatcher = config["dispatcher"]
    router = TokenChoiceRouter(
        config["E"],
        config["K"],
        capacity=dispatcher.get("capacity"),
        capacity_factor=dispatcher.get("capacity_factor"),
        eval_capacity_factor=dispatcher.get("capacity_factor"),
        eval_capacity=dispatcher.get("capacity"),
        evaluation="official",
        capacity_multiple_of=4,
        priority="max_gate" if dispatcher["batch_priority"] else "first_come",
        noise_std=config["noise_std"],
    )
    router.build(arrays["inputs/x"].shape)
    router.kernel.assign(arrays["params/dense/kernel"])
    noise = arrays["inputs/noise_unit_normal"]

    def normal(shape, stddev, **kwargs):
        assert tuple(shape) == noise.shape
        return ops.convert_to_tensor(noise) * stddev

    monkeypatch.setattr(keras.random, "normal", normal)
    return router, arrays, config, training


def auxiliary_loss(routing, router, config, training):
    # Without noise the reference leaves the load loss out.
    chosen = losses.get(
        {
            name: config[key]
            for key, name in WEIGHTS.items()
            if config[key] > 0 and (training or name != "load")
        }
    )
    return sum(loss(routing, router) for loss in chosen)


@pytest.mark.every_backend
def test_plan_and_losses(case):
    router, arrays, config, training = case
    plan, routing = router(arrays["inputs/x"], training=training)
    np.testing.assert_array_equal(
        ops.convert_to_numpy(plan.dense().dispatch_weights),
        arrays["outputs/dispatch_mask"],
    )
    np.testing.assert_allclose(
        ops.convert_to_numpy(plan.dense().combine_weights),
        arrays["outputs/combine_weights"],
        rtol=1e-5,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        ops.convert_to_numpy(auxiliary_loss(routing, router, config, training)),
        arrays["outputs/metrics/auxiliary_loss"],
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.every_backend
@pytest.mark.parametrize("of", ["sum_auxiliary_loss", "sum_combine_cotangent"])
def test_gradients(case, of):
    router, arrays, config, training = case

    def scalar(outputs):
        plan, routing = outputs
        if of == "sum_auxiliary_loss":
            return ops.sum(auxiliary_loss(routing, router, config, training))
        cotangent = arrays["inputs/cotangent_combine"]
        return ops.sum(ops.multiply(plan.dense().combine_weights, cotangent))

    (gradient,) = training_gradients(router, arrays["inputs/x"], scalar, training)
    expected = arrays[f"grads/{of}/params/dense/kernel"]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
