"""Objectives own labels, loss, metrics and monitor; `train` knows none by name."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest

from keras_moe import training
from tests.refusals import refuses
from tests.training.runs import Ends, quick_run

SMALL = {"num_layers": 2, "hidden_dim": 8, "mlp_dim": 8, "image_shape": (8, 8, 1)}


@training.register_objective("test_brightness")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Brightness(training.Objective):
    """Regression from outside the package: the mean of the pixels, times a factor."""

    monitor = training.Monitor("val_error", "min")

    scale: float = 1.0

    def model_arguments(self, num_classes):
        assert num_classes is None
        return {"num_classes": 1}

    def datasets(self, config, model, batch_size, seed, data_dir=None, start_step=0):
        draw = np.random.default_rng(seed)
        images = draw.uniform(-1, 1, (24, *model.backbone.image_shape))
        images = images.astype("float32")
        targets = self.scale * images.mean(axis=(1, 2, 3), keepdims=True)[:, :, 0, 0]
        steps = len(images) // batch_size

        def batches():
            for step in itertools.count(start_step):
                first = batch_size * (step % steps)
                rows = slice(first, first + batch_size)
                yield images[rows], targets[rows]

        return training.Datasets(batches(), (images, targets), None, steps)

    def loss_and_metrics(self, model, config):
        return "mse", [keras.metrics.MeanAbsoluteError(name="error")]


def recipe(**objective):
    return training.Recipe(
        "mine",
        data={"batch_size": 8},
        model={"preset": "vmoe_digits", "load_weights": False, **SMALL},
        schedule={"epochs": 2, "learning_rate": 1e-2, "best": "keep"},
        objective={"name": "test_brightness", **objective},
    )


def test_an_objective_from_outside_trains(tmp_path):
    mine = recipe(scale=3.0)
    assert mine.objective == Brightness(scale=3.0)
    mine.save(tmp_path / "mine.json")
    assert training.load_recipe(tmp_path / "mine.json") == mine
    actual = training.train(mine, verbose=0, checkpoint_dir=tmp_path / "run")
    assert actual.score == actual.history["val_error"][-1]
    images, targets = mine.datasets(actual.model).test
    predicted = actual.model.predict(images, verbose=0)
    assert predicted.shape == (24, 1)
    assert actual.score == pytest.approx(np.abs(predicted - targets).mean(), rel=1e-4)
    # Its monitor says which epoch is the best: the lowest.
    state = training.find_checkpoint(tmp_path / "run").state
    errors = actual.history["val_error"]
    assert state["best"][1] == int(np.argmin(errors))
    # A preset's names of classes are not those of an objective without classes.
    assert actual.model.preprocessor.class_names is None
    # It goes on like any other.
    with pytest.raises(KeyboardInterrupt):
        quick_run(tmp_path / "ended", mine, Ends(4), every=1)
    again = quick_run(tmp_path / "ended", mine, every=1)
    assert again.history == actual.history
    mine = recipe(scale=1e30).replace(schedule={"best": None})
    refuses("The first NaN or Inf was in the loss", training.train, mine, verbose=0)


def test_a_metric_to_monitor_replaces_the_objectives():
    several = recipe().replace(
        objective={"name": "multi_label"}, schedule={"patience": 1, "best": None}
    )
    best = several.best_epoch()
    assert (best.monitor, best.mode) == ("val_precision_at_1", "max")
    best = several.replace(schedule={"monitor": "val_loss"}).best_epoch()
    assert (best.monitor, best.mode) == ("val_loss", "min")
    best = recipe().best_epoch()
    assert (best.monitor, best.mode) == ("val_error", "min")
