"""Small runs for tests: recipes by short names, noise, and runs that end early."""

import itertools
import random

import keras
import numpy as np

from keras_moe.training import Datasets, Recipe, train
from keras_moe.training.recipes import SECTIONS, dotted_names
from tests.compare import assert_same

DOTTED = {
    **{
        name: dotted
        for section in SECTIONS
        for name, dotted in dotted_names(section).items()
        if name not in ("name", "function")
    },
    "data": "data.source",
    "objective": "objective",
    "optimizer": "optimizer.name",
    "optimizer_options": "optimizer.options",
    "model_arguments": "model",
    "multi_label": "objective.name",
}


LONG_RUN = {"preset": "vmoe_digits", "batch_size": 8, "learning_rate": 0.1}
LONG_RUN |= {"decay": "rsqrt", "timescale": 50}
LONG_RUN |= {"steps": 1000, "warmup_steps": 100, "cooldown_steps": 200}


def short_recipe(**settings):
    """A recipe of `preset`, `batch_size` and the like, in any order, from scratch."""
    sections = {"name": "mine", "data": {}, "model": {"load_weights": False}}
    sections["schedule"] = {}
    for name, value in settings.items():
        section, _, setting = DOTTED.get(name, name).partition(".")
        if setting:
            sections.setdefault(section, {})[setting] = value
        elif name == "model_arguments":
            sections[section] |= value
        else:
            sections[section] = value
    return Recipe(**sections)


def changed(recipe, **settings):
    """A recipe with other settings by their short names."""
    return recipe.replace(**{DOTTED.get(x, x): value for x, value in settings.items()})


def noise(recipe, model, data_dir=None, start_step=0):
    """Replaces `Recipe.datasets`: as many steps as of the digits, of quick noise."""
    steps = 1347 // recipe.data.batch_size
    draw = np.random.default_rng(0)
    images = draw.normal(size=(steps, 8, *model.input_shape[1:])).astype("float32")
    labels = np.eye(10, dtype="float32")[draw.integers(10, size=(steps, 8))]

    def batches():
        for step in itertools.count(start_step):
            yield images[step % steps], labels[step % steps]

    return Datasets(batches(), (images[0], labels[0]), 10, steps)


def linear_model(multi_label=False, num_classes=10, dropout=0.0):
    """A stand-in for a classifier in `compile` and `train`, quick to compile."""
    layers = [keras.layers.Flatten(), keras.layers.Dropout(dropout, seed=3)]
    layers.append(keras.layers.Dense(num_classes))
    model = keras.Sequential([keras.Input((4, 4, 1)), *layers])
    model.multi_label, model.output_activation = multi_label, None
    model.backbone = type("Backbone", (), {"image_shape": (4, 4, 1)})
    return model


def dropout_model(self=None, num_classes=10):
    """Replaces `Recipe.new_model`: a classifier with a seed."""
    return linear_model(num_classes=num_classes, dropout=0.2)


def quick_run(folder, recipe, *callbacks, every=3, **options):
    """Trains quietly, with a checkpoint every few steps."""
    options = {"verbose": 0, "checkpoint_every": every, **options}
    return train(recipe, callbacks=callbacks, checkpoint_dir=folder, **options)


def assert_same_models(actual, expected):
    """Compares all that training changes."""
    models = (actual, expected)
    assert_same(*([*x.variables, *x.optimizer.variables] for x in models))


def assert_same_arrays(actual, expected):
    """Compares the models of two runs."""
    assert_same_models(actual.model, expected.model)


class Draws(keras.callbacks.Callback):
    """A metric of all that may have no seed."""

    def on_epoch_end(self, epoch, logs=None):
        drawn = random.random(), np.random.rand(), float(keras.random.uniform(()))
        logs["drawn"] = sum(drawn)


class Ends(keras.callbacks.Callback):
    """Interrupts the run before a step."""

    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_begin(self, batch, logs=None):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
