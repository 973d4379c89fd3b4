"""Every backbone's behaviour, and its weights at another size."""

import json

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.layers import MoEConfig, resize_patch_kernel, resize_positions
from keras_moe.models import MixerBackbone, ViTBackbone
from keras_moe.models.registry import builtin_presets
from tests import pair_models
from tests.compare import assert_close, assert_same
from tests.small_models import flat_config, images, presets_of_each_kind, with_weights

pytestmark = pytest.mark.usefixtures("op_by_op")

SIZES = {**pair_models.IMAGE, "image_shape": (16, 8, 3), "hidden_dim": 16, "seed": 3}
del SIZES["num_heads"]
MOE = {"moe_layers": [1], "num_experts": 4, "examples_per_group": 2}
MAKERS = {
    "vit": lambda **kw: ViTBackbone.from_config({**SIZES, "num_heads": 2, **kw}),
    "mixer": lambda **kw: MixerBackbone.from_config(
        {**SIZES, "token_mlp_dim": 6, **kw}
    ),
}


FOUR = {"num_layers": 4}


@pytest.mark.parametrize("preset", presets_of_each_kind())
def test_presets_of_every_kind_build_and_describe_counts_them(preset):
    entry = builtin_presets()[preset]
    is_classifier = "Classifier" in entry["task"]
    arguments = {"num_classes": 1000} if is_classifier else {}
    task = {"task": "causal_lm" if entry["task"] == "CausalLM" else "contrastive"}
    # Four layers, or all of them where their numbers are listed.
    layers = {} if isinstance(entry["config"].get("moe_layers"), list) else FOUR
    if "CLIP" in entry["backbone"]:
        layers = {"image": FOUR, "text": FOUR}
    model = models.abstract(preset, **arguments or task, **layers)
    description = models.describe(preset, **arguments, **layers)
    assert description.parameters == counted(model)
    assert 0 < description.active_parameters <= description.parameters
    if is_classifier:
        assert model.output_shape == (None, 1000)
        by_name = {layer.name: layer for layer in model._flatten_layers()}
        for part in description.parts[1:]:
            assert part.parameters == counted(by_name[part.name]), part


def counted(layer):
    return sum(int(np.prod(weight.shape)) for weight in layer.trainable_weights)


@pytest.mark.parametrize(("preset", "published", "unit"), [
    # MLP-Mixer, Table 1 (without the head).
    ("mixer_s32", 19, 1e6), ("mixer_s16", 18, 1e6), ("mixer_b32", 60, 1e6),
    ("mixer_b16", 59, 1e6), ("mixer_l32", 206, 1e6), ("mixer_l16", 207, 1e6),
    ("mixer_h14", 431, 1e6),
    # From Sparse to Soft Mixtures of Experts, in units of 100 million.
    ("soft_moe_s14", 18, 1e8),
    ("soft_moe_b16", 37, 1e8),
    ("soft_moe_l16", 131, 1e8),
    ("soft_moe_h14", 541, 1e8),
])  # fmt: skip
def test_published_sizes(preset, published, unit):
    assert round(models.describe(preset).parameters / unit) == published


BLOCKS = {
    "activation": "gelu", "dropout_rate": 0.1, "stochastic_depth": 0.2,
    "layer_norm_epsilon": 1e-5, "layer_scale_initial_value": 0.1, "norm": "rms",
    "gated_mlp": True, "initialization": "siglip", "use_bias": False,
    "rematerialize": True, "seed": 7, "name": "mine", "trainable": False,
}  # fmt: skip
ROUTER = {"name": "sinkhorn_expert_choice", "capacity_factor": 1.5, "noise_std": 0.5}
OF_DECODERS = {
    "router": {"name": "softmax_token_choice", "noise_std": 0.5}, "input_scale": 2.0,
    "zero_experts": 1, "gating_residual": "every_block",
}  # fmt: skip
OF_IMAGES = {**SIZES, **BLOCKS, "patch_size": (4, 2)}
OF_ATTENTION = {
    "attention_dropout": 0.2, "query_key_norm": True, "query_key_norm_bias": True,
    "head_dim": 4, "num_key_value_heads": 1, "key_bias": False, "attention_sinks": True,
}  # fmt: skip
OF_TEXTS = {**pair_models.TEXT, **BLOCKS, **OF_ATTENTION}
NOT_DEFAULT = {
    "vit": {
        **OF_IMAGES, **OF_ATTENTION, "num_heads": 2, "class_token": False,
        "final_norm": False, "position_embedding": "rotary_2d", "rotary_base": 7.0,
        "position_interpolation": "bicubic", "embedding_norm": True,
        "register_tokens": 2, "max_patches": 6,
    },
    "mixer": {**OF_IMAGES, "token_mlp_dim": 6, "token_mixer": "mlp"},
    "text": {
        **OF_TEXTS, "causal": False,
        "final_norm": False, "pooling": "end_of_text", "end_of_text_id": 19,
        "mask_padding": False, "projection_dim": 4, "projection_bias": True,
    },
    "decoder": {
        **OF_TEXTS,
        "gated_mlp": False, "norm": "layer", "use_bias": True, "initialization": "gpt2",
        "positions": "learned", "rope_scaling": 2.0,
        "rope_theta": 500.0, "tied_embeddings": True,
    },
}  # fmt: skip
CLASSES = {"vit": ViTBackbone, "mixer": MixerBackbone, "text": models.TextBackbone}
CLASSES["decoder"] = models.DecoderBackbone


@pytest.mark.parametrize("kind", NOT_DEFAULT)
def test_every_argument_round_trips(kind):
    cls, supplied = CLASSES[kind], NOT_DEFAULT[kind]
    options = OF_DECODERS if kind == "decoder" else {"router": ROUTER}
    moe = MoEConfig(moe_layers=[1], num_experts=4, **options)
    backbone = cls(**supplied, moe=moe, dtype="mixed_bfloat16")
    config = json.loads(json.dumps(backbone.get_config()))
    # No argument is missing from the list above.
    assert set(config) - {"moe", "dtype", "pruning"} <= set(supplied)
    for name, value in supplied.items():
        assert config[name] == json.loads(json.dumps(value)), name
    again = cls.from_config(config)
    assert json.loads(json.dumps(again.get_config())) == config
    assert again.dtype_policy.name == "mixed_bfloat16"
    assert again.moe == backbone.moe
    block = again.get_layer("block_1")
    assert (block.stochastic_depth, block.rematerialize) == (0.2, True)
    assert block.feed_forward.router.noise_std == 0.5


@pytest.mark.parametrize("class_token", [True, False])
def test_features_at_every_depth(class_token):
    backbone = with_weights(MAKERS["vit"](class_token=class_token, **MOE))
    outputs = keras.Model(backbone.input, backbone.features).predict(
        images(), verbose=0
    )
    assert set(outputs) == {"tokens", "pooled", "grid", "block_0", "block_1"}
    patches = outputs["tokens"][:, int(class_token) :]
    assert outputs["grid"].shape == (3, 4, 2, 16)
    assert_same(outputs["grid"][:, 3, 1], patches[:, 7])
    assert_same(outputs["grid"][:, 1, 0], patches[:, 2])
    pooled = outputs["tokens"][:, 0] if class_token else patches.mean(axis=1)
    assert_close(outputs["pooled"], pooled, 1e-5, 1e-5)
    last = backbone.get_layer("final_norm")(outputs["block_1"])
    last = keras.ops.convert_to_numpy(last)
    assert_close(last, outputs["tokens"], 1e-4, 1e-5)
    assert np.abs(outputs["block_0"] - outputs["block_1"]).max() > 1e-3


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("kind", MAKERS)
def test_weights_serve_other_channels(kind, channels, tmp_path):
    backbone = with_weights(MAKERS[kind]())
    backbone.save_to_preset(tmp_path / "saved")
    other = models.from_preset(
        str(tmp_path / "saved"), image_shape=(16, 8, channels), num_classes=2
    ).backbone
    grey = images(2, 16, 8, 1)
    if channels == 1:
        # A grey image means what three equal channels meant.
        assert_close(
            other.predict(grey, verbose=0),
            backbone.predict(np.repeat(grey, 3, axis=-1), verbose=0),
            1e-4,
            1e-4,
        )
        return
    kernel = np.array(backbone.get_layer("patch_embedding").kernel)
    actual = np.array(other.get_layer("patch_embedding").kernel)
    expected = np.concatenate([kernel, kernel[:, :, :1]], axis=2) * 0.75
    assert_close(actual, expected, 1e-6)
    assert other.predict(images(2, 16, 8, 4), verbose=0).shape[0] == 2


@pytest.mark.parametrize("overrides", [
    {"num_selected_experts": 1, "image_shape": (32, 16, 3)},
    {"num_slots": 1},
])  # fmt: skip
def test_soft_routing_keeps_its_slots_and_refuses_others(overrides, tmp_path):
    backbone = with_weights(MAKERS["vit"](router="soft", **MOE))
    slots = np.array(backbone.get_layer("block_1").feed_forward.router.slots)
    backbone.save_to_preset(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"load_weights=False.*SoftRouter"):
        models.from_preset(str(tmp_path / "saved"), **overrides)
    # Overrides that change no slot are allowed: a larger image has no more of them.
    for harmless in ({"num_selected_experts": 2}, {"image_shape": (32, 16, 3)}):
        other = models.from_preset(str(tmp_path / "saved"), **harmless)
        router = other.get_layer("block_1").feed_forward.router
        assert_same(np.array(router.slots), slots)
    assert other.predict(images(2, 32, 16, 3), verbose=0).shape == (2, 33, 16)


@pytest.mark.parametrize(("kind", "arguments"), [
    ("vit", {"position_interpolation": "bicubic"}),
    ("vit", MOE),
    ("mixer", MOE),
])  # fmt: skip
def test_weights_serve_patches_that_grow_with_their_image(kind, arguments, tmp_path):
    backbone = with_weights(MAKERS[kind](**arguments))
    backbone.save_to_preset(tmp_path / "saved")
    other = models.from_preset(
        str(tmp_path / "saved"), image_shape=(32, 24, 3), patch_size=(8, 12)
    )
    # Patches of one colour are themselves when they are resized.
    colours = images(3, 4, 2, 3)
    small, large = (
        colours.repeat(height, axis=1).repeat(width, axis=2)
        for height, width in ((4, 4), (8, 12))
    )
    expected = backbone.predict(small, verbose=0)
    assert_close(other.predict(large, verbose=0), expected, 1e-4, 1e-4)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_smaller_patches_make_a_larger_grid(interpolation, tmp_path):
    backbone = with_weights(MAKERS["vit"](**MOE))
    backbone.save_to_preset(tmp_path / "saved")
    sizes = {"patch_size": (4, 2), "image_shape": (16, 8, 1), "num_classes": 2}
    other = models.from_preset(
        str(tmp_path / "saved"), position_interpolation=interpolation, **sizes
    ).backbone
    assert other.predict(images(2, 16, 8, 1), verbose=0).shape == (2, 17, 16)
    old, new = (
        {weight.path: keras.ops.convert_to_numpy(weight) for weight in model.weights}
        for model in (backbone, other)
    )
    name = "patch_embedding/kernel"
    kernel = resize_patch_kernel(old[name], (4, 2), interpolation)
    kernel = kernel.sum(axis=2, keepdims=True)
    assert_close(new[name], kernel, 1e-5, 1e-6)
    name = "position_embedding/embedding"
    table = resize_positions(old[name], (4, 2), (4, 4), interpolation)
    assert_close(new[name], table, 1e-5, 1e-6)


@pytest.mark.parametrize(("kind", "saved", "overrides"), [
    ("mixer", {}, {"image_shape": (16, 16, 3)}),
    ("vit", {"router": "soft"}, {"router": "softmax_token_choice"}),
])  # fmt: skip
def test_weights_that_cannot_fit_are_refused(kind, saved, overrides, tmp_path):
    MAKERS[kind](**saved, **MOE).save_to_preset(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"fit the arguments \(load_weights=False"):
        models.from_preset(str(tmp_path / "saved"), **overrides)
    started = models.from_preset(
        str(tmp_path / "saved"), load_weights=False, **overrides
    )
    for name, value in overrides.items():
        assert flat_config(started)[name] == value
