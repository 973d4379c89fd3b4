"""Runs that end too early go on; runs that go wrong say where."""

import keras
import numpy as np
import pytest

from keras_moe import layers, routers, training
from keras_moe._compat import random_states
from keras_moe.training import Recipe, train
from tests.compare import assert_same, to_numpy
from tests.refusals import refuses
from tests.training import runs


def tokens_model(self=None, num_classes=10):
    """A classifier with a router's noise and dropout, quick to compile."""
    images = keras.Input((4, 4, 1))
    tokens = keras.layers.Reshape((4, 4))(images)
    router = routers.TokenChoiceRouter(2, 1, capacity_factor=1.0, seed=1)
    moe = layers.MoE(router, layers.Experts(2, 4, seed=2), name="moe")
    outputs, _ = moe(tokens)
    outputs = keras.layers.Dropout(0.2)(outputs + tokens)
    head = keras.layers.Dense(num_classes, name="head")
    model = keras.Model(images, head(keras.layers.Flatten()(outputs)))
    model.multi_label, model.output_activation = False, None
    model.backbone = type("Backbone", (), {"image_shape": (4, 4, 1)})
    return model


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(Recipe, "new_model", tokens_model)


@pytest.fixture
def quick(small, monkeypatch):
    """Small models and batches, for tests that do not depend on the images."""
    monkeypatch.setattr(Recipe, "datasets", runs.noise)


def recipe(**settings):
    common = {"preset": "vmoe_digits", "epochs": 2, "batch_size": 192}
    common |= {"learning_rate": 1e-2, "augment": ["flip"], "weight_decay": 0.1}
    return runs.short_recipe(**{**common, **settings})


def run(folder, *callbacks, mine=None, **options):
    return runs.quick_run(folder, mine or recipe(), *callbacks, **options)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        # 14 batches of 96 in an epoch; the run ends within the second.
        {"epochs": None, "steps": 8, "gradient_accumulation_steps": 2}
        | {"ema_momentum": 0.9},
        {"optimizer": "muon"},
    ],
    ids=["epochs", "steps", "muon"],
)
def test_a_run_goes_on_as_if_it_had_not_ended(small, tmp_path, settings):
    mine = recipe(**settings)
    # Without checkpoints, and with the digits' own order and augmentation.
    expected = train(mine, callbacks=[runs.Draws()], verbose=0)
    # The run of 14 or 16 batches ends after 5, and after 6 more from the third on.
    for batches in (5, 6):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, runs.Draws(), runs.Ends(batches), mine=mine)
    assert training.checkpoints.list_checkpoints(tmp_path)[-1].name == "step-00000009"
    actual = run(tmp_path, runs.Draws(), mine=mine)
    assert actual.history == expected.history
    runs.assert_same_arrays(actual, expected)
    # A run at its end is not trained again.
    again = run(tmp_path, runs.Draws(), runs.Ends(0), mine=mine)
    assert (again.history, again.score) == (expected.history, expected.score)
    runs.assert_same_arrays(again, actual)


def test_a_run_goes_on_with_what_its_recipe_freezes(tmp_path):
    sizes = {"num_layers": 2, "hidden_dim": 8, "mlp_dim": 8, "num_heads": 2}
    frozen = ["patch_embedding", "block_0", "!block_0/mlp"]
    mine = recipe(epochs=1, model_arguments={"frozen": frozen, **sizes})
    keras.utils.set_random_seed(mine.seed)
    start = {x.path: to_numpy(x) for x in mine.new_model(10).weights}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, runs.Ends(2), mine=mine)
    model = run(tmp_path, mine=mine).model
    fixed = [x for x in model.backbone.weights if not x.trainable]
    assert {x.path.split("/")[0] for x in fixed} == {"patch_embedding", "block_0"}
    for weight in model.weights:
        is_fixed = any(weight is x for x in fixed)
        is_mlp = "block_0/mlp" in weight.path
        assert is_fixed == (
            weight.path.startswith(("patch_", "block_0")) and not is_mlp
        )
        assert np.array_equal(to_numpy(weight), start[weight.path]) == is_fixed


def test_a_branch_is_the_run_until_it_leaves_it(quick, tmp_path):
    long = recipe(decay="constant", epochs=None, steps=12)
    run(tmp_path / "long", mine=long, keep_checkpoints=9)
    start = tmp_path / "long" / "step-00000006"
    branch = training.cooldown_branch(long, 6, 4)
    actual = run(tmp_path / "branch", mine=branch, branch_from=start)
    # Had the learning rate been known from the start, it were the same run.
    expected = train(branch, verbose=0)
    runs.assert_same_arrays(actual, expected)
    # The last of two epochs of 7 steps; the first is the other run's.
    assert len(actual.history["loss"]) == 2
    assert actual.history["val_loss"][-1] == expected.history["val_loss"][-1]
    # Ended and begun again, it goes on from its own checkpoints.
    again = run(tmp_path / "branch", runs.Ends(0), mine=branch, branch_from=start)
    assert again.history == actual.history
    with pytest.raises(ValueError, match="Expected a whole checkpoint; received"):
        run(tmp_path / "b", mine=branch, branch_from=start.with_name("step-00000005"))
    other = training.save_checkpoint(tmp_path / "c", 1, {"model": []}, {"note": "x"})
    with pytest.raises(ValueError, match="Expected the checkpoint of a run"):
        run(tmp_path / "b", mine=branch, branch_from=other)
    refuses("Expected a checkpoint_dir", train, branch, branch_from=start)


def test_early_stopping_ends_a_run_for_good(quick, tmp_path):
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=100.0)
    mine = recipe(epochs=4)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, runs.Ends(4), mine=mine)
    # The part of an epoch is an epoch for other callbacks.
    first = run(tmp_path, stop, mine=mine)
    assert len(first.history["loss"]) == 2
    assert run(tmp_path, runs.Ends(0), mine=mine).history == first.history


def test_another_recipe_is_refused_by_its_differences(quick, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, runs.Ends(4))
    other = recipe(learning_rate=0.5, batch_size=128, description="another word")
    message = (
        r"data.batch_size=128 \(there 192\), schedule.learning_rate=0.5 "
        r"\(there 0.01\), steps_per_epoch=10 \(there 7\)\. "
    )
    refuses(message, run, tmp_path, mine=other)
    again = run(tmp_path, mine=other, resume=False)
    assert len(again.history["loss"]) == 2


# Values that are not finite


class Poison(keras.layers.Layer):
    """The inputs, and NaN where a weight says so."""

    def build(self, shape):
        self.amount = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        return x + keras.ops.log(1.0 - self.amount) * 0.0


class Nested(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = Poison(name="inner")
        self.root = keras.layers.Dense(4, name="root")

    def build(self, shape):
        self.inner.build(shape)
        self.root.build(shape)

    def call(self, x):
        return self.root(self.inner(x))


class Root(keras.layers.Layer):
    """Finite, with a gradient that is not: the root of 0."""

    def build(self, shape):
        self.shift = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x + keras.ops.sqrt(self.shift)


def compiled(*middle):
    model = keras.Sequential(
        [keras.Input((4,)), *middle, keras.layers.Dense(1, name="last")]
    )
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    return model


X = np.ones((2, 4), "float32")
Y = np.ones((2, 1), "float32")


@pytest.mark.every_backend
def test_the_first_layer_that_is_not_finite_is_found():
    model = compiled(Nested(name="nested"), keras.layers.Dropout(0.1))
    states = random_states()
    assert training.locate_non_finite(model, X, Y) is None
    model.layers[0].inner.amount.assign(1.0)
    before = [to_numpy(v.value).copy() for v in model.variables]
    actual = training.locate_non_finite(model, X, Y)
    assert actual.what == "output"
    assert actual.where.endswith("nested/inner")
    assert str(actual) == f"in the output of {actual.where}"
    assert_same(model.variables, before)
    model.layers[0].inner.amount.assign(0.0)
    bad = np.where([[True], [False]], np.inf, X)
    assert training.locate_non_finite(model, bad, Y).what == "inputs"
    assert training.locate_non_finite(model, X, Y * np.nan).what == "inputs"
    assert training.locate_non_finite(model, X, Y * 1e38).what == "loss"
    model.layers[0].root.bias.assign([np.nan] * 4)
    actual = training.locate_non_finite(model, X, Y)
    assert actual.what == "weights"
    assert actual.where.endswith("nested/root/bias")
    # Those of dropout without a seed are not in the model.
    assert random_states() == states


@pytest.mark.every_backend
def test_a_gradient_that_is_not_finite_is_found():
    model = compiled(keras.layers.Dense(4, name="first"), Root(name="root"))
    before = [to_numpy(v.value).copy() for v in model.variables]
    optimizer = model.optimizer
    actual = training.locate_non_finite(model, X, Y)
    assert (actual.what, actual.where.split("/")[-1]) == ("gradient", "root")
    # Left as it was, and still of use.
    assert_same(model.variables, before)
    assert model.optimizer is optimizer
    assert np.isfinite(model.train_on_batch(X, Y)[0])


@pytest.mark.parametrize("every", [None, 2])
def test_a_run_says_where_it_went_wrong(monkeypatch, tmp_path, every):
    def model_with_root(self, num_classes):
        model = tokens_model(num_classes=num_classes)
        # Its gradient is not finite from the fourth step on: the shift falls to 0.
        root = _FallsToZero(name="falls")
        made = keras.Model(model.input, root(model.output))
        made.multi_label, made.output_activation = False, None
        made.backbone = model.backbone
        return made

    monkeypatch.setattr(Recipe, "new_model", model_with_root)
    monkeypatch.setattr(Recipe, "datasets", runs.noise)
    folder = None if every is None else tmp_path
    rates = {"learning_rate": 1.0, "final_learning_rate": 1.0, "weight_decay": 0.0}
    mine = recipe(gradient_clipping=None, optimizer="sgd", **rates)
    # The loss may be seen a step later, after the weights.
    with pytest.raises(ValueError, match=r"Expected (a )?finite") as raised:
        run(folder, mine=mine, every=every)
    message = str(raised.value)
    assert "NaN" in message or "loss=nan in step" in message
    assert "in the output of falls, in step 4" in message
    assert "learning_rate=1.0" in message
    assert ("The last good checkpoint is" in message) == (every is not None)
    if every is not None:
        assert [x.name for x in training.checkpoints.list_checkpoints(folder)] == [
            "step-00000002"
        ]
        assert training.find_checkpoint(folder).state["finished"] is False


class _FallsToZero(keras.layers.Layer):
    """The logarithm of a weight that each step lowers: 0 in the fourth."""

    def build(self, shape):
        self.left = self.add_weight(shape=(), initializer=lambda *a, **k: 2.5)
        self.built = True

    def call(self, x):
        # The gradient of the weight is 1, whatever the rest.
        self.add_loss(self.left * 1.0)
        return x + 0.0 * keras.ops.log(keras.ops.stop_gradient(self.left))


def test_checkpoints_to_keep_and_averages_to_look_at(quick, tmp_path):
    seen = []

    def look(model):
        seen.append(to_numpy(model.layers[-1].kernel.value).copy())
        return {"mean": float(seen[-1].mean())}

    mine = recipe(epochs=1, ema_momentum=0.9)
    look_on = training.PeriodicEvaluation({"look": look})
    keep = {"keep_every": 4, "keep_checkpoints": 1}
    actual = run(tmp_path, look_on, mine=mine, every=2, **keep)
    names = [path.name for path in training.checkpoints.list_checkpoints(tmp_path)]
    assert names == ["step-00000004", "step-00000007"]
    # The averages, which the weights are at the end of the run.
    np.testing.assert_array_equal(seen[0], to_numpy(actual.model.layers[-1].kernel))
    plain = run(tmp_path / "plain", mine=mine)
    np.testing.assert_array_equal(seen[0], to_numpy(plain.model.layers[-1].kernel))


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX keeps programs")
def test_other_backends_keep_no_programs(quick, tmp_path):
    with pytest.raises(ValueError, match=r"JAX backend.*compilation_cache='programs'"):
        train(recipe().replace(compilation_cache="programs"), verbose=0)
