"""A sharded model of two processes, which save it, and restore it on another layout.

They restore what one process has written, too, and compare; each writes how many
weights were split. `killed_processes.py`, which starts processes, imports it.
"""

from itertools import chain
from types import SimpleNamespace

import keras
import numpy as np

from keras_moe import distribution, models, training
from keras_moe.training import _checkpoint_files as checkpoint_files
from tests.compare import assert_same
from tests.small_models import ONE_BLOCK, SMALL

CONFIG = {**SMALL, **ONE_BLOCK, "image_shape": (16, 16, 3), "patch_size": 8}
CONFIG |= {"examples_per_group": 1, "class_token": False}


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
    return [distribution.gathered(x) for x in chain(*groups(model).values())]


def write_alone(folder, model, arrays):
    """Writes the same checkpoint as one process does."""
    arrays = iter(arrays)
    whole = {
        group: [SimpleNamespace(path=v.path, value=next(arrays)) for v in variables]
        for group, variables in groups(model).items()
    }
    described = {
        group: [(v.path, tuple(v.shape), str(v.dtype)) for v in variables]
        for group, variables in groups(model).items()
    }
    content = {"step": 1, "state": {}, "variables": described}
    path = folder / "one" / "step-00000001"
    checkpoint_files.write_safetensors(path, whole, content)


def work(number, port, folder):
    # Before anything asks for devices.
    keras.distribution.initialize(f"127.0.0.1:{port}", 2, number)
    keras.utils.set_random_seed(0)
    model = make()
    draw = np.random.default_rng(0)
    for variable in [*model.weights, *model.optimizer.variables[2:]]:
        variable.assign(draw.normal(size=variable.shape))
    expected = values(model)
    other = make(model_parallel=2)
    before = [variable.value.sharding for variable in other.variables]
    training.save_checkpoint(folder / "several", 1, groups(model), {})
    if number == 0:
        write_alone(folder, model, expected)
    for name in ("several", "one"):
        # A collective, so that the first process has committed.
        values(model)
        for variable in other.variables:
            variable.assign(np.zeros(variable.shape))
        training.find_checkpoint(folder / name).restore(groups(other))
        assert_same(values(other), expected)
        assert [variable.value.sharding for variable in other.variables] == before
    split = [x for x in other.weights if not x.value.sharding.is_fully_replicated]
    if number == 0:
        np.savez(folder / "expected.npz", *expected)
    (folder / f"split-{number}").write_text(str(len(split)))
