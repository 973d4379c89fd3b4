"""Layer scale: a learned factor for each channel of the residual branches."""

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.layers import MLP, EncoderBlock, SelfAttention

to_numpy = keras.ops.convert_to_numpy
SIZES = {"hidden_dim": 8, "num_layers": 2, "mlp_dim": 12, "seed": 0}
IMAGES = {"image_shape": (8, 8, 3), "patch_size": 4}
TEXTS = {"vocabulary_size": 20, "max_length": 5}
MAKERS = {
    "vit": lambda **kw: models.ViTBackbone(**IMAGES, **SIZES, num_heads=2, **kw),
    "mixer": lambda **kw: models.MixerBackbone(
        **IMAGES, **SIZES, token_mlp_dim=6, **kw
    ),
    "text": lambda **kw: models.TextBackbone(**TEXTS, **SIZES, num_heads=2, **kw),
    "limoe": lambda **kw: models.LIMoEBackbone(
        **IMAGES, **TEXTS, **SIZES, num_heads=2, projection_dim=4, **kw
    ),
    "clip": lambda **kw: models.CLIPBackbone(
        image={**IMAGES, **SIZES, "num_heads": 2, **kw},
        text={**TEXTS, **SIZES, "num_heads": 2, **kw},
        projection_dim=4,
    ),
}
MOE = {"moe_layers": [1], "num_experts": 4, "router": "softmax_token_choice"}


def scales(backbone):
    return [w for w in backbone.weights if w.path.endswith("_scale/scale")]


@pytest.mark.every_backend
def test_block_by_hand():
    block = EncoderBlock(
        SelfAttention(2, 4), MLP(16), layer_scale_initial_value=0.5, name="block"
    )
    tokens = np.random.default_rng(0).normal(size=(2, 3, 8)).astype("float32")
    block(tokens)
    mixer = np.linspace(-1.0, 1.0, 8, dtype="float32")
    mlp = np.linspace(2.0, 0.0, 8, dtype="float32")
    block.mixer_scale.scale.assign(mixer)
    block.feed_forward_scale.scale.assign(mlp)
    mixed = tokens + mixer * to_numpy(block.token_mixer(block.mixer_norm(tokens)))
    branch = to_numpy(block.feed_forward(block.feed_forward_norm(mixed)))
    expected = mixed + mlp * branch
    np.testing.assert_allclose(to_numpy(block(tokens)), expected, atol=1e-5)


@pytest.mark.parametrize("kind", MAKERS)
def test_every_backbone_takes_it(kind):
    assert scales(MAKERS[kind]()) == []
    backbone = MAKERS[kind](layer_scale_initial_value=0.1, moe=MOE)
    num_towers = 2 if kind == "clip" else 1
    assert len(scales(backbone)) == 2 * 2 * num_towers
    for weight in scales(backbone):
        np.testing.assert_array_equal(to_numpy(weight), np.full(8, 0.1, "float32"))
    again = type(backbone).from_config(backbone.get_config())
    assert again.get_config() == backbone.get_config()
    assert [w.path for w in again.weights] == [w.path for w in backbone.weights]
    count = sum(int(np.prod(w.shape)) for w in backbone.trainable_weights)
    assert backbone.describe().parameters == count
    with pytest.raises(ValueError, match="layer_scale_initial_value=0"):
        MAKERS[kind](layer_scale_initial_value=0)


@pytest.mark.every_backend
def test_it_trains_and_is_saved(tmp_path):
    backbone = MAKERS["vit"](layer_scale_initial_value=1e-2, moe=MOE)
    model = models.ViTImageClassifier(backbone, 3)
    model.compile(keras.optimizers.Adam(1e-2))
    images = np.random.default_rng(0).normal(size=(6, 8, 8, 3)).astype("float32")
    model.fit(images, np.arange(6) % 3, epochs=2, verbose=0)
    for weight in scales(backbone):
        assert np.abs(to_numpy(weight) - 1e-2).min() > 0
    model.save_to_preset(tmp_path / "preset")
    loaded = models.from_preset(tmp_path / "preset")
    for weight, saved in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), to_numpy(saved))
