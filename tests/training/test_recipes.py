"""Recipes: settings as data, and the training that follows from them."""

import json
import math
import re
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe import data, models
from keras_moe.data.augmentation import build_steps
from keras_moe.layers import MuMoE
from keras_moe.training import (
    Classification,
    Contrastive,
    ModelConfig,
    MultiLabel,
    Recipe,
    list_recipes,
    load_recipe,
    train,
    warmup_schedule,
)
from keras_moe.training.optimizers import group_factors
from tests.symbolic import symbolic_model
from tests.training.runs import changed, short_recipe

to_numpy = keras.ops.convert_to_numpy
ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "image_shape": (4, 4, 1),
    "patch_size": 2,
    "hidden_dim": 4,
    "num_layers": 1,
    "token_mlp_dim": 4,
    "mlp_dim": 4,
    "num_experts": 2,
}


def recipe(**settings):
    needed = {
        "preset": "mumoe_mixer_s16_cp",
        "epochs": 3,
        "batch_size": 128,
        "learning_rate": 0.1,
        "model_arguments": SMALL,
    }
    return short_recipe(**{**needed, **settings})


def linear_model(multi_label=False):
    """A stand-in for a classifier in `compile` and `train`, quick to compile."""
    model = keras.Sequential(
        [keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    model.multi_label, model.output_activation = multi_label, None
    model.backbone = type("Backbone", (), {"image_shape": (4, 4, 1)})
    return model


@pytest.fixture
def linear(monkeypatch):
    monkeypatch.setattr(Recipe, "new_model", lambda self, num_classes: linear_model())


# The files


def test_table_7():
    mixer, clip = load_recipe("mumoe_mixer_s16"), load_recipe("mumoe_clip_b32")
    for actual, expected in (
        (mixer, (1e-3, 4096, 1e-4, 10_000, 300, "mixed_bfloat16", 0)),
        (clip, (3e-5, 4096, 1e-1, 500, 10, "mixed_float16", 0)),
    ):
        assert expected == (
            actual.schedule.learning_rate,
            actual.data.batch_size,
            actual.optimizer.weight_decay,
            actual.schedule.warmup_steps,
            actual.schedule.epochs,
            actual.model.dtype,
            actual.seed,
        )
        assert actual.model.overrides.get("dropout_rate", 0.0) == 0.0
        assert actual.optimizer.gradient_clipping == 1.0
        assert actual.optimizer.name == "adamw"
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


PUBLISHED = {
    # google-research/vmoe, configs/vmoe_paper: pretrain_imagenet21k and
    # vmoe_s32_last2_ilsvrc2012_randaug_light1.
    "vmoe_b16_i21k": (8e-4, 4096, 300, None, 10_000, "linear", 1e-5, 0, 0.1),
    "vmoe_s32_i1k": (3e-3, 8192, 300, None, 10_000, "linear", 1e-5, 0, 0.1),
    # The head, schedule and optimizer of common; 7 epochs are an assumption.
    "routers_jft": (8e-4, 4096, 7, None, 10_000, "linear", 1e-5, 0, 0.1),
    # projects/soft_moe/configs: pretrain_jft4b, common.
    "soft_moe_s16_jft": (1e-3, 4096, None, 4 * 10**6, 10**4, "rsqrt", 0, 50_000, 0.03),
    # Table E, strategy 1.
    "moepp_vit_b16_i1k": (5e-4, 4096, 300, None, 2000, "cosine", 5e-5, 0, 0.1),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name):
    actual = load_recipe(name)
    schedule = actual.schedule
    assert PUBLISHED[name] == (
        schedule.learning_rate,
        actual.data.batch_size,
        schedule.epochs,
        schedule.steps,
        schedule.warmup_steps,
        schedule.decay,
        schedule.final_learning_rate,
        schedule.cooldown_steps,
        actual.optimizer.weight_decay,
    )
    # V-MoE clips H alone (common), but for its ImageNet runs.
    clipping = None if name == "routers_jft" else 1.0
    assert actual.optimizer.name == "adamw"
    assert actual.optimizer.gradient_clipping == clipping
    # Times the learning rate, as these releases have it.
    assert actual.optimizer.weight_decay_times == "learning_rate"
    assert schedule.timescale == 10_000


def test_published_mixing_and_heads():
    strengths = {}
    for name in ("vmoe_b16_i21k", "vmoe_s32_i1k"):
        augment = load_recipe(name).data.augment
        by_name = {x["name"]: x for x in augment if "name" in x}
        assert by_name["randaugment"] == {
            "name": "randaugment",
            "num_ops": 2,
            "magnitude": 1.0,
        }
        strengths[name] = by_name["mixup"]["alpha"]
    assert strengths == {"vmoe_b16_i21k": 0.5, "vmoe_s32_i1k": 0.2}
    for name, bias in {
        "vmoe_b16_i21k": -10.0,
        "vmoe_s32_i1k": -math.log(1000),
        "routers_jft": -math.log(1000),
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
    peak = float(learning_rate(settings.warmup_steps))
    assert peak == pytest.approx(settings.learning_rate)
    last = float(learning_rate(actual.total_steps(batches)))
    assert last == pytest.approx(settings.final_learning_rate, abs=1e-9)
    build_steps(actual.data.augment, (32, 32, 3), actual.seed)
    preset, arguments = actual.model.preset, actual.model.overrides
    # Models of pairs are those of test_pair_recipes.
    if "://" in preset or isinstance(actual.objective, Contrastive):
        return
    assert models.describe(preset, num_classes=10, **arguments).parameters
    model = symbolic_model(lambda: actual.new_model(num_classes=10))
    actual.compile(model, batches)
    if not actual.optimizer.groups:
        return
    # Kernels decay, biases and norms do not.
    paths = [weight.path for weight in model.trainable_variables]
    for path, factors in zip(
        paths, group_factors(actual.optimizer.groups, paths), strict=True
    ):
        decays = path.endswith(("kernel", "router/scale"))
        head = name == "soft_moe_s16_jft" and path == "predictions/kernel"
        assert factors.weight_decay == (100.0 if head else float(decays)), path


def test_a_recipe_is_its_file(tmp_path):
    nested = {"head": {"name": "mumoe", "num_experts": [4, 2]}}
    settings = {"augment": ["flip", {"name": "mixup", "alpha": 0.5}]}
    first = recipe(
        model_arguments=nested, optimizer_options={"beta_2": 0.9}, **settings
    )
    first.save(tmp_path / "mine.json")
    again = load_recipe(tmp_path / "mine.json")
    assert again == first
    assert again.model.overrides["head"]["num_experts"] == [4, 2]
    assert json.loads(json.dumps(again.to_dict())) == again.to_dict()
    # Whoever gave the dicts may change them.
    nested["head"]["name"] = "other"
    assert first.model.overrides["head"]["name"] == "mumoe"
    with pytest.raises(ValueError, match=r"ends in \.json; received: path='.*toml'"):
        first.save(tmp_path / "mine.toml")


def test_overrides():
    mixer = load_recipe("mumoe_mixer_s16", **{"model.num_layers": 2})
    assert mixer.model.overrides["num_layers"] == 2
    assert mixer.model.overrides["stochastic_depth"] == 0.1
    assert mixer.data.test_split == "validation"
    # The splits are those of the recipe's data.
    digits = mixer.replace(data={"source": "digits"})
    assert digits.data.test_split == "test"
    other = mixer.replace(**{"data.source": "folder:x", "data.test_split": "val"})
    assert other.data.test_split == "val"
    assert mixer.replace(schedule={"epochs": 1}).data.test_split == "validation"
    # Sections as objects, and settings outside sections.
    slow = mixer.schedule.replace(learning_rate=1e-5)
    assert mixer.replace(schedule=slow, seed=3).schedule == slow
    assert mixer.replace(schedule=slow, seed=3).seed == 3


def test_nested_overrides():
    clip = load_recipe(
        "mumoe_clip_b32",
        **{
            "model.head.num_experts": 8,
            "model.head.rank": 4,
            "optimizer.options.beta_2": 0.95,
        },
    )
    # Settings that the dotted name does not reach stay.
    assert clip.model.overrides["head"] == {
        "num_experts": 8,
        "factorization": "cp",
        "rank": 4,
    }
    assert clip.optimizer.options == {"epsilon": 1e-8, "beta_2": 0.95}
    # A dict of a section replaces nested settings as a whole.
    clip = clip.replace(model={"head": {"num_experts": 2}})
    assert clip.model.overrides["head"] == {"num_experts": 2}
    with pytest.raises(ValueError, match=r"dict of settings at schedule\.epochs"):
        clip.replace(**{"schedule.epochs.more": 1})


def test_another_objective_has_its_own_settings():
    several = recipe(objective={"name": "multi_label", "max_labels": 4})
    assert several.objective == MultiLabel(max_labels=4)
    more = several.replace(**{"objective.hierarchy": "classes.json"})
    assert more.objective == MultiLabel(max_labels=4, hierarchy="classes.json")
    one = more.replace(**{"objective.name": "classification"})
    assert one.objective == Classification()
    assert one.replace(objective=MultiLabel()).objective == MultiLabel()


# Schedule and optimizer


@pytest.mark.parametrize("warmup", [0, 20])
@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_learning_rates(decay, warmup):
    schedule_of_recipe = recipe(
        learning_rate=0.8, final_learning_rate=0.2, warmup_steps=warmup, decay=decay
    ).learning_rate(steps_per_epoch=40)
    again = type(schedule_of_recipe).from_config(schedule_of_recipe.get_config())

    def expected(step):
        if step < warmup:
            return 0.8 * step / warmup
        share = min((step - warmup) / (120 - warmup), 1.0)
        left = (1 + math.cos(math.pi * share)) / 2 if decay == "cosine" else 1 - share
        return 0.2 + 0.6 * left

    steps = [0, 1, 10, 19, 20, 45, 70, 119, 120, 500]
    for schedule in (schedule_of_recipe, again):
        rates = [float(schedule(step)) for step in steps]
        np.testing.assert_allclose(rates, [expected(s) for s in steps], atol=1e-6)


def test_a_warm_up_as_long_as_the_run_is_refused():
    mixer = load_recipe("mumoe_mixer_s16", schedule={"epochs": 2})
    message = r"2 steps .epochs=2, 1 batches .*; received: warmup_steps=10000"
    with pytest.raises(ValueError, match=message):
        mixer.learning_rate(steps_per_epoch=1)
    with pytest.raises(ValueError, match="run of 9 steps; received: warmup_steps=9"):
        warmup_schedule("cosine", 0.1, 9, 9)


def test_the_optimizer_is_the_recipes():
    mine = recipe(
        dtype="mixed_float16",
        gradient_clipping=2.0,
        weight_decay=0.3,
        optimizer_options={"beta_2": 0.9},
        seed=5,
    )
    model = mine.new_model(num_classes=10)
    mine.compile(model, steps_per_epoch=10)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    inner = model.optimizer.inner_optimizer
    assert isinstance(inner, keras.optimizers.AdamW)
    assert (inner.global_clipnorm, inner.weight_decay, inner.beta_2) == (2.0, 0.3, 0.9)
    assert model.backbone.dtype_policy.name == "mixed_float16"
    assert model.backbone.get_config()["seed"] == 5
    assert model.loss.from_logits is True
    multi = linear_model(multi_label=True)
    chosen = []
    multi.compile = lambda loss, **kwargs: chosen.append(loss)
    recipe().compile(multi, steps_per_epoch=1)
    # The classifier's own, of which there is one for labels that exclude nothing.
    assert chosen == ["auto"]


@pytest.mark.parametrize("augment", [(), ("mixup",)], ids=["numbers", "vectors"])
def test_several_labels_and_their_hierarchy(augment, tmp_path):
    digits = [str(digit) for digit in range(10)]
    parents = {digit: ["even" if int(digit) % 2 == 0 else "odd"] for digit in digits}
    hierarchy = data.LabelHierarchy([*digits, "even", "odd"], parents)
    hierarchy.save(tmp_path / "classes.json")
    mine = recipe(
        epochs=4,
        batch_size=256,
        objective={
            "name": "multi_label",
            "hierarchy": str(tmp_path / "classes.json"),
        },
        augment=augment,
    )
    actual = train(mine, verbose=0)
    assert actual.model.multi_label
    assert actual.model.num_classes == 12
    names = ("loss", "precision_at_1", "mean_average_precision")
    assert set(actual.history) == {*names, *(f"val_{name}" for name in names)}
    assert actual.history["val_loss"][-1] < actual.history["val_loss"][0]
    # By itself, and of all that the model says.
    images, labels = data.load_digits("test", SMALL["image_shape"])
    logits = actual.model.predict(images, verbose=0)
    top, digit_and_parity = logits.argmax(axis=1), 10 + labels % 2
    right = (top == labels) | (top == digit_and_parity)
    assert actual.score == pytest.approx(right.mean())
    dense = np.zeros((len(labels), 12))
    dense[np.arange(len(labels)), labels] = 1
    dense[np.arange(len(labels)), digit_and_parity] = 1
    expected = np.sum(np.logaddexp(0, logits) - dense * logits, axis=1).mean()
    assert actual.history["val_loss"][-1] == pytest.approx(expected, rel=1e-4)


def test_groups_and_decay_reach_the_optimizer():
    model = linear_model()
    mine = recipe(
        weight_decay=0.5,
        weight_decay_times="share_of_peak",
        learning_rate=0.1,
        groups=[{"match": ".*bias", "weight_decay": 0.0}],
    )
    mine.compile(model, steps_per_epoch=100)
    kernel, bias = model.trainable_variables
    for weight in (kernel, bias):
        weight.assign(keras.ops.ones(weight.shape))
    gradients = [keras.ops.zeros(w.shape) for w in (kernel, bias)]
    model.optimizer.apply(gradients, [kernel, bias])
    np.testing.assert_allclose(to_numpy(kernel), 0.5, rtol=1e-6)
    np.testing.assert_array_equal(to_numpy(bias), 1.0)
    wrong = recipe(groups=[{"match": "experts"}])
    with pytest.raises(ValueError, match="match='experts'"):
        wrong.compile(linear_model(), steps_per_epoch=1)


def fitted(mine, count=1024):
    """A model after `fit` as the recipe says, on noise; and the last validation."""
    draw = np.random.default_rng(0)
    images = draw.normal(size=(count, 4, 4, 1)).astype("float32")
    labels = np.eye(10, dtype="float32")[draw.integers(10, size=count)]
    batch = mine.data.batch_size // mine.optimizer.gradient_accumulation_steps
    keras.utils.set_random_seed(0)
    model = linear_model()
    mine.compile(model, count // batch)
    history = model.fit(
        images,
        labels,
        batch_size=batch,
        epochs=mine.passes(count // batch),
        validation_data=(images, labels),
        callbacks=mine.callbacks(),
        shuffle=False,
        verbose=0,
    ).history
    loss = model.evaluate(images, labels, verbose=0, return_dict=True)["loss"]
    return model, history["val_loss"], loss


def test_a_run_of_steps_ends_there():
    mine = recipe(epochs=None, steps=20, batch_size=64, gradient_accumulation_steps=2)
    assert mine.total_steps(32) == 20
    # 40 batches, of 32 in an epoch.
    assert mine.passes(32) == 2
    model, losses, _ = fitted(mine)
    assert len(losses) == 2
    assert int(model.optimizer.iterations) == 20
    assert float(to_numpy(model.optimizer.learning_rate)) == pytest.approx(0, abs=1e-8)
    # A run that goes on has fewer to go.
    going_on = changed(mine, steps=22).callbacks(start_step=40)[0]
    going_on.set_model(model)
    model.stop_training = False
    for batch, ends in enumerate((False, False, False, True)):
        going_on.on_train_batch_begin(batch)
        assert model.stop_training is ends


def test_averages_are_evaluated_and_kept():
    plain, averaged = recipe(epochs=2), recipe(epochs=2, ema_momentum=0.9)
    assert plain.callbacks() == []
    _, losses, _ = fitted(plain)
    _, averaged_losses, loss = fitted(averaged)
    # The weights that are trained are the same, their averages are evaluated.
    assert abs(losses[-1] - averaged_losses[-1]) > 1e-3
    assert averaged_losses[-1] == pytest.approx(loss, rel=1e-5)


def test_epochs_and_steps_take_each_others_place():
    run = recipe(epochs=None, steps=10)
    two = changed(run, epochs=2).schedule
    assert (two.epochs, two.steps) == (2, None)
    assert changed(recipe(), steps=7).schedule.epochs is None
    assert recipe(batch_size=64, gradient_accumulation_steps=4).total_steps(10) == 7


# Training


def test_training_with_mixed_labels(linear):
    mine = recipe(
        augment=[{"name": "mixup", "alpha": 1.0}], epochs=2, learning_rate=0.05
    )
    datasets = mine.datasets(linear_model())
    assert datasets.num_classes == 10
    assert datasets.steps_per_epoch == 1347 // 128
    train_images = datasets.train.take(datasets.steps_per_epoch)
    labels = np.concatenate([y for _, y in train_images.as_numpy_iterator()])
    assert (labels.max(axis=1) < 0.99).mean() > 0.5
    actual = train(mine, verbose=0)
    assert {name: len(values) for name, values in actual.history.items()} == {
        "accuracy": 2,
        "loss": 2,
        "val_accuracy": 2,
        "val_loss": 2,
    }
    # Labels of the test images themselves, none of which is mixed.
    images, labels = map(
        np.concatenate, zip(*datasets.test.as_numpy_iterator(), strict=True)
    )
    assert set(labels.max(axis=1)) == {1.0}
    predicted = actual.model.predict(images, verbose=0).argmax(axis=1)
    accuracy = (predicted == labels.argmax(axis=1)).mean()
    assert actual.score == pytest.approx(accuracy, abs=1e-6)
    assert accuracy > 0.5
    assert int(actual.model.optimizer.iterations) == 20
    # The seed says it all; and other images may take the place of the recipe's.
    again = train(mine, datasets=mine.datasets(linear_model()), verbose=0)
    assert again.history == actual.history


def test_datasets_begin_at_a_step():
    mine = recipe(augment=["flip", "mixup"])
    whole = list(mine.datasets(linear_model()).train.take(13).as_numpy_iterator())
    # The second epoch has begun.
    later = mine.datasets(linear_model(), start_step=11).train.take(2)
    for actual, expected in zip(later.as_numpy_iterator(), whole[11:], strict=True):
        for mine, other in zip(actual, expected):
            np.testing.assert_array_equal(mine, other)


# Errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"learning_rate": 0}, "learning_rate=0"),
        ({"learning_rate": "high"}, "learning_rate='high'"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"final_learning_rate": -1}, "final_learning_rate=-1"),
        ({"gradient_clipping": 0}, "gradient_clipping=0"),
        ({"decay": "steps"}, "decay='steps'"),
        ({"epochs": None}, "epochs=None, steps=None"),
        ({"steps": 10}, "epochs=3, steps=10"),
        ({"epochs": None, "steps": 0}, "steps=0"),
        ({"timescale": 0}, "timescale=0"),
        ({"cooldown_steps": 5}, "cooldown_steps=5, decay='cosine'"),
        ({"weight_decay_times": "peak"}, "weight_decay_times='peak'"),
        ({"groups": {"match": "head"}}, "groups={'match': 'head'}"),
        ({"groups": [{"match": "head", "rate": 1.0}]}, "rate=1.0"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps=3, batch"),
        ({"ema_momentum": 1.0}, "ema_momentum=1.0"),
        ({"dtype": "half"}, "dtype='half'"),
        ({"seed": None}, "seed=None"),
        ({"preset": None}, "preset=None"),
        ({"augment": [len]}, "augment="),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"Expected .*; received: {message}"):
        recipe(**settings)


def test_what_does_not_fit_is_refused(tmp_path):
    def refused(message, function, *arguments, **settings):
        with pytest.raises(ValueError, match=message):
            function(*arguments, **settings)

    refused("'mumoe_digit' .nearest: mumoe_digits", load_recipe, "mumoe_digit")
    refused("epoch=1 .nearest: schedule.epochs", load_recipe, "mumoe_digits", epoch=1)
    dotted = {"schedule.epoch": 1, "data.batch": 1, "optimiser.name": "sgd"}
    for (name, value), message in zip(
        dotted.items(),
        ("epoch=1 .nearest: epochs", "batch=1 .nearest: batch_size", "optimizer.name"),
        strict=True,
    ):
        refused(message, load_recipe, "mumoe_digits", **{name: value})
    refused("epochs=2 .nearest: schedule.epochs", recipe().replace, epochs=2)
    refused(
        "as data.batch_size; received: data='digits'", recipe().replace, data="digits"
    )
    refused("objective.name='rank'", recipe, objective={"name": "rank"})
    refused("hierarchy='a.json' .known", recipe, objective={"hierarchy": "a.json"})
    refused(r"overrides=\[1\]", ModelConfig, preset="vit_b16", overrides=[1])
    refused(r"model=\[1\]", recipe().replace, model=[1])
    refused("name='adamx'", recipe(optimizer="adamx").compile, linear_model(), 1)
    options = recipe(optimizer_options={"learning_rate": 1.0})
    refused("options={'learning_rate'", options.compile, linear_model(), 1)
    refused("batch_size=2000", recipe(batch_size=2000).datasets, linear_model())
    refused("split='dev'", recipe(test_split="dev").datasets, linear_model())
    refused("source='digit'", train, recipe(data="digit"))
    wrong = recipe(model_arguments={"num_layer": 1})
    refused("num_layer=1 .nearest: num_layers", wrong.new_model, 10)
    path = tmp_path / "bad.json"
    for text, message in (
        ("{", "Expected JSON in .*bad.json"),
        ("[]", r"received: \[\]"),
        ('{"preset": "vit_b16"}', "preset='vit_b16' .nearest: model.preset.*bad.json"),
        ('{"presets": "vit_b16"}', "presets='vit_b16' .nearest: model.preset.*bad.js"),
    ):
        path.write_text(text)
        refused(message, load_recipe, path)
    path = tmp_path / "bad.toml"
    for text, message in (
        ("[data", "Expected TOML in .*bad.toml"),
        ("[model]\npreset = 'vit_b16'", "'batch_size' in .*'data'.*bad.toml"),
    ):
        path.write_text(text)
        refused(message, load_recipe, path)
