"""A short training with a folder for compiled programs, in two processes in turn."""

import functools
import itertools
import sys
from pathlib import Path

from tests.forks import run_forked, use_jax_on_cpu

use_jax_on_cpu(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from keras_moe import training  # noqa: E402

FOLDER = Path(sys.argv[1])
RECIPE = training.Recipe(
    "cached",
    data={"source": "digits", "batch_size": 4},
    model={
        "preset": "vmoe_digits",
        "num_layers": 1,
        "moe_layers": [0],
        "hidden_dim": 8,
        "num_heads": 2,
        "mlp_dim": 8,
        "load_weights": False,
    },
    schedule={"epochs": 1, "learning_rate": 1e-3},
    compilation_cache=str(FOLDER),
)


def run(is_first, number):
    misses = []
    jax.monitoring.register_event_listener(
        lambda name, **_: misses.append(name) if name.endswith("cache_misses") else None
    )
    batch = np.zeros((4, 16, 16, 1), "float32"), np.eye(10, dtype="float32")[:4]
    batches = (batch for _ in itertools.count())
    datasets = training.Datasets(batches, batch, 10, steps_per_epoch=1)
    training.train(RECIPE, datasets, verbose=0)
    assert bool(misses) == is_first, misses


if __name__ == "__main__":
    # Keras imports it where it sets a seed: once for both.
    _ = tf.data
    run_forked(functools.partial(run, True), 1)
    names = sorted(path.name for path in FOLDER.iterdir())
    assert any("train_step" in name for name in names), names
    run_forked(functools.partial(run, False), 1)
    assert sorted(path.name for path in FOLDER.iterdir()) == names
