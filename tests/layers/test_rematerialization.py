"""Blocks that compute their inner values again for the gradient."""

import functools

import keras
import numpy as np
import pytest

from keras_moe import layers
from keras_moe.routers import TokenChoiceRouter
from tests.compare import assert_close
from tests.training_gradients import training_gradients

B, N, D, E = 4, 6, 8, 4


def tokens():
    return np.random.default_rng(0).normal(size=(B, N, D)).astype("float32")


def dense_block(**kwargs):
    attention = layers.Attention(2, D // 2, dropout=0.2, seed=4)
    mlp = layers.MLP(16, dropout=0.1, seed=2)
    return layers.Block(
        attention, mlp, dropout=0.1, stochastic_depth=0.4, seed=5, **kwargs
    )


def moe_block(dropless=False, expert_dropout=0.1, **kwargs):
    options = {"noise_std": 0.5, "seed": 1, "priority": "shuffled"}
    router = TokenChoiceRouter(E, 2, dropless=dropless, **options)
    losses = {"importance": 0.5, "load": 0.5, "router_z": 0.1}
    experts = layers.Experts(E, 16, dropout=expert_dropout, seed=3)
    moe = layers.MoE(router, experts, auxiliary_losses=losses)
    attention = layers.Attention(2, D // 2, dropout=0.2, seed=4)
    return layers.MoEBlock(
        attention, moe, dropout=0.1, stochastic_depth=0.4, seed=5, **kwargs
    )


dropless_block = functools.partial(moe_block, dropless=True)


def built(make, rematerialize):
    keras.utils.set_random_seed(0)
    block = make(rematerialize=rematerialize)
    block.build((None, N, D))
    return block


# Without dropout, rows go through both layers in one operation.
@pytest.mark.parametrize("make", [
    dense_block, moe_block, dropless_block,
    functools.partial(dropless_block, expert_dropout=0.0),
])  # fmt: skip
def test_gradients_are_those_of_the_plain_block(make):
    gradients = [
        training_gradients(built(make, rematerialize), tokens())
        for rematerialize in (False, True)
    ]
    assert max(np.abs(gradient).max() for gradient in gradients[0]) > 0.1
    for plain, again in zip(*gradients):
        assert_close(again, plain, 1e-4, 1e-5)


def test_training_is_that_of_the_plain_block():
    """Losses, weights and seeds, over steps of `fit`."""
    histories, weights = [], []
    for rematerialize in (False, True):
        inputs = keras.Input((N, D))
        model = keras.Model(inputs, built(moe_block, rematerialize)(inputs)[0])
        model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
        data = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}
        histories.append(model.fit(tokens(), 0.5 * tokens(), **data).history["loss"])
        weights.append(model.variables)
    assert_close(*histories, rtol=1e-5)
    assert_close(*weights, 1e-3, 1e-5)


def test_routing_still_leaves_the_block():
    block = built(moe_block, True)
    _, routing = block(tokens(), training=True)
    assert tuple(routing.dispatched.shape) == (B, N, E)
    assert len(block.losses) == 3
    block(tokens(), training=True)
    assert len(block.losses) == 3


@pytest.mark.every_backend
def test_no_value_of_the_region_is_kept():
    """On JAX, the program tells; elsewhere the calls are counted."""
    calls = []

    class Counted(layers.MLP):
        def call(self, tokens, training=None):
            calls.append(training)
            return super().call(tokens, training=training)

    for rematerialize, times in ((False, 1), (True, 2)):
        block = layers.Block(
            layers.Attention(2, D // 2), Counted(16), rematerialize=rematerialize
        )
        block.build((None, N, D))
        if keras.backend.backend() == "jax":
            assert recomputed(block) == rematerialize
        else:
            calls.clear()
            training_gradients(block, tokens())
            assert calls == [True] * times


def recomputed(block):
    """Whether JAX's program has a region that it computes again."""
    import jax

    def loss(trainable, x):
        state = [v.value for v in block.non_trainable_variables]
        outputs, _ = block.stateless_call(trainable, state, x, training=True)
        return outputs.sum()

    trainable = [v.value for v in block.trainable_variables]
    return "remat" in str(jax.make_jaxpr(jax.grad(loss))(trainable, tokens()))
