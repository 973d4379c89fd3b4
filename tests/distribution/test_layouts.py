"""The rules, and the doors at which numbers that do not divide are refused."""

import re

import keras
import pytest

from keras_moe import distribution, models
from tests.refusals import refuses
from tests.small_models import SMALL

VIT = {**SMALL, "image_shape": (16, 16, 3), "patch_size": 8, "num_heads": 4}
MIXER = {name: size for name, size in VIT.items() if name != "num_heads"}
MIXER["token_mlp_dim"] = 8
OF_IMAGES = ("image_shape", "patch_size")
SEQUENCES = {name: size for name, size in VIT.items() if name not in OF_IMAGES}
TEXT = {"vocabulary_size": 20, "max_length": 6}
CLIP = {"image": VIT, "text": {**SEQUENCES, **TEXT}, "projection_dim": 4}
# A preset has losses of two modalities, whose thresholds are for 32 experts.
LIMOE = {**VIT, **TEXT, "projection_dim": 4, "auxiliary_losses": None}
SWIGLU = {"gated_experts": True, "expert_use_bias": False, "expert_mlp_dim": 42}
SWIGLU["expert_activation"] = "silu"


@pytest.mark.parametrize(("cls", "preset", "config"), [
    (models.CLIPBackbone, "clip_b32", CLIP),
    (models.LIMoEBackbone, "limoe_s32", LIMOE),
    (models.ViTBackbone, "vit_s16", VIT),
    (models.ViTBackbone, "vit_s16", {**VIT, "moe_layers": None}),
    (models.ViTBackbone, "vit_s16", {**VIT, "gated_experts": True}),
    (models.ViTBackbone, "vit_s16", {**VIT, **SWIGLU}),
    (models.ViTBackbone, "vit_s16", {**VIT, "router": "soft"}),
    (models.ViTBackbone, "vit_s16", {**VIT, "router": "mumoe"}),
    (models.MixerBackbone, "mixer_s16", MIXER),
    (models.MixerBackbone, "mixer_s16", {**MIXER, **SWIGLU}),
    (
        models.MixerBackbone,
        "mixer_s16",
        {**MIXER, "router": "mumoe", "token_mixer": "mumoe"},
    ),
])  # fmt: skip
def test_each_rule_has_weights_and_each_weight_one_rule(cls, preset, config):
    plan = distribution.layouts(preset, 8, model_parallel=2, **config)
    backbone = cls.from_config(config)
    assert distribution.layouts(backbone, 8, model_parallel=2) == plan
    for weight in backbone.weights:
        rules = [rule for rule in plan.weights if re.fullmatch(rule, weight.path)]
        assert len(rules) <= 1, weight.path
    for rule, axes in plan.weights.items():
        if "lora_a|" in rule:  # a rule for LoRA's pairs alone
            continue
        if "scale" in rule and not config.get("expert_use_bias", True):
            continue  # a rule for int8's scales, and for biases that there are not
        matched = [w for w in backbone.weights if re.fullmatch(rule, w.path)]
        assert matched, rule
        assert {len(weight.shape) for weight in matched} == {len(axes)}
        if cls is models.CLIPBackbone:
            towers = {weight.path.split("/")[0] for weight in matched}
            assert towers == {"image", "text"}, rule


def test_meshes():
    def meshes(*arguments, **options):
        plan = distribution.layouts("vmoe_b16", *arguments, **options)
        return plan.mesh, plan.expert_mesh

    whole = {"batch": 8}
    assert meshes(8) == (whole, whole)
    assert meshes(8, "batch") == (whole, whole)
    assert meshes(8, 8) == (whole, whole)
    assert meshes(8, 2) == (whole, {"replica": 4, "expert": 2})
    assert meshes(8, 2, 2) == (
        {"batch": 4, "model": 2},
        {"replica": 2, "expert": 2, "model": 2},
    )
    # 32 experts on 64 devices: two replicas of them.
    assert meshes(64) == ({"batch": 64}, {"replica": 2, "expert": 32})
    # 32 experts do not lie on 3 devices: all have all.
    assert distribution.layouts("vmoe_b16", 3).weights == {}
    assert distribution.layouts("vit_b16", 8).weights == {}


@pytest.mark.parametrize(("preset", "arguments", "message"), [
    ("vmoe_b16", {"expert_parallel": 3}, "8 devices.*received: expert_parallel=3"),
    (
        "vmoe_b16",
        {"expert_parallel": "batch", "num_experts": 12},
        r"expert_parallel=8, num_experts=\[12\]",
    ),
    ("vmoe_b16", {"expert_parallel": "all"}, "'all'"),
    ("vit_b16", {"expert_parallel": 8}, r"expert_parallel=8, num_experts=\[\]"),
    ("vit_b16", {"model_parallel": 3}, "8 devices.*model_parallel=3"),
    ("mumoe_mixer_s16_cp", {"model_parallel": 2}, "model_parallel=2"),
    ("vit_b16", {"model_parallel": 8}, "model_parallel=8, num_heads=12"),
    ("vit_b16", {"model_parallel": 4, "mlp_dim": 30}, "=4, mlp_dim=30"),
    ("mixer_s16", {"model_parallel": 4, "token_mlp_dim": 30}, "token_mlp.*=30"),
    ("vmoe_b16", {"batch_size": 12}, "8 devices.*batch_size=12"),
    ("vmoe_b16", {"batch_size": 0}, "batch_size=0"),
    ("vmoe_b61", {}, "vmoe_b61"),
    ("vmoe_b16", {"num_expert": 3}, "num_expert"),
])  # fmt: skip
def test_what_does_not_divide_is_refused(preset, arguments, message):
    refuses(f"(?s){message}", distribution.layouts, preset, 8, **arguments)


@pytest.mark.every_backend
def test_other_backends_are_told_what_works():
    backend = keras.backend.backend()
    if backend == "jax":
        actual = distribution.auto("vmoe_digits", keras.distribution.list_devices()[:1])
        assert type(actual) is keras.distribution.DataParallel
        return
    instead = {"tensorflow": "MirroredStrategy", "torch": "DistributedDataParallel"}
    with pytest.raises(ValueError, match=f"{instead[backend]}.*backend='{backend}'"):
        distribution.auto("vmoe_digits")
