"""Recipes of pairs: the papers' settings, their learning rates, and weight decay."""

import math

import numpy as np
import pytest

from keras_moe import models
from keras_moe.data._captions import batch_sizes
from keras_moe.models import ContrastiveModel
from keras_moe.training import Contrastive, cooldown_branch, list_recipes, load_recipe
from keras_moe.training.optimizers import group_factors
from tests.symbolic import symbolic_model

SIZES = ("s32", "s16", "b32", "b16", "l32", "l16")
EMOJI = ("limoe_emoji", "clip_emoji", "clip_up_emoji")
# Peak, batch, steps, epochs, warm-up, decay, cooldown, weight decay, its factor,
# optimizer.
PUBLISHED = {
    **{
        f"limoe_{size}_pairs": (
            *(1e-3, 16_384, 781_250, None, 40_000, "cosine", 0),
            *(1e-5, "share_of_peak", "vitg_adafactor"),
        )
        for size in SIZES
    },
    # 700k steps, and the cooldown that follows.
    "limoe_h14_pairs": (
        *(1e-3, 21_502, 825_000, None, 40_000, "rsqrt", 125_000),
        *(1e-5, "share_of_peak", "vitg_adafactor"),
    ),
    "limoe_laion": (
        *(1e-3, 16_384, None, 5, 10_000, "cosine", 0),
        *(1e-5, "share_of_peak", "vitg_adafactor"),
    ),
    "clip_b16": (
        *(5e-4, 32_768, 440_000, None, 2000, "cosine", 0),
        *(0.2, "learning_rate", "adamw"),
    ),
    "clip_up_b16": (
        *(3e-4, 32_768, 350_000, None, 2000, "cosine", 0),
        *(0.05, "learning_rate", "adamw"),
    ),
    "clip_up_b16_scratch": (
        *(5e-4, 32_768, 790_000, None, 2000, "cosine", 0),
        *(0.2, "learning_rate", "adamw"),
    ),
    "soft_moe_laion": (
        *(1e-3, 16_384, 750_000, None, 20_000, "rsqrt", 20_000),
        *(0.1, "learning_rate", "adamw"),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name):
    actual = load_recipe(name)
    schedule, optimizer = actual.schedule, actual.optimizer
    assert PUBLISHED[name] == (
        schedule.learning_rate,
        actual.data.batch_size,
        schedule.steps,
        schedule.epochs,
        schedule.warmup_steps,
        schedule.decay,
        schedule.cooldown_steps,
        optimizer.weight_decay,
        optimizer.weight_decay_times,
        optimizer.name,
    )
    assert schedule.final_learning_rate == 0.0
    is_sigmoid = name == "soft_moe_laion"
    assert actual.objective.loss == ("sigmoid" if is_sigmoid else "softmax")
    is_limoe = name.startswith("limoe")
    dtype = "bfloat16" if is_limoe else "float32"
    assert actual.objective.similarity_dtype == dtype
    # Whatever no source prints is marked as the library's own.
    assert is_sigmoid or "ours" in actual.notes


def test_every_recipe_of_pairs_is_here():
    objectives = {name: load_recipe(name).objective for name in list_recipes()}
    pairs = {name for name, x in objectives.items() if isinstance(x, Contrastive)}
    assert pairs == {*PUBLISHED, *EMOJI}


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "_b16" in name])
def test_groups_are_large_enough(name):
    model = load_recipe(name).model
    config = models.resolve(model.preset, model.overrides).config
    # Groups below 32 examples are unstable: LIMoE, appendix E.5.
    towers = [config, *(config.get(x) or {} for x in ("image", "text"))]
    mixtures = [tower["moe"] for tower in towers if tower.get("moe")]
    assert mixtures or name == "clip_b16"
    assert all(moe["examples_per_group"] >= 128 for moe in mixtures)


def test_sizes_of_limoe_differ_in_their_preset_alone():
    words = ("name", "description", "model.preset")
    first, *others = (
        {
            name: value
            for name, value in load_recipe(f"limoe_{size}_pairs").settings().items()
            if name not in words
        }
        for size in SIZES
    )
    assert all(other == first for other in others)
    for size in SIZES:
        assert load_recipe(f"limoe_{size}_pairs").model.preset == f"limoe_{size}"


def rates(recipe, *steps):
    learning_rate = recipe.learning_rate(1000)
    return [float(learning_rate(step)) for step in steps]


def test_learning_rates_by_hand():
    # Half of the warm-up, its end, the middle of the cosine, its end.
    limoe = rates(
        load_recipe("limoe_s32_pairs"), 20_000, 40_000, 40_000 + 741_250 // 2, 781_250
    )
    np.testing.assert_allclose(limoe, [5e-4, 1e-3, 5e-4, 0], atol=1e-9)
    dense = rates(load_recipe("clip_b16"), 1000, 2000, 221_000, 440_000)
    np.testing.assert_allclose(dense, [2.5e-4, 5e-4, 2.5e-4, 0], atol=1e-9)
    sparse = rates(load_recipe("clip_up_b16"), 1000, 2000, 176_000, 350_000)
    np.testing.assert_allclose(sparse, [1.5e-4, 3e-4, 1.5e-4, 0], atol=1e-9)
    # A timescale of 10k: after three of them the rate is half, and a square root of
    # 1 + 71 is that at the cooldown.
    soft = rates(load_recipe("soft_moe_laion"), 50_000, 730_000, 740_000, 750_000)
    last = 1e-3 / math.sqrt(1 + 71)
    np.testing.assert_allclose(soft, [5e-4, last, last / 2, 0], rtol=1e-5, atol=1e-9)


def test_the_cooldowns_of_limoe_h14():
    run = load_recipe("limoe_h14_pairs")
    after = {
        step: 1e-3 / math.sqrt(1 + (step - 40_000) / 10_000) for step in (65e4, 7e5)
    }
    actual = rates(run, 70_000, 650_000, 700_000, 762_500, 825_000)
    expected = [5e-4, after[65e4], after[7e5], after[7e5] / 2, 0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-9)
    branch = cooldown_branch(run, 650_000, 40_000)
    assert branch.schedule.steps == 690_000
    actual = rates(branch, 650_000, 670_000, 690_000)
    expected = [after[65e4], after[65e4] / 2, 0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-9)
    # Pairs and classes are 3:1, and two of the branches have one of them alone.
    assert run.data.source == {"webdataset:pairs": 3, "folder:jft4b": 1}
    assert batch_sizes(run.data.source, run.data.batch_size, 1) == {
        "webdataset:pairs": 16_127,
        "folder:jft4b": 5375,
    }
    assert run.data.evaluated_source == "webdataset:pairs"
    # The changes are those of the notes.
    changes = [text.split(")")[0] for text in run.notes.split("data.source=")[1:]]
    assert len(changes) == 2
    for text in changes:
        source, *others = text.split()
        changed = {"data.source": source}
        for other in others:
            name, value = other.split("=")
            changed[name] = None if value == "null" else value
        alone = cooldown_branch(run, 650_000, 40_000, **changed).data
        assert (alone.source, alone.evaluated_source) == (source, source)
        assert alone.test_split == "val"
        # Templates are for classes alone.
        assert (alone.templates is None) == (source == "webdataset:pairs")
    # Intervals of 12.5k meet each of these steps.
    assert all(step % 12_500 == 0 for step in (650_000, 700_000, 825_000))


@pytest.mark.parametrize(
    "name", ["limoe_s32_pairs", "clip_up_b16", "soft_moe_laion", *EMOJI]
)
def test_models_compile_and_kernels_alone_decay(name):
    actual = load_recipe(name)
    model = symbolic_model(lambda: actual.new_model(None))
    assert isinstance(model, ContrastiveModel)
    actual.compile(model, 30_000)
    paths = [weight.path for weight in model.trainable_variables]
    factors = group_factors(actual.optimizer.groups, paths)
    for path, factor in zip(paths, factors, strict=True):
        assert factor.learning_rate == 1.0, path
        assert factor.weight_decay == float(path.endswith("kernel")), path
    assert any(path.endswith("experts/hidden_kernel") for path in paths) == (
        name != "clip_emoji"
    )
    assert any("bias" in path for path in paths)


def test_soft_moe_has_the_releases_model():
    settings = load_recipe("soft_moe_laion").model
    costs = models.describe(settings.preset, **settings.overrides)
    # The images' 922M, the text tower's 85M and the embedding of 32,000 tokens.
    assert costs.parameters == pytest.approx(922e6 + 85e6 + 24.6e6, rel=0.005)
    model = symbolic_model(lambda: load_recipe("soft_moe_laion").new_model(None))
    config = model.backbone.get_config()
    image, text = config["image"], config["text"]
    assert (image["hidden_dim"], text["hidden_dim"]) == (384, 768)
    assert text["projection_dim"] == 384
    assert (text["max_length"], text["vocabulary_size"]) == (16, 32_000)
    assert image["query_key_norm"]
    assert text["query_key_norm"]
    assert image["moe"]["moe_layers"] == [6, 7, 8, 9, 10, 11]
    assert config["temperature"]["scale"] == 10.0
    assert config["temperature"]["bias"] == -10.0


@pytest.mark.parametrize("name", EMOJI)
def test_emoji_presets_are_small(name):
    actual = load_recipe(name)
    assert actual.model.preset == name
    assert 4e5 < models.describe(name).parameters < 1.2e6
    assert actual.data.source == "emoji"
    assert actual.objective.tokenizer is None
    # Arrows and hands have a left and a right.
    assert "flip" not in actual.data.augment
