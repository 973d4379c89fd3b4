"""The table of docs/weights.md: sizes are what the library counts."""

import re
from pathlib import Path

import pytest

from keras_moe import models
from keras_moe.models import Blueprint

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"


def vit(dim, layers, heads, mlp_dim, size=224, patch=16, **options):
    return Blueprint(models.ViTBackbone, {
        "image_shape": (size, size, 3), "patch_size": patch, "hidden_dim": dim,
        "num_layers": layers, "num_heads": heads, "mlp_dim": mlp_dim, **options,
    })  # fmt: skip


def dinov2(*sizes, patch=14, **options):
    options |= {"layer_scale_initial_value": 1.0, "register_tokens": 4}
    return vit(*sizes, patch=patch, **options)


def dinov3(*sizes, **options):
    rotary = {"position_embedding": "rotary_2d", "key_bias": False}
    return dinov2(*sizes, patch=16, **rotary, **options)


def siglino(*sizes, **options):
    return vit(
        *sizes, 256, register_tokens=4, position_embedding="golden_2d",
        attention_sinks=True, query_key_norm="plain_rms", use_bias=False,
        gated_mlp=True, **options,
    )  # fmt: skip


def siglino_moe(selected):
    router = {"name": "softmax_token_choice", "gates": "sigmoid"}
    router |= {"num_selected_experts": selected, "selection_bias_rate": 1e-3}
    moe = {"moe_layers": "every_1", "num_experts": 28, "expert_mlp_dim": 384}
    moe |= {"gated_experts": True, "expert_use_bias": False, "router": router}
    return siglino(768, 18, 8, 384, head_dim=128, norm="rms", moe=moe)


def siglip2(size, image_size, **image):
    image = {"image": {"image_shape": (image_size, image_size, 3), **image}}
    text = {"text": {"vocabulary_size": 256_000, "max_length": 64}}
    return models.resolve(f"siglip_{size}", {**image, **text})


S, B, L = (384, 12, 6, 1536), (768, 12, 12, 3072), (1024, 24, 16, 4096)
GIANT = (1536, 40, 24, 4096)
# Encoders without heads, except for trained presets.
MODELS = {
    **dict.fromkeys(models.list_presets(trained=True)),
    "gs://vmoe_checkpoints/vmoe_s32_last2_ilsvrc2012_randaug_light1": (
        "vmoe_s32_last2_e8"
    ),
    "gs://vmoe_checkpoints/vmoe_b16_imagenet21k_randaug_strong": "vmoe_b16_every2_e8",
    "hf://tiiuae/siglino-moe-0.3-0.6B": siglino_moe(6),
    "hf://tiiuae/siglino-moe-0.15-0.6B": siglino_moe(2),
    "hf://tiiuae/siglino-70M": siglino(512, 12, 8, 2048, norm="plain_rms"),
    "hf://tiiuae/siglino-30M": siglino(384, 12, 6, 1536, norm="plain_rms"),
    "hf://openai/clip-vit-base-patch32": "clip_b32",
    "hf://openai/clip-vit-base-patch16": "clip_b16",
    "hf://openai/clip-vit-large-patch14": "clip_l14",
    "hf://google/siglip2-base-patch16-256": siglip2("b16", 256),
    "hf://google/siglip2-large-patch16-256": siglip2("l16", 256),
    "hf://google/siglip2-so400m-patch16-256": siglip2("so400m14", 256, patch_size=16),
    "hf://facebook/dinov2-with-registers-small": dinov2(*S),
    "hf://facebook/dinov2-with-registers-base": dinov2(*B),
    "hf://facebook/dinov2-with-registers-large": dinov2(*L),
    "hf://facebook/dinov2-with-registers-giant": dinov2(*GIANT, gated_mlp=True),
    "hf://facebook/dinov3-vits16-pretrain-lvd1689m": dinov3(*S),
    "hf://facebook/dinov3-vits16plus-pretrain-lvd1689m": dinov3(*S, gated_mlp=True),
    "hf://facebook/dinov3-vitb16-pretrain-lvd1689m": dinov3(*B),
    "hf://facebook/dinov3-vitl16-pretrain-lvd1689m": dinov3(*L),
    "hf://facebook/dinov3-vith16plus-pretrain-lvd1689m": dinov3(
        1280, 32, 20, 5120, gated_mlp=True
    ),
    "hf://belfner/vit_small_patch16_lingbot.robbyant": dinov3(*S),
    "hf://belfner/vit_giant_patch16_lingbot.robbyant": dinov3(*GIANT, gated_mlp=True),
    "gs://vit_models/augreg/B_16-*.npz": "vit_b16",
    "gs://mixer_models/imagenet21k/Mixer-B_16.npz": "mixer_b16",
    "hf://openai-community/gpt2": "gpt2",
}


def rows():
    """Names, and the cells after them, of the page's first table."""
    table = PAGE.read_text(encoding="utf-8").split("\n\n| weights |")[1]
    lines = table.split("\n\n")[0].splitlines()[2:]
    return dict(re.fullmatch(r"\| `(\S+)` \| (.*) \|", x).groups() for x in lines)


def test_the_table_comes_first_and_has_all_models():
    page = PAGE.read_text(encoding="utf-8")
    assert page.index("| weights |") < page.index("## ")
    assert rows().keys() == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_true(name):
    model = MODELS[name]
    if isinstance(model, Blueprint):
        costs = model.describe()
    else:
        costs = models.describe(model or name)
    sizes = (costs.parameters, costs.active_parameters)
    expected = " | ".join(f"{x / 1e6:,.1f}M" for x in sizes)
    row = rows()[name]
    assert row.startswith(f"{expected} | ")
    accuracy, licence, use = row.split(" | ")[2:]
    # Every figure has its source, and is else a dash.
    assert accuracy == "-" or "(" in accuracy
    assert licence
    assert use
