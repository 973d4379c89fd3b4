"""Kills a training run at chosen moments until it comes to its end, on JAX.

Argument: a folder. Prints what happened. Lives are forked from a process that has
imported everything and computed nothing, so each is short.
"""

import json
import os
import signal
import sys
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
        sys.audit("step", str(self.steps))

    def get_state(self):
        return {"steps": self.steps}

    def set_state(self, state):
        self.steps = state["steps"]


# Python announces what it opens and renames: an event, and words of its first argument.
# Checkpoints are written in a folder `.step-NUMBER.*.partial` and then renamed.
KILLS = (
    # All is written, and not in its place.
    ("os.rename", ".step-00000012."),
    # While it starts, at the checkpoint that it goes on from.
    ("open", "step-00000010/state.json"),
    # The arrays are written, and the state is not.
    ("open", ".step-00000030.", "state.json"),
    # Between two checkpoints.
    ("step", "45"),
)


def die_at(event, *words):
    """Makes this process kill itself right before it does something."""

    def hook(name, arguments):
        if name == event and all(word in str(arguments[0]) for word in words):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def train(folder, compiles=None, kill=None):
    """Trains; `compiles` says whether programs are compiled that were not kept."""
    if kill is not None:
        die_at(*kill)
    misses = []
    jax.monitoring.register_event_listener(
        lambda name, **_: misses.append(name) if name.endswith("cache_misses") else None
    )
    training.Recipe.new_model = new_model
    options = {"verbose": 0, "checkpoint_dir": folder, "checkpoint_every": EVERY}
    training.train(RECIPE, datasets, callbacks=[Counts()], **options)
    assert compiles in (None, bool(misses)), misses


def newest(folder):
    checkpoints = training.checkpoints.list_checkpoints(folder)
    return int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0


def main():
    uninterrupted, killed = ROOT / "uninterrupted", ROOT / "killed"
    _, status = os.waitpid(start_forked(train, uninterrupted, True), 0)
    assert status == 0, status
    names = [path.name for path in PROGRAMS.iterdir()]
    assert any("train_step" in name for name in names), names
    steps, half_written = [], []
    for kill in KILLS:
        _, status = os.waitpid(start_forked(train, killed, None, kill), 0)
        assert status == signal.SIGKILL, (kill, status)
        steps.append(newest(killed))
        half_written.append([path.name[:14] for path in killed.glob(".step-*")])
    _, status = os.waitpid(start_forked(train, killed, False), 0)
    assert status == 0, status
    print("RESULTS " + json.dumps({"half-written": half_written, "steps": steps}))


if __name__ == "__main__":
    main()
