"""Residual branches that are left out for whole examples while training."""

import json

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.layers import EncoderBlock
from keras_moe.models import MixerBackbone, ViTBackbone
from tests.calls import call
from tests.small_models import SMALL

to_numpy = keras.ops.convert_to_numpy
MIXER = {name: size for name, size in SMALL.items() if name != "num_heads"}
MAKERS = {
    "vit": lambda **kw: ViTBackbone.from_config({**SMALL, **kw}),
    "mixer": lambda **kw: MixerBackbone.from_config(
        {**MIXER, "token_mlp_dim": 8, **kw}
    ),
}
B, N, D = 3000, 2, 3
RATE = 0.3


class Constant(keras.layers.Layer):
    """A branch whose presence shows in the sum."""

    def __init__(self, value, **kwargs):
        super().__init__(**kwargs)
        self.value = value

    def call(self, tokens, training=None):
        return self.value + 0.0 * tokens


def block(**kwargs):
    kwargs = {"stochastic_depth": RATE, "seed": 5, **kwargs}
    return EncoderBlock(Constant(1.0), Constant(10.0), **kwargs)


def branches(layer, training=True):
    """The sum of the two branches for each example, (B, N, D)."""
    tokens = np.random.default_rng(0).normal(size=(B, N, D)).astype("float32")
    return to_numpy(call(layer, tokens, training=training)) - tokens


def test_whole_examples_are_dropped_and_the_others_scaled():
    added = branches(block())
    np.testing.assert_allclose(added, added[:, :1, :1] + np.zeros((N, D)), atol=1e-5)
    kept = added[:, 0, 0] * (1 - RATE)
    first, second = np.round(kept) % 10 == 1, np.round(kept) >= 10
    np.testing.assert_allclose(kept, 1.0 * first + 10.0 * second, atol=1e-4)
    # Four standard deviations of a frequency over B examples.
    for actual, expected in (
        (first.mean(), 1 - RATE),
        (second.mean(), 1 - RATE),
        ((first & second).mean(), (1 - RATE) ** 2),
    ):
        assert abs(actual - expected) < 4 * np.sqrt(expected * (1 - expected) / B)


@pytest.mark.every_backend
def test_draws_follow_from_the_seed_and_move_on():
    layer = block()
    first = branches(layer)
    assert np.abs(branches(layer) - first).max() > 1
    np.testing.assert_array_equal(branches(block()), first)
    assert np.abs(branches(block(seed=6)) - first).max() > 1


def test_inference_keeps_everything():
    np.testing.assert_allclose(branches(block(), training=False), 11.0, rtol=1e-5)


@pytest.mark.parametrize("name", MAKERS)
def test_rates_rise_on_a_line_and_round_trip(name, tmp_path):
    backbone = MAKERS[name](num_layers=5, stochastic_depth=0.2, seed=7)
    config = json.loads(json.dumps(backbone.get_config()))
    backbone.save_to_preset(tmp_path / "preset")
    loaded = models.from_preset(str(tmp_path / "preset"))
    for again in (backbone, type(backbone).from_config(config), loaded):
        blocks = [again.get_layer(f"block_{index}") for index in range(5)]
        rates = [block.stochastic_depth for block in blocks]
        np.testing.assert_allclose(rates, [0.0, 0.05, 0.1, 0.15, 0.2])
        assert [block.depth_layer.rate for block in blocks] == rates
    # No two sites of a model draw alike.
    seeds = [
        layer.seed
        for layer in backbone._flatten_layers()
        if isinstance(layer, keras.layers.Dropout)
    ]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("name", MAKERS)
def test_it_costs_nothing_and_is_off_by_default(name):
    plain, deep = (
        models.describe(MAKERS[name](**kwargs))
        for kwargs in ({}, {"stochastic_depth": 0.5})
    )
    assert deep.parts == plain.parts
    only = MAKERS[name](num_layers=1, moe_layers=None, stochastic_depth=0.5)
    assert only.get_layer("block_0").stochastic_depth == 0.0
    assert MAKERS[name]().get_config()["stochastic_depth"] == 0.0


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan"), "0.1", True])
def test_bad_rates_are_refused(rate):
    for make in (block, *MAKERS.values()):
        with pytest.raises(ValueError, match=r"Expected stochastic_depth in \[0, 1\)"):
            make(stochastic_depth=rate)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_last_batch_may_be_smaller(dtype):
    """In `fit`, where the number of examples is not known beforehand."""
    model = keras.Sequential([keras.Input((N, D)), block(dtype=dtype)])
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
    history = model.fit(np.ones((5, N, D)), np.ones((5, N, 1)), batch_size=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
