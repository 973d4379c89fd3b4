"""Small models of every kind, each with a block that tests train or freeze."""

from keras_moe import models, training
from tests.pair_models import IMAGE, MOE, TEXT, clip, limoe
from tests.small_models import GPT2

_TEXT_MOE = {"zero_experts": 1, "copy_experts": 1, **MOE}
_MUMOE = {"router": "mumoe", "moe_layers": [1], "num_experts": 4}
_NO_HEADS = {name: value for name, value in IMAGE.items() if name != "num_heads"}


def vit(head=None, **kwargs):
    backbone = models.ViTBackbone.from_config({**IMAGE, "seed": 3, **kwargs})
    return models.ViTImageClassifier(backbone, 3, **(head or {}))


def mixer(**kwargs):
    config = {**_NO_HEADS, "token_mlp_dim": 4, "seed": 3, **kwargs}
    return models.MixerImageClassifier(models.MixerBackbone.from_config(config), 3)


def lm(**kwargs):
    return models.CausalLM(
        models.DecoderBackbone.from_config({**TEXT, "seed": 3, **kwargs})
    )


def upcycled():
    dense = vit()
    dense.backbone.get_layer("block_1").trainable = False
    return training.upcycle(dense, num_experts=2, moe_layers=[1])[0]


def siglip():
    return models.ContrastiveModel(clip({}, temperature="siglip"))


KEPT = {"block_1": [0, 2]}
# Each with a block that gets trained although its backbone is frozen.
KINDS = {
    "vit": (vit, "block_1"),
    "vmoe": (lambda: vit(**MOE), "block_1"),
    "soft_moe": (lambda: vit(**{**MOE, "router": "soft"}), "block_1"),
    "moepp": (lambda: vit(**{**MOE, "zero_experts": 1}), "block_1"),
    "mumoe": (lambda: vit(**_MUMOE), "block_1"),
    "mumoe head": (lambda: vit({"head": {"num_experts": 2, "rank": 2}}), "block_0"),
    "map head": (lambda: vit({"pooling": "map", "representation_dim": 4}), "block_0"),
    "mixer": (lambda: mixer(**MOE), "block_1"),
    "mumoe_mixer": (lambda: mixer(**_MUMOE), "block_1"),
    "clip": (lambda: models.ContrastiveModel(clip({})), "image/block_0"),
    "clip_up": (lambda: models.ContrastiveModel(clip()), "text/block_1"),
    "siglip": (siglip, "text/block_0"),
    "limoe": (lambda: models.ContrastiveModel(limoe()), "image/block_1"),
    "gpt2": (lambda: lm(**GPT2), "block_1"),
    "moepp_lm": (lambda: lm(**_TEXT_MOE), "block_1"),
    "upcycled": (upcycled, "block_1"),
    "pruned": (lambda: vit(**MOE).with_kept_experts(KEPT), "block_1"),
}
