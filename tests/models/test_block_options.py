"""Options of all blocks: layer scale and stochastic depth."""

import json

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.layers import MLP, Attention, Block, LogitScale
from keras_moe.routers import Router
from tests.calls import call
from tests.compare import assert_close, assert_same, to_numpy
from tests.pair_models import IMAGE, TEXT

MOE = {"moe_layers": [1], "num_experts": 4, "router": "softmax_token_choice"}
MIXER = {name: size for name, size in IMAGE.items() if name != "num_heads"}
MAKERS = {
    "vit": lambda **kw: models.ViTBackbone(**{**IMAGE, **kw}),
    "mixer": lambda **kw: models.MixerBackbone(**{**MIXER, "token_mlp_dim": 6, **kw}),
    "text": lambda **kw: models.TextBackbone(**{**TEXT, **kw}),
    "decoder": lambda **kw: models.DecoderBackbone(**{**TEXT, **kw}),
    "limoe": lambda **kw: models.LIMoEBackbone(
        **{**IMAGE, **TEXT, "projection_dim": 4, **kw}
    ),
    "clip": lambda dtype=None, **kw: models.CLIPBackbone(
        image={**IMAGE, **kw}, text={**TEXT, **kw}, projection_dim=4, dtype=dtype
    ),
}


def scales(backbone):
    return [w for w in backbone.weights if w.path.endswith("_scale/scale")]


@pytest.mark.every_backend
def test_layer_scale_by_hand():
    block = Block(Attention(2, 4), MLP(16), layer_scale_initial_value=0.5, name="block")
    tokens = np.random.default_rng(0).normal(size=(2, 3, 8)).astype("float32")
    block(tokens)
    mixer = np.linspace(-1.0, 1.0, 8, dtype="float32")
    mlp = np.linspace(2.0, 0.0, 8, dtype="float32")
    block.mixer_scale.scale.assign(mixer)
    block.feed_forward_scale.scale.assign(mlp)
    mixed = tokens + mixer * to_numpy(block.token_mixer(block.mixer_norm(tokens)))
    branch = to_numpy(block.feed_forward(block.feed_forward_norm(mixed)))
    assert_close(block(tokens), mixed + mlp * branch, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("kind", MAKERS)
def test_layers_have_the_policy_of_their_model(kind, policy):
    """All but routers and the logits of pairs, which are float32 under every policy."""
    for layer in MAKERS[kind](moe=MOE, dtype=policy)._flatten_layers(False):
        if not isinstance(layer, keras.layers.InputLayer):
            is_float32 = isinstance(layer, (LogitScale, Router))
            expected = keras.dtype_policies.get("float32" if is_float32 else policy)
            assert layer.compute_dtype == expected.compute_dtype, layer.path
            assert layer.variable_dtype == expected.variable_dtype, layer.path


@pytest.mark.parametrize("kind", MAKERS)
def test_every_backbone_takes_layer_scale_norms_gates_and_no_biases(kind):
    assert scales(MAKERS[kind]()) == []
    options = {"norm": "rms", "gated_mlp": True, "use_bias": False}
    moe = {**MOE, "expert_use_bias": False}
    backbone = MAKERS[kind](**options, layer_scale_initial_value=0.1, moe=moe)
    assert len(scales(backbone)) == 2 * 2 * (2 if kind == "clip" else 1)
    for weight in scales(backbone):
        assert_same(weight, np.full(8, 0.1, "float32"))
    paths = [weight.path for weight in backbone.weights if "block_" in weight.path]
    assert any(path.endswith("mlp/gate/kernel") for path in paths)
    assert any(path.endswith("feed_forward_norm/scale") for path in paths)
    assert not [path for path in paths if path.endswith(("bias", "beta"))]
    again = type(backbone).from_config(backbone.get_config())
    assert again.get_config() == backbone.get_config()
    assert [w.path for w in again.weights] == [w.path for w in backbone.weights]
    count = sum(int(np.prod(w.shape)) for w in backbone.trainable_weights)
    assert backbone.describe().parameters == count


B, N, D = 3000, 2, 3
RATE = 0.3


class Constant(keras.layers.Layer):
    """A branch whose presence shows in the sum."""

    def __init__(self, value, **kwargs):
        super().__init__(**kwargs)
        self.value = value

    def call(self, tokens, training=None):
        return self.value + 0.0 * tokens


def deep_block(**kwargs):
    kwargs = {"stochastic_depth": RATE, "seed": 5, **kwargs}
    return Block(Constant(1.0), Constant(10.0), **kwargs)


def branches(layer, training=True):
    """The sum of the two branches for each example, (B, N, D)."""
    tokens = np.random.default_rng(0).normal(size=(B, N, D)).astype("float32")
    return to_numpy(call(layer, tokens, training=training)) - tokens


def test_whole_examples_are_dropped_and_the_others_scaled():
    added = branches(deep_block())
    assert_close(added, added[:, :1, :1] + np.zeros((N, D)), atol=1e-5)
    kept = added[:, 0, 0] * (1 - RATE)
    first, second = np.round(kept) % 10 == 1, np.round(kept) >= 10
    assert_close(kept, 1.0 * first + 10.0 * second, atol=1e-4)
    # Four standard deviations of a frequency over B examples.
    for actual, expected in (
        (first.mean(), 1 - RATE),
        (second.mean(), 1 - RATE),
        ((first & second).mean(), (1 - RATE) ** 2),
    ):
        assert abs(actual - expected) < 4 * np.sqrt(expected * (1 - expected) / B)
    inference = branches(deep_block(), training=False)
    assert_close(inference, 11.0, 1e-5)


@pytest.mark.every_backend
def test_draws_follow_from_the_seed_and_move_on():
    layer = deep_block()
    first = branches(layer)
    assert np.abs(branches(layer) - first).max() > 1
    assert_same(branches(deep_block()), first)
    assert np.abs(branches(deep_block(seed=6)) - first).max() > 1


@pytest.mark.parametrize("name", ["vit", "mixer"])
def test_rates_rise_on_a_line_and_round_trip(name, tmp_path):
    backbone = MAKERS[name](num_layers=5, stochastic_depth=0.2, seed=7, moe=MOE)
    config = json.loads(json.dumps(backbone.get_config()))
    backbone.save_to_preset(tmp_path / "preset")
    loaded = models.from_preset(str(tmp_path / "preset"))
    for again in (backbone, type(backbone).from_config(config), loaded):
        blocks = [again.get_layer(f"block_{index}") for index in range(5)]
        rates = [block.stochastic_depth for block in blocks]
        assert_close(rates, [0.0, 0.05, 0.1, 0.15, 0.2])
        assert [block.depth_layer.rate for block in blocks] == rates
    # No two sites of a model draw alike.
    dropouts = (keras.layers.Dropout,)
    layers = [x for x in backbone._flatten_layers() if isinstance(x, dropouts)]
    assert len({layer.seed for layer in layers}) == len(layers)
    plain = MAKERS[name](num_layers=5, seed=7, moe=MOE)
    assert plain.get_config()["stochastic_depth"] == 0.0
    assert models.describe(plain).parts == models.describe(backbone).parts
