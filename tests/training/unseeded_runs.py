"""Runs of a model whose dropout has no seed, in one process and in several that end.

Argument: a folder. Lives are forked from a process that has imported everything and
computed nothing.
"""

import os
import random
import sys
from pathlib import Path

import keras
import numpy as np

from keras_moe import training
from tests.forks import start_forked
from tests.training.runs import short_recipe

ROOT = Path(sys.argv[1])
EPOCHS, STEPS = 3, 3
SETTINGS = {"preset": "vmoe_digits", "batch_size": 4, "epochs": EPOCHS}
SETTINGS |= {"learning_rate": 1e-2, "warmup_steps": 0}
IMAGES = np.random.default_rng(0).normal(size=(EPOCHS * STEPS, 4, 6)).astype("float32")
LABELS = np.eye(3, dtype="float32")[np.arange(EPOCHS * STEPS * 4) % 3].reshape(-1, 4, 3)


class Draws(keras.callbacks.Callback):
    """Draws from everything that may have no seed; ends its process before a step."""

    def __init__(self, end):
        super().__init__()
        self.left = end

    def on_train_batch_begin(self, batch, logs=None):
        if self.left == 0:
            os._exit(0)
        self.left -= 1
        random.random(), np.random.rand(), keras.random.uniform(())


def new_model(self=None, num_classes=3):
    inputs = keras.Input((6,))
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(8)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(num_classes)(hidden))
    model.multi_label, model.output_activation = False, None
    return model


def datasets(step):
    """Other examples for each step."""
    train = (batch for batch in zip(IMAGES[step:], LABELS[step:]))
    return training.Datasets(train, (IMAGES[0], LABELS[0]), 3, STEPS)


def by_recipe(folder, end):
    """A recipe's run, all of whose batches come from one iterator."""
    training.Recipe.new_model = new_model
    options = {"verbose": 0, "checkpoint_dir": folder, "checkpoint_every": 1}
    mine = short_recipe(**SETTINGS)
    training.train(mine, datasets, callbacks=[Draws(end)], **options)


def by_fit(folder, end):
    """A run of your own, which shuffles its examples anew in each epoch."""
    keras.utils.set_random_seed(0)
    model = new_model()
    model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True))
    checkpoint = training.RunCheckpoint(folder, EPOCHS * STEPS)
    step = checkpoint.restore(model)
    model.fit(
        *(x.reshape(-1, x.shape[-1]) for x in (IMAGES, LABELS)),
        batch_size=4,
        epochs=EPOCHS,
        initial_epoch=step // (EPOCHS * STEPS),
        callbacks=checkpoint.around([Draws(end)]),
        verbose=0,
    )


def live(run, name, end=-1):
    _, status = os.waitpid(start_forked(run, ROOT / name, end), 0)
    assert status == 0, status


live(by_recipe, "recipe whole")
# At the end of an epoch, within the next, and to the end.
for steps in (3, 2, -1):
    live(by_recipe, "recipe ended", steps)
live(by_fit, "fit whole")
for steps in (2 * EPOCHS * STEPS, -1):
    live(by_fit, "fit ended", steps)
