"""A batch without images goes through every router and layer."""

import keras
import numpy as np
import pytest

from keras_moe import routers
from keras_moe.layers import Experts, MoE
from keras_moe.routers import ROUTERS
from tests.calls import call_with_losses

NAMES = list(ROUTERS)


def shapes(nested):
    return [tuple(x.shape) for x in keras.tree.flatten(nested)]


def moe(name, group_size=None, auxiliary_losses=None, **options):
    # Rounding to 0 would want a larger group, here as with images.
    options = {"capacity_rounding": "ceil", **options}
    router = routers.get(name, 4, seed=0, **options)
    return MoE(router, Experts(4, 16), group_size, auxiliary_losses)


def options_of(name):
    """The ways to limit experts that a router has."""
    if name == "soft":
        return [{"num_slots": 2}]
    if "token" in name:
        losses = {"importance": 0.1, "load": 0.1}
        return [
            {"auxiliary_losses": losses, "noise_std": 1.0},
            {
                "eval_capacity_factor": 1.0,
                "evaluation": "official",
                "priority": "max_gate",
            },
            {"priority": "sum_gates", "normalize_gates": "after"},
            {"dropless": True, "auxiliary_losses": {"router_z": 0.1}},
        ]
    return [
        {"normalize_gates": "after"},
        {"eval_capacity_factor": 1.0, "evaluation": "official"},
    ]


def check(layer, training):
    tokens = np.zeros((0, 6, 8), "float32")
    (outputs, routing), losses = call_with_losses(layer, tokens, training=training)
    assert shapes(outputs) == [(0, 6, 8)]
    assert {shape[:2] for shape in shapes(routing)} == {(0, 6)}
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("group_size", [12, None])
@pytest.mark.parametrize("name", NAMES)
def test_moe(name, group_size):
    for options in options_of(name):
        layer = moe(name, group_size, **options)
        for training in (False, True):
            check(layer, training)


@pytest.mark.every_backend
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="only TensorFlow traces with unknown sizes",
)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("group_size", [12, None])
def test_moe_with_a_batch_size_unknown_to_tensorflow(group_size, training):
    from tensorflow import TensorSpec, function

    options = {"eval_capacity_factor": 1.0, "evaluation": "official"}
    layer = moe("softmax_token_choice", group_size, **options)
    layer.build((None, 6, 8))
    traced = function(
        lambda x: layer(x, training=training)[0], [TensorSpec((None, 6, 8))]
    )
    for batch in (0, 3):
        outputs = traced(np.ones((batch, 6, 8), "float32"))
        assert shapes(outputs) == [(batch, 6, 8)]
