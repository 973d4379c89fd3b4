"""What fresh models start from, compared with the published codes."""

import hashlib
import re
import warnings

import keras
import numpy as np
import pytest

from keras_moe import models
from tests.compare import assert_close, assert_same
from tests.refusals import refuses
from tests.small_models import presets_of_each_kind

PRESETS = models.builtin_presets()
D, H, L, TOKENS = 64, 128, 2, 32
# Pixels of a patch times channels.
PATCH = 8 * 8 * 3
SIZES = {"num_layers": L, "hidden_dim": D, "num_heads": 2, "mlp_dim": H}
IMAGES = {"image_shape": (32, 32, 3), "patch_size": 8}
TEXTS = {"vocabulary_size": 1100, "max_length": 128}
OWN = {
    "ViTBackbone": IMAGES,
    "MixerBackbone": {**IMAGES, "token_mlp_dim": TOKENS},
    "DecoderBackbone": TEXTS,
    "LIMoEBackbone": {**IMAGES, **TEXTS},
    "CLIPBackbone": {"image": IMAGES, "text": {**TEXTS, "projection_dim": D}},
}


def fresh(name, **overrides):
    """A small model with a preset's settings and new weights."""
    preset = PRESETS[name]
    sizes = {**SIZES, **OWN[preset["backbone"]]}
    if preset["backbone"] == "MixerBackbone":
        del sizes["num_heads"]
    config = preset["config"]
    if "rank" in config and isinstance(config["rank"], list):
        # Ranks as large as these models' sizes.
        sizes["rank"] = [4] * len(config["rank"])
    if isinstance(config.get("moe_layers"), list) or "_last2_" in name:
        sizes["moe_layers"] = [1]
    if config.get("num_experts", 0) in (16, 32, 128, 256):
        sizes["num_experts"] = 8
    if preset["task"].endswith("ImageClassifier"):
        sizes["num_classes"] = 10
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Expected threshold", UserWarning)
        return models.from_preset(name, load_weights=False, **{**sizes, **overrides})


def parts(model):
    """Weights by path; experts that should differ are parts of their own."""
    for weight in model.weights:
        value = keras.ops.convert_to_numpy(weight)
        if weight.path.endswith("seed_generator_state"):
            continue
        if "/experts/" in weight.path and value.ndim > 1:
            for index, expert in enumerate(value):
                yield f"{weight.path}[{index}]", expert
        else:
            yield weight.path, value


def start_alike(model):
    """Experts of one layer that start from the same values, as V-MoE's do."""
    values = dict(parts(model))
    return {
        path
        for path, value in values.items()
        if "[" in path
        and not path.endswith("[0]")
        and value.std() > 0
        and np.array_equal(value, values[re.sub(r"\[\d+\]", "[0]", path)])
    }


def correlated(model, alike):
    """Pairs of weights whose first values are correlated."""
    # A tensor ring's expert factors are diagonal.
    drawn = {path: value[value != 0] for path, value in parts(model)}
    drawn = {
        path: value for path, value in drawn.items() if value.size and np.ptp(value) > 0
    }
    found = []
    # Seven standard errors: of a million pairs none has it by chance.
    for length, limit in ((32, 0.85), (1024, 0.22)):
        names = [
            path
            for path, value in drawn.items()
            if value.size >= length and path not in alike
        ]
        table = np.corrcoef([drawn[name][:length] for name in names])
        rows, columns = np.nonzero(np.triu(np.abs(table), 1) > limit)
        found += [(names[a], names[b]) for a, b in zip(rows, columns)]
    return found


GLOROT, LINEAR = (2 / (D + H)) ** 0.5, 3**-0.5
# Standard deviations by path. V-MoE and ViT: Glorot uniform for attention's D x D
# matrices and the MLPs, LeCun normal elsewhere, biases of MLPs of 1e-6.
VIT = {
    r"attention/(query|key|value|attention_output)/kernel": D**-0.5,
    r"(mlp/hidden/|mlp/output/|experts/hidden_|experts/output_|experts/gate_)kernel": (
        GLOROT
    ),
    r"(mlp/hidden/|mlp/output/|experts/hidden_|experts/output_)bias": 1e-6,
    r"patch_embedding/kernel": PATCH**-0.5,
    r"position_embedding/embedding": 0.02,
    r"(router|zero_computation_experts|pre_logits)/kernel": D**-0.5,
    r"projection/kernel": D**-0.5,
    # LeCun normal with a fan-in of D x E, as Flax counts it.
    r"router/slots": (8 * D) ** -0.5,
    # MoE++'s constant experts.
    r"zero_computation_experts/vector": 1.0,
    # Attention pooling: Glorot uniform of 1 x D.
    r"pooler/probe": (2 / (1 + D)) ** 0.5,
}
LIMOE = {
    **VIT,
    r"token_embedding/embeddings": D**-0.5,
    r"text_positions/embedding": 0.02,
}
SHARED_CLIP_UP = {
    **VIT,
    r"token_embedding/embeddings": 0.02,
    r"text_positions/embedding": 0.01,
}
SIGLIP = {
    r"(position_embedding|text_positions)/embedding|token_embedding/embeddings": (
        D**-0.5
    ),
    **VIT,
}
# muMoE: expert factors N(1, 1), later levels 1, others as PyTorch's linear layers.
FACTORS = r"moe/(hidden|output)/(expert_factor_\d|input_factor|output_factor|core)"
MIXER = {
    r"token_mlp/hidden/kernel": 16**-0.5,
    r"token_mlp/output/kernel": TOKENS**-0.5,
    r"block_\d/mlp/hidden/kernel": D**-0.5,
    r"block_\d/mlp/output/kernel": H**-0.5,
    r"patch_embedding/kernel": PATCH**-0.5,
    FACTORS: None,
}
MUMOE_MIXER = {FACTORS: None, r"patch_embedding/(kernel|bias)": LINEAR * PATCH**-0.5}
MUMOE_VIT = {**VIT, FACTORS: None}
GPT2 = {
    r"attention/(query|key|value)/kernel|mlp/hidden/kernel": 0.02,
    r"attention_output/kernel|mlp/output/kernel": 0.02 / (2 * L) ** 0.5,
    r"token_embedding/embeddings|text_positions/embedding": 0.02,
    FACTORS: None,
}
LLAMA = {r"zero_computation_experts/vector": 1.0, r"(kernel|embeddings)": 0.02}
# CLIP's image tower is left as PyTorch makes it; the text tower is scaled.
CLIP = {
    r"image/.*attention/(query|key|value)/kernel": (2 / (4 * D)) ** 0.5,
    r"image/.*attention_output/kernel": LINEAR * D**-0.5,
    r"image/.*hidden[/_](kernel|bias)": LINEAR * D**-0.5,
    r"image/.*output[/_](kernel|bias)": LINEAR * H**-0.5,
    r"image/patch_embedding/kernel": LINEAR * PATCH**-0.5,
    r"image/(position_embedding/embedding|class_token/token)": D**-0.5,
    r"text/.*attention/(query|key|value)/kernel": D**-0.5,
    r"text/.*attention_output/kernel": D**-0.5 * (2 * L) ** -0.5,
    r"text/.*hidden[/_]kernel": (2 * D) ** -0.5,
    r"text/.*hidden[/_]bias": LINEAR * D**-0.5,
    r"text/.*output[/_]kernel": D**-0.5 * (2 * L) ** -0.5,
    r"text/.*output[/_]bias": LINEAR * H**-0.5,
    r"text/token_embedding/embeddings": 0.02,
    r"text/text_positions/embedding": 0.01,
    r"(image|text)/projection/kernel": D**-0.5,
    r"router/kernel": D**-0.5,
}


def published(name):
    """The spreads that a preset's weights should have."""
    preset = PRESETS[name]
    if name.endswith(("_emoji", "_python")):
        # Ours: ViT's, and CLIP's text embeddings.
        return SHARED_CLIP_UP
    if preset["backbone"] == "CLIPBackbone":
        return SIGLIP if name.startswith("siglip") else CLIP
    if preset["backbone"] == "LIMoEBackbone":
        return LIMOE if name.startswith("limoe") else SHARED_CLIP_UP
    if preset["backbone"] == "DecoderBackbone":
        return GPT2 if "gpt2" in name else LLAMA
    if preset["backbone"] == "MixerBackbone":
        return MUMOE_MIXER if name.startswith("mumoe_mixer") else MIXER
    return MUMOE_VIT if name.startswith("mumoe") else VIT


def wrong_spreads(model, spreads):
    """Weights without the mean 0 and the standard deviation of the published code."""
    wrong = []
    for weight in model.trainable_weights:
        value = keras.ops.convert_to_numpy(weight).astype("float64")
        found = [v for p, v in spreads.items() if re.search(p, weight.path)]
        if not found:
            # Norms, most biases, zero heads and scales.
            if value.std() > 0:
                wrong.append((weight.path, value.std(), "a constant"))
            continue
        if found[0] is None:
            continue
        # Experts that start alike are one draw.
        count = np.unique(value).size
        if not abs(value.std() / found[0] - 1) < 4.5 / (2 * count) ** 0.5:
            wrong.append((weight.path, value.std(), found[0]))
        if not abs(value.mean()) < 4.5 * found[0] / count**0.5:
            wrong.append((weight.path, value.mean(), "mean 0"))
    return wrong


@pytest.mark.parametrize("name", presets_of_each_kind())
def test_no_two_weights_start_alike_and_all_are_spread_as_published(name):
    model = fresh(name, seed=3)
    alike = start_alike(model)
    experts = {path for path, value in parts(model) if "[" in path}
    later = {path for path in experts if not path.endswith("[0]")}
    # V-MoE's and Soft MoE's experts start alike, CLIP-UP's are copies of an MLP.
    is_shared = "moepp" not in name and "_lm_" not in name
    assert correlated(model, alike) == []
    assert wrong_spreads(model, published(name)) == []
    biases = {path for path in later if "bias" in path}
    if experts and is_shared:
        assert alike >= later - biases
    elif experts:
        assert not alike


def values(model):
    return {w.path: keras.ops.convert_to_numpy(w) for w in model.trainable_weights}


def test_a_seed_decides_in_any_process_and_keras_seed_without_one():
    first, again, other = (
        values(fresh("vmoe_s16", seed=seed, representation_dim=D)) for seed in (1, 1, 2)
    )
    for path, value in first.items():
        assert_same(value, again[path])
        assert value.std() == 0 or np.abs(value - other[path]).max() > 0
    drawn = []
    for seed in (5, 5, 6):
        keras.utils.set_random_seed(seed)
        drawn.append(values(fresh("vmoe_s16"))["block_0/mlp/hidden/kernel"])
    assert_same(drawn[0], drawn[1])
    assert np.abs(drawn[0] - drawn[2]).max() > 0


@pytest.mark.every_backend
def test_values_are_the_same_on_every_backend():
    model = fresh("moepp_lm_0.6b", seed=1)
    found = values(model)
    # LLaMA's N(0, 0.02) by NumPy's Philox, keyed by BLAKE2b of seed, class and path.
    for path, stream in (
        ("block_0/attention/query/kernel", ""),
        ("block_1/moe/experts/gate_kernel", "/0"),
        ("token_embedding/reverse_embeddings", ""),
    ):
        name = f"1/DecoderBackbone/{path}{stream}"
        key = hashlib.blake2b(name.encode(), digest_size=16).digest()
        philox = np.random.Philox(key=int.from_bytes(key, "little"))
        drawn = np.random.Generator(philox).standard_normal(64, dtype="float32")
        value = found[path].ravel()[:64]
        assert_close(value, 0.02 * drawn, 1e-6)


def test_rules_of_the_users_own_come_before_the_layers():
    rules = {
        r".*/mlp/hidden/kernel": "he_normal",
        r".*/experts/hidden_kernel": keras.initializers.Constant(0.5),
    }
    model = fresh("vmoe_s16", initialization=rules)
    found = values(model)
    assert abs(found["block_0/mlp/hidden/kernel"].std() / (2 / D) ** 0.5 - 1) < 0.05
    assert np.all(found["block_1/moe/experts/hidden_kernel"] == 0.5)
    assert abs(found["block_1/moe/experts/output_kernel"].std() / GLOROT - 1) < 0.05
    again = type(model).from_config(model.get_config())
    assert np.all(values(again)["block_1/moe/experts/hidden_kernel"] == 0.5)
    with pytest.warns(UserWarning, match="No weight has a path like .*mlp/hiden"):
        fresh("vit_s16", initialization={".*mlp/hiden/kernel": "zeros"})


@pytest.mark.parametrize(("name", "value", "message"), [
    ("vit_s16", "bert", "Expected initialization"),
    ("vit_s16", {"kernel": "no_such_initializer"}, "Expected initialization"),
    ("vit_s16", {"(": "zeros"}, "patterns of weight paths; received: '\\('"),
    ("gpt2", "mumoe_mixer", "initialization for DecoderConfig"),
])  # fmt: skip
def test_unknown_initializations_are_refused(name, value, message):
    refuses(message, fresh, name, initialization=value)
