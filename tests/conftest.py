"""One backend, on the CPU, quiet and repeatable, whatever the machine."""

import contextlib
import gc
import importlib
import os
import sys
from unittest import mock

from tests.xla_flags import quick

# Imports and collection make a million objects that stay: Python's garbage collector
# would walk through all of them again and again. It is switched on when they are made.
gc.disable()

# Before Keras is imported. The environment wins: CUDA_VISIBLE_DEVICES=0 and
# KERAS_TORCH_DEVICE=cuda run the suite on a GPU.
for name, value in {
    "KERAS_BACKEND": "jax",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "KERAS_TORCH_DEVICE": "cpu",
    "MPLBACKEND": "Agg",
    # PyTorch's idle threads would spin, and stand still beside other work.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "XLA_FLAGS": quick(),
}.items():
    os.environ.setdefault(name, value)

# Before Keras, which imports TensorFlow: see `keras_moe/_triton_first.py`.
import keras_moe  # noqa: E402, F401

# isort: split
import functools  # noqa: E402

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# A comparison of NaN with NaN proves nothing, unless a test says that it wants it.
np.testing.assert_allclose = functools.partial(
    np.testing.assert_allclose, equal_nan=False
)

# Optimizing a graph takes a fifth of the time of a small model's tracing and steps. The
# tests that start programs run them as users do, with it.
if keras.backend.backend() == "tensorflow":
    import tensorflow

    tensorflow.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )

# A user's keras.json may say otherwise.
keras.config.set_floatx("float32")
keras.config.set_image_data_format("channels_last")


def pytest_addoption(parser):
    parser.addoption(
        "--fast", action="store_true", help="run only the tests marked every_backend"
    )


def pytest_ignore_collect(collection_path, config):
    """Imports only files that have something to run: imports take seconds."""
    if config.getoption("--fast") and collection_path.match("test_*.py"):
        return "every_backend" not in collection_path.read_text("utf-8") or None
    return None


def pytest_configure(config):
    if config.getoption("--fast"):
        asked = config.option.markexpr or "every_backend"
        config.option.markexpr = f"every_backend and ({asked})"


def pytest_collection_finish(session):
    _collect_garbage()
    # Seldom, for each file ends with a full collection.
    gc.set_threshold(20_000, 20, 1_000)
    gc.enable()


def _collect_garbage():
    """Frees what no name reaches, and sets aside what is left for good."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_start():
    """Every test starts with the same seed and the float32 policy."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="module")
def op_by_op():
    """On TensorFlow, traces nothing: for files about weights and configs."""
    with _functions_run_eagerly(True):
        yield


@pytest.fixture
def traced(op_by_op):
    """Traces after all: what takes many steps, and numbers of a reference."""
    with _functions_run_eagerly(False):
        yield


@contextlib.contextmanager
def _functions_run_eagerly(eagerly):
    if keras.backend.backend() != "tensorflow":
        yield
        return
    import tensorflow as tf

    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(eagerly)
    yield
    tf.config.run_functions_eagerly(before)


@pytest.fixture(autouse=True, scope="module")
def own_names():
    """Forgets the families, presets and routers that a file's tests have registered."""
    from keras_moe.models import registry
    from keras_moe.routers import ROUTERS

    with contextlib.ExitStack() as stack:
        for names in (registry._BACKBONES, registry._TASKS, registry._PRESETS, ROUTERS):
            stack.enter_context(mock.patch.dict(names))
        yield


@pytest.fixture(scope="module")
def outside(own_names):
    """A user's module, run again, since its names are registered for one file only."""
    sys.modules.pop("tests.models.outside", None)
    return importlib.import_module("tests.models.outside")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Frees JAX's compiled programs after each file: of too many, XLA aborts."""
    yield
    if os.environ.get("KERAS_BACKEND") == "jax":
        import jax

        jax.clear_caches()
    _collect_garbage()
