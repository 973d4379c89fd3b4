"""Recipes: settings as data, and the training that follows from them."""

import json
import math

import keras
import numpy as np
import pytest

from keras_moe import data
from keras_moe.training import Classification, MultiLabel, Recipe, load_recipe, train
from tests.compare import to_numpy
from tests.training.pair_folder import pair_recipe
from tests.training.runs import changed, linear_model, short_recipe

SMALL = {"image_shape": (4, 4, 1), "patch_size": 2, "hidden_dim": 4, "num_layers": 1}
SMALL |= {"token_mlp_dim": 4, "mlp_dim": 4, "num_experts": 2}


def recipe(**settings):
    needed = {"preset": "mumoe_mixer_s16_cp", "model_arguments": SMALL, "epochs": 3}
    needed |= {"batch_size": 128, "learning_rate": 0.1}
    return short_recipe(**{**needed, **settings})


@pytest.fixture
def linear(monkeypatch):
    monkeypatch.setattr(Recipe, "new_model", lambda self, num_classes: linear_model())


def test_a_recipe_is_its_file(tmp_path):
    nested = {"head": {"name": "mumoe", "num_experts": [4, 2]}}
    settings = {"augment": ["flip", {"name": "mixup", "alpha": 0.5}]}
    settings["optimizer_options"] = {"beta_2": 0.9}
    first = recipe(model_arguments=nested, **settings)
    first.save(tmp_path / "mine.json")
    again = load_recipe(tmp_path / "mine.json")
    assert again == first
    mixture = {"source": {"tfds:coco_captions": 3, "emoji:language=de,size=64": 1.5}}
    pairs = pair_recipe("x", data={**mixture, "templates": ["a {}.", "{}"]})
    pairs.save(tmp_path / "mine.json")
    assert load_recipe(tmp_path / "mine.json") == pairs
    assert pairs.data.replace(source="emoji").source == "emoji"
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
    changes = {"model.head.num_experts": 8, "model.head.rank": 4}
    changes["optimizer.options.beta_2"] = 0.95
    clip = load_recipe("mumoe_clip_b32", **changes)
    # Settings that the dotted name does not reach stay.
    head = {"num_experts": 8, "factorization": "cp", "rank": 4}
    assert clip.model.overrides["head"] == head
    assert clip.optimizer.options == {"epsilon": 1e-8, "beta_2": 0.95}
    # A dict of a section replaces nested settings as a whole.
    clip = clip.replace(model={"head": {"num_experts": 2}})
    assert clip.model.overrides["head"] == {"num_experts": 2}


def test_objectives_and_lengths_take_each_others_place():
    several = recipe(objective={"name": "multi_label", "max_labels": 4})
    assert several.objective == MultiLabel(max_labels=4)
    one = several.replace(**{"objective.name": "classification"})
    assert one.objective == Classification()
    assert one.replace(objective=MultiLabel()).objective == MultiLabel()
    run = recipe(epochs=None, steps=10)
    two = changed(run, epochs=2).schedule
    assert (two.epochs, two.steps) == (2, None)
    assert changed(recipe(), steps=7).schedule.epochs is None
    assert recipe(batch_size=64, gradient_accumulation_steps=4).total_steps(10) == 7


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


def test_the_optimizer_is_the_recipes():
    decay = {"weight_decay": 0.3, "weight_decay_times": "share_of_peak"}
    decay["groups"] = [{"match": "kernels", "weight_decay": 0.0}]
    own = {"gradient_clipping": 2.0, "optimizer_options": {"beta_2": 0.9}, "seed": 5}
    mine = recipe(dtype="mixed_float16", **own, **decay)
    model = mine.new_model(num_classes=10)
    mine.compile(model, steps_per_epoch=10)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    inner = model.optimizer.inner_optimizer
    assert isinstance(inner, keras.optimizers.AdamW)
    assert (inner.global_clipnorm, inner.weight_decay, inner.beta_2) == (2.0, 0.3, 0.9)
    assert (inner.groups, inner.peak_learning_rate) == (mine.optimizer.groups, 0.1)
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
def test_labels_that_exclude_nothing(augment):
    labels = {"name": "multi_label"}
    mine = recipe(epochs=4, batch_size=256, objective=labels, augment=augment)
    actual = train(mine, verbose=0)
    assert actual.model.multi_label
    assert actual.model.num_classes == 10
    names = ("loss", "precision_at_1", "mean_average_precision")
    assert set(actual.history) == {*names, *(f"val_{name}" for name in names)}
    assert actual.history["val_loss"][-1] < actual.history["val_loss"][0]
    # By itself, and of all that the model says.
    images, labels = data.load_digits("test", SMALL["image_shape"])
    logits = actual.model.predict(images, verbose=0)
    right = logits.argmax(axis=1) == labels
    assert actual.score == pytest.approx(right.mean())
    dense = np.eye(10)[labels]
    expected = np.sum(np.logaddexp(0, logits) - dense * logits, axis=1).mean()
    assert actual.history["val_loss"][-1] == pytest.approx(expected, rel=1e-4)


def fitted(mine, count=1024):
    """A model after `fit` as the recipe says, on noise; and the last validation."""
    draw = np.random.default_rng(0)
    images = draw.normal(size=(count, 4, 4, 1)).astype("float32")
    labels = np.eye(10, dtype="float32")[draw.integers(10, size=count)]
    batch = mine.data.batch_size // mine.optimizer.gradient_accumulation_steps
    keras.utils.set_random_seed(0)
    model = linear_model()
    mine.compile(model, count // batch)
    options = {"epochs": mine.passes(count // batch), "callbacks": mine.callbacks()}
    options |= {"validation_data": (images, labels), "shuffle": False, "verbose": 0}
    history = model.fit(images, labels, batch_size=batch, **options).history
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
    going_on = changed(mine, steps=22).callbacks()[0]
    going_on.set_model(model)
    going_on.progress.step = 40
    going_on.on_epoch_begin(1)
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


# Training


def test_training_with_mixed_labels(linear):
    mixup = {"name": "mixup", "alpha": 1.0}
    mine = recipe(augment=[mixup], epochs=2, learning_rate=0.05)
    datasets = mine.datasets(linear_model())
    assert datasets.num_classes == 10
    assert datasets.steps_per_epoch == 1347 // 128
    train_images = datasets.train.take(datasets.steps_per_epoch)
    labels = np.concatenate([y for _, y in train_images.as_numpy_iterator()])
    assert (labels.max(axis=1) < 0.99).mean() > 0.5
    actual = train(mine, verbose=0)
    assert {len(values) for values in actual.history.values()} == {2}
    assert set(actual.history) == {"accuracy", "loss", "val_accuracy", "val_loss"}
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
