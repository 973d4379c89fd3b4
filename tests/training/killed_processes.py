"""Two processes train one model, and are killed again and again, on JAX.

Then two others save and restore a sharded model. Argument: a folder. Prints what
happened. Lives are forked from a process that has imported everything and computed
nothing, so each is short.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.forks import PATIENCE, free_port, start_forked, use_jax_on_cpu

use_jax_on_cpu(devices=2, JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
import tensorflow as tf  # noqa: E402

from keras_moe import models, training  # noqa: E402
from tests.training import sharded_checkpoint  # noqa: E402

ROOT = Path(sys.argv[1])
EPOCHS, STEPS, BATCH = 2, 3, 4
RECIPE = training.Recipe(
    "killed",
    data={"batch_size": BATCH},
    model={"preset": "vmoe_digits", "load_weights": False},
    schedule={"epochs": EPOCHS, "learning_rate": 1e-2, "warmup_steps": 0},
)


def new_model(self, num_classes):
    """A classifier with noise of its own, of which both processes have a part."""
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(4, activation="relu")(inputs)
    hidden = keras.layers.Dropout(0.2, seed=3)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(num_classes)(hidden))
    model.multi_label, model.output_activation = False, None
    return model


def datasets_of(number):
    """Noise, another for each step; half of each batch is this process's."""
    draw = np.random.default_rng(0)
    mine = slice(number * BATCH // 2, (number + 1) * BATCH // 2)
    images = draw.normal(size=(EPOCHS * STEPS, BATCH, 4)).astype("float32")[:, mine]
    labels = draw.integers(3, size=(EPOCHS * STEPS, BATCH))
    labels = np.eye(3, dtype="float32")[labels][:, mine]

    def datasets(step):
        train = (batch for batch in zip(images[step:], labels[step:]))
        return training.Datasets(train, (images[0], labels[0]), 3, STEPS)

    return datasets


def train(number, port, folder, kill=None):
    if kill is not None and kill[0] == number:
        kill_before(*kill[1:])
    keras.distribution.initialize(f"127.0.0.1:{port}", 2, number)
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((4,), ("batch",), devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*kernel"] = ("batch", None)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(
            layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False
        )
    )
    training.Recipe.new_model = new_model
    options = {"verbose": 0, "checkpoint_dir": folder, "checkpoint_every": 1}
    trained = training.train(RECIPE, datasets_of(number), **options)
    kernel = trained.model.layers[1].kernel.value
    assert not kernel.is_fully_addressable


def kill_before(owner, name, place):
    """Makes a process kill both before it does something with a path."""
    work = getattr(owner, name)

    def killed(path, *args, **kwargs):
        if place in os.fspath(path):
            os.killpg(0, signal.SIGKILL)
        return work(path, *args, **kwargs)

    setattr(owner, name, killed)


# Which process comes to the moment, and which it is.
KILLS = (
    # The first checkpoint, of which the other process may have begun to write.
    (1, ocp.v1, "save_checkpointables", "step-00000001"),
    # The arrays of both are there, within the second epoch, and the checkpoint is not.
    (0, os, "rename", "step-00000005"),
)


def live(work, *arguments):
    """Both processes, until they end or one is killed; their exit codes."""
    port, children = free_port(), []
    for number in (0, 1):
        children.append(start_forked(work, number, port, *arguments))
        os.setpgid(children[number], children[0])
    codes, end = {}, time.monotonic() + PATIENCE
    while len(codes) < 2:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[child] = os.waitstatus_to_exitcode(status)
        if status or time.monotonic() > end:
            # Whoever is left waits for its partner.
            if len(codes) < 2:
                os.killpg(children[0], signal.SIGKILL)
            end = float("inf")
        time.sleep(0.01)
    return [codes[child] for child in children]


def main():
    lives = [live(train, ROOT / "whole")]
    finished = []
    for kill in KILLS:
        lives.append(live(train, ROOT / "killed", kill))
        finished.append(
            [x.name for x in training.checkpoints.list_checkpoints(ROOT / "killed")]
        )
    lives.append(live(train, ROOT / "killed"))
    sharded = live(sharded_checkpoint.work, ROOT)
    results = {"lives": lives, "finished": finished, "sharded": sharded}
    print("RESULTS " + json.dumps(results))


if __name__ == "__main__":
    # Imported once for all lives; Keras imports TensorFlow where it sets a seed.
    _ = tf.data, models.ViTBackbone, training.RunCheckpoint
    main()
