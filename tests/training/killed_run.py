"""Kills a training run again and again until it comes to its end, on JAX.

Arguments: a folder, and how often to kill. Prints what happened. Lives are forked from
a process that has imported everything and computed nothing, so each is short.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.forks import start_forked, use_jax_on_cpu

# The recipe's folder for compiled programs is the one that counts.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
use_jax_on_cpu(
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
)

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from keras_moe import layers, routers, training  # noqa: E402

ROOT, PROGRAMS = Path(sys.argv[1]), Path(sys.argv[1]) / "programs"
EPOCHS, STEPS, EVERY = 3, 20, 2
RECIPE = training.Recipe(
    "killed",
    data={"batch_size": 8},
    model={"preset": "vmoe_digits", "load_weights": False},
    schedule={"epochs": EPOCHS, "learning_rate": 1e-2, "warmup_steps": 5},
    optimizer={"weight_decay": 0.1},
    compilation_cache=str(PROGRAMS),
)


def new_model(self, num_classes):
    """A small model with the random parts of a V-MoE: router noise, and dropout."""
    tokens = keras.Input((8, 4))
    router = routers.TokenChoiceRouter(4, 1, capacity_factor=1.0, seed=1)
    moe = layers.MoE(
        router, layers.Experts(4, 8, seed=2), auxiliary_losses={"importance": 0.1}
    )
    outputs, _ = moe(tokens)
    outputs = keras.layers.Dropout(0.2, seed=3)(outputs + tokens)
    outputs = keras.layers.Dense(num_classes)(keras.layers.Flatten()(outputs))
    model = keras.Model(tokens, outputs)
    model.multi_label, model.output_activation = False, None
    return model


def datasets(step):
    """Noise, another for each step."""
    draw = np.random.default_rng(0)
    tokens = draw.normal(size=(EPOCHS * STEPS, 8, 8, 4)).astype("float32")
    labels = np.eye(3, dtype="float32")[draw.integers(3, size=(EPOCHS * STEPS, 8))]
    train = tf.data.Dataset.from_tensor_slices((tokens[step:], labels[step:])).repeat()
    return training.Datasets(train, (tokens[0], labels[0]), 3, STEPS)


class Counts(keras.callbacks.Callback):
    """A callback with a state of its own."""

    steps = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1

    def get_state(self):
        return {"steps": self.steps}

    def set_state(self, state):
        self.steps = state["steps"]


def train(folder, compiles=None):
    """Trains; `compiles` says whether programs are compiled that were not kept."""
    misses = []
    jax.monitoring.register_event_listener(
        lambda name, **_: misses.append(name) if name.endswith("cache_misses") else None
    )
    training.Recipe.new_model = new_model
    training.train(
        RECIPE,
        datasets,
        callbacks=[Counts()],
        verbose=0,
        checkpoint_dir=folder,
        checkpoint_every=EVERY,
    )
    assert compiles in (None, bool(misses)), misses


def newest(folder):
    checkpoints = training.list_checkpoints(folder)
    return int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0


def is_writing(folder):
    return any(folder.glob(".step-*.partial"))


def check_alive(child):
    ended, status = os.waitpid(child, os.WNOHANG)
    assert not ended, f"ended by itself, with status {status}"


def main():
    uninterrupted, killed = ROOT / "uninterrupted", ROOT / "killed"
    _, status = os.waitpid(start_forked(train, uninterrupted, True), 0)
    assert status == 0, status
    names = [path.name for path in PROGRAMS.iterdir()]
    assert any("train_step" in name for name in names), names
    draw = random.Random(0)
    in_a_write, steps = 0, []
    for kill in range(int(sys.argv[2])):
        start = newest(killed)
        child = start_forked(train, killed)
        if kill == 2:
            # While it starts.
            time.sleep(draw.uniform(0, 1))
        else:
            # All over the run, and not to its end.
            goal = min(start + draw.randrange(8 * EVERY), 8 * (kill + 1))
            while newest(killed) < goal:
                check_alive(child)
                time.sleep(0.001)
            while kill % 2 and not is_writing(killed):
                check_alive(child)
            # A step and its checkpoint take about 20 ms.
            time.sleep(draw.uniform(0, 0.005 if kill % 2 else 0.02))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert status == signal.SIGKILL, status
        in_a_write += is_writing(killed)
        steps.append(newest(killed))
    _, status = os.waitpid(start_forked(train, killed, False), 0)
    assert status == 0, status
    print("RESULTS " + json.dumps({"in a write": in_a_write, "steps": steps}))


if __name__ == "__main__":
    main()
