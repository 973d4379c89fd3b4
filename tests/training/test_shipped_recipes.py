"""The recipes that ship: their papers' settings, learning rates, and models."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from keras_moe import models
from keras_moe.data._captions import batch_sizes
from keras_moe.data.augmentation import build_steps
from keras_moe.layers import MuMoE
from keras_moe.models import ContrastiveModel
from keras_moe.training import (
    Contrastive,
    MultiLabel,
    NextToken,
    cooldown_branch,
    list_recipes,
    load_recipe,
)
from keras_moe.training.optimizers import group_factors
from tests.compare import to_numpy

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("s32", "s16", "b32", "b16", "l32", "l16")
EMOJI = ("limoe_emoji", "clip_emoji", "clip_up_emoji")
# Peak, batch, steps, epochs, warm-up, decay, its end, cooldown, weight decay.
PUBLISHED = {
    # google-research/vmoe, configs/vmoe_paper: pretrain_imagenet21k and
    # vmoe_s32_last2_ilsvrc2012_randaug_light1.
    "vmoe_b16_i21k": (8e-4, 4096, None, 300, 10_000, "linear", 1e-5, 0, 0.1),
    "vmoe_s32_i1k": (3e-3, 8192, None, 300, 10_000, "linear", 1e-5, 0, 0.1),
    # The head, schedule and optimizer of common; 7 epochs are an assumption.
    "routers_jft": (8e-4, 4096, None, 7, 10_000, "linear", 1e-5, 0, 0.1),
    # projects/soft_moe/configs: pretrain_jft4b, common.
    "soft_moe_s16_jft": (1e-3, 4096, 4 * 10**6, None, 10**4, "rsqrt", 0, 50_000, 0.03),
    # Table E, strategy 1.
    "moepp_vit_b16_i1k": (5e-4, 4096, None, 300, 2000, "cosine", 5e-5, 0, 0.1),
    # Multilinear Mixture of Experts, Table 7.
    "mumoe_mixer_s16": (1e-3, 4096, None, 300, 10_000, "linear", 0, 0, 1e-4),
    "mumoe_clip_b32": (3e-5, 4096, None, 10, 500, "cosine", 0, 0, 1e-1),
    # 700k steps, and the cooldown that follows.
    "limoe_h14_pairs": (1e-3, 21_502, 825_000, None, 40_000, "rsqrt", 0, 125_000, 1e-5),
    "limoe_laion": (1e-3, 16_384, None, 5, 10_000, "cosine", 0, 0, 1e-5),
    "clip_b16": (5e-4, 32_768, 440_000, None, 2000, "cosine", 0, 0, 0.2),
    "clip_up_b16": (3e-4, 32_768, 350_000, None, 2000, "cosine", 0, 0, 0.05),
    "clip_up_b16_scratch": (5e-4, 32_768, 790_000, None, 2000, "cosine", 0, 0, 0.2),
    "soft_moe_laion": (1e-3, 16_384, 750_000, None, 20_000, "rsqrt", 0, 20_000, 0.1),
}
LIMOE = (1e-3, 16_384, 781_250, None, 40_000, "cosine", 0, 0, 1e-5)
PUBLISHED |= {f"limoe_{size}_pairs": LIMOE for size in SIZES}
OBJECTIVES = {name: load_recipe(name).objective for name in list_recipes()}
PAIRS = [x for x, objective in OBJECTIVES.items() if isinstance(objective, Contrastive)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name):
    actual = load_recipe(name)
    schedule, optimizer, is_limoe = actual.schedule, actual.optimizer, "limoe" in name
    names = "steps epochs warmup_steps decay final_learning_rate cooldown_steps"
    assert PUBLISHED[name] == (
        schedule.learning_rate,
        actual.data.batch_size,
        *(getattr(schedule, name) for name in names.split()),
        optimizer.weight_decay,
    )
    assert optimizer.name == ("vitg_adafactor" if is_limoe else "adamw")
    # Times the learning rate, as these releases have it.
    decay_times = "share_of_peak" if is_limoe else "learning_rate"
    assert optimizer.weight_decay_times == decay_times
    if name not in PAIRS:
        # V-MoE clips H alone (common), but for its ImageNet runs.
        clipping = None if name == "routers_jft" else 1.0
        assert optimizer.gradient_clipping == clipping
        assert schedule.timescale == 10_000
        return
    is_sigmoid = name == "soft_moe_laion"
    assert actual.objective.loss == ("sigmoid" if is_sigmoid else "softmax")
    dtype = "bfloat16" if is_limoe else "float32"
    assert actual.objective.similarity_dtype == dtype
    # Whatever no source prints is marked as the library's own.
    assert is_sigmoid or "ours" in actual.notes


def test_table_7_of_mumoe():
    mixer, clip = load_recipe("mumoe_mixer_s16"), load_recipe("mumoe_clip_b32")
    for actual, dtype in ((mixer, "mixed_bfloat16"), (clip, "mixed_float16")):
        assert (actual.model.dtype, actual.seed) == (dtype, 0)
        assert actual.model.overrides.get("dropout_rate", 0.0) == 0.0
    assert mixer.model.overrides["stochastic_depth"] == 0.1
    assert "stochastic_depth" not in clip.model.overrides
    # Figure 3 fine-tunes DINO likewise.
    dino = load_recipe("mumoe_dino_b16")
    sections = ("data", "optimizer", "schedule", "objective")
    assert all(getattr(dino, x) == getattr(clip, x) for x in sections)
    strengths = {x["name"]: x for x in mixer.data.augment if isinstance(x, dict)}
    assert strengths["randaugment"]["magnitude"] == 15 / 30
    assert strengths["mixup"]["alpha"] == 0.5
    assert clip.data.augment == ["random_resized_crop"]


def test_celeb_a_is_the_papers():
    actual = load_recipe("mumoe_celeb_a")
    head = actual.model.overrides["head"]
    # Table 2: 578K parameters on CLIP's 768 features, beside 30.7K of a linear head.
    assert MuMoE(40, **head).cost((1, 768)).parameters == 578_048
    assert (actual.data.source, actual.data.train_split) == ("tfds:celeb_a", "train")
    assert actual.objective == MultiLabel()
    # Editing Models with Task Arithmetic, appendix B.
    schedule = actual.schedule
    assert (schedule.steps, actual.data.batch_size) == (2000, 128)
    assert (schedule.warmup_steps, schedule.learning_rate) == (200, 1e-5)
    assert actual.optimizer.weight_decay == 0.1


def test_published_mixing_and_heads():
    strengths = {}
    for name in ("vmoe_b16_i21k", "vmoe_s32_i1k"):
        augment = load_recipe(name).data.augment
        by_name = {x.pop("name"): x for x in augment if "name" in x}
        assert by_name["randaugment"] == {"num_ops": 2, "magnitude": 1.0}
        strengths[name] = by_name["mixup"]["alpha"]
    assert strengths == {"vmoe_b16_i21k": 0.5, "vmoe_s32_i1k": 0.2}
    for name, bias in {
        "vmoe_b16_i21k": -10.0,
        **dict.fromkeys(("vmoe_s32_i1k", "routers_jft"), -math.log(1000)),
        "soft_moe_s16_jft": -math.log(1000),
    }.items():
        small = {"hidden_dim": 32, "mlp_dim": 32, "num_experts": 2, "num_heads": 2}
        arguments = {**small, "image_shape": (32, 32, 3)}
        model = load_recipe(name, model=arguments).new_model(1000)
        assert model.multi_label
        np.testing.assert_allclose(to_numpy(model.output_dense.bias), bias, rtol=1e-6)
        # The representation is as wide as the backbone.
        has_representation = name in ("vmoe_s32_i1k", "routers_jft")
        assert model.representation_dim == (32 if has_representation else None)
    # A scalar weight decay, hence of all weights.
    assert load_recipe("routers_jft").optimizer.groups == []


@pytest.mark.parametrize("name", list_recipes())
def test_shipped_recipes_make_models(name):
    """All that a run needs but the data, with no weight in memory."""
    actual = load_recipe(name)
    assert actual.name == name
    assert actual.reference
    assert re.search(rf"\b{name}\b", (ROOT / "docs" / "training.md").read_text())
    # The epochs of LAION are long.
    batches = 30_000
    settings, learning_rate = actual.schedule, actual.learning_rate(batches)
    steps = actual.total_steps(batches)
    peak = float(learning_rate(settings.number_of_steps("warmup_steps", steps)))
    assert peak == pytest.approx(settings.learning_rate)
    last = float(learning_rate(steps))
    assert last == pytest.approx(settings.final_learning_rate, abs=1e-9)
    build_steps(actual.data.augment, (32, 32, 3), actual.seed)
    preset, arguments = actual.model.preset, actual.model.overrides
    if "://" in preset or name in PAIRS:
        return
    classes = None if isinstance(actual.objective, NextToken) else 10
    assert models.describe(preset, num_classes=classes, **arguments).parameters
    model = actual.abstract_model(num_classes=classes)
    if not actual.optimizer.groups:
        return
    # Kernels decay, biases and norms do not.
    shapes = {weight.path: weight.shape for weight in model.trainable_variables}
    paths = [*shapes]
    for path, factors in zip(
        paths, group_factors(actual.optimizer.groups, paths), strict=True
    ):
        decays = path.endswith(("kernel", "router/scale"))
        if name == "mumoe_gpt2":
            # As in nanoGPT: all matrices, embeddings included. Biases are by head here.
            decays = len(shapes[path]) > 1 and not path.endswith("bias")
        head = name == "soft_moe_s16_jft" and path == "predictions/kernel"
        assert factors.weight_decay == (100.0 if head else float(decays)), path


def test_groups_are_large_enough_and_sizes_differ_in_their_preset():
    for name in ("limoe_b16_pairs", "clip_up_b16", "clip_up_b16_scratch"):
        model = load_recipe(name).model
        config = models.resolve(model.preset, model.overrides).config
        # Groups below 32 examples are unstable: LIMoE, appendix E.5.
        towers = [config, *(config.get(x) or {} for x in ("image", "text"))]
        mixtures = [tower["moe"] for tower in towers if tower.get("moe")]
        assert mixtures
        assert all(moe["examples_per_group"] >= 128 for moe in mixtures)
    first, *others = (load_recipe(f"limoe_{size}_pairs") for size in SIZES)
    expected = first.settings()
    for size, other in zip(SIZES[1:], others):
        assert other.model.preset == f"limoe_{size}"
        actual = other.settings()
        assert actual.keys() == expected.keys()
        differing = {name for name in actual if actual[name] != expected[name]}
        assert differing == {"name", "description", "model.preset"}


def test_the_cooldowns_of_limoe_h14():
    run = load_recipe("limoe_h14_pairs")
    # The rate falls with the square root, then in a line.
    for recipe, start, steps in (
        (run, 700_000, 125_000),
        (cooldown_branch(run, 650_000, 40_000), 650_000, 40_000),
    ):
        assert recipe.schedule.steps == start + steps
        rate = 1e-3 / math.sqrt(1 + (start - 40_000) / 10_000)
        actual = [
            float(recipe.learning_rate(1000)(step))
            for step in (start, start + steps // 2, start + steps)
        ]
        np.testing.assert_allclose(actual, [rate, rate / 2, 0], rtol=1e-5, atol=1e-9)
    # Pairs and classes are 3:1, and two of the branches have one of them alone.
    assert run.data.source == {"webdataset:pairs": 3, "folder:jft4b": 1}
    assert batch_sizes(run.data.source, run.data.batch_size, 1) == {
        "webdataset:pairs": 16_127,
        "folder:jft4b": 5375,
    }
    assert run.data.evaluated_source == "webdataset:pairs"
    # Two of the branches have one source alone; templates are for classes.
    for source, templates in (("folder:jft4b", ["{}"]), ("webdataset:pairs", None)):
        changes = {"data.source": source, "data.test_split": "val"}
        changes["data.templates"] = templates
        alone = cooldown_branch(run, 650_000, 40_000, **changes).data
        assert (alone.evaluated_source, alone.templates) == (source, templates)
    # Intervals of 12.5k meet each of these steps.
    assert all(step % 12_500 == 0 for step in (650_000, 700_000, 825_000))


@pytest.mark.parametrize(
    "name", ["limoe_s32_pairs", "clip_up_b16", "soft_moe_laion", *EMOJI]
)
def test_models_compile_and_kernels_alone_decay(name):
    actual = load_recipe(name)
    model = actual.abstract_model(None)
    assert isinstance(model, ContrastiveModel)
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
    model = load_recipe("soft_moe_laion").abstract_model(None)
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
