"""Two processes on loopback, which save a sharded model, and restore it.

Arguments: the port of the first, a folder, and storages, each of which has a folder of
its own there. They restore on another layout, and compare; and each writes how many
weights were split there.
"""

import os
import sys
from pathlib import Path

PORT, FOLDER = sys.argv[1], Path(sys.argv[2])
STORAGES = sys.argv[3:]
os.environ.update(
    KERAS_BACKEND="jax",
    JAX_PLATFORMS="cpu",
    JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
    XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_force_host_platform_device_count=2",
)

# Keras imports it to look for its kinds of shapes: two seconds for nothing.
sys.modules["tensorflow"] = None

import keras  # noqa: E402
import numpy as np  # noqa: E402

from keras_moe import distribution, models, training  # noqa: E402
from tests.forks import run_forked  # noqa: E402

CONFIG = {
    "image_shape": (16, 16, 3),
    "patch_size": 8,
    "hidden_dim": 16,
    "num_layers": 1,
    "mlp_dim": 32,
    "num_heads": 2,
    "moe_layers": "every_1",
    "num_experts": 4,
    "examples_per_group": 1,
    "class_token": False,
}


def make(**layout):
    keras.distribution.set_distribution(
        distribution.auto("vit_s16", batch_size=8, **layout, **CONFIG)
    )
    keras.utils.set_random_seed(0)
    model = models.from_preset("vit_s16", num_classes=3, seed=0, **CONFIG)
    model.compile(keras.optimizers.SGD(1.0, momentum=0.9))
    model.optimizer.build(model.trainable_variables)
    return model


def groups(model):
    return {"model": model.variables, "optimizer": model.optimizer.variables}


def values(model):
    return [
        distribution.gathered(variable)
        for variables in groups(model).values()
        for variable in variables
    ]


def work(number):
    # Before anything asks for devices.
    keras.distribution.initialize(f"127.0.0.1:{PORT}", 2, number)
    keras.utils.set_random_seed(0)
    model = make()
    draw = np.random.default_rng(0)
    for variable in [*model.weights, *model.optimizer.variables[2:]]:
        variable.assign(draw.normal(size=variable.shape))
    expected = values(model)
    other = make(model_parallel=2)
    before = [variable.value.sharding for variable in other.variables]
    for storage in STORAGES:
        run = FOLDER / storage
        getattr(training, storage)(run).save(1, groups(model), {})
        # A collective, so that the first process has committed.
        values(model)
        for variable in other.variables:
            variable.assign(np.zeros(variable.shape))
        training.restore_checkpoint(training.find_checkpoint(run), groups(other))
        for a, b in zip(values(other), expected, strict=True):
            np.testing.assert_array_equal(a, b)
        assert [variable.value.sharding for variable in other.variables] == before
    split = [x for x in other.weights if not x.value.sharding.is_fully_replicated]
    if number == 0:
        np.savez(FOLDER / "expected.npz", *expected)
    (FOLDER / f"split-{number}").write_text(str(len(split)))


if __name__ == "__main__":
    # Imported once for both.
    _ = models.ViTBackbone, training.LocalStorage, training.OrbaxStorage
    run_forked(work, 2)
