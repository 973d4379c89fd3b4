"""XLA ends a process over a flag that it lacks: the suite's must be known."""

import importlib.util

import keras
import pytest

from tests import xla_flags
from tests.forks import run_python

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="once is enough"),
]
START = {
    "jax": "import jax; jax.devices()",
    "tensorflow": """
import tensorflow as tf
tf.function(tf.sin, jit_compile=True)(1.0)
""",
}


def starts(package, flags):
    """Whether a process in which XLA reads the flags lives, and all that it says."""
    environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = run_python("-c", START[package], **environment)
    return done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", START)
def test_the_suite_passes_flags_that_xla_knows(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    flags = xla_flags.quick(xla_force_host_platform_device_count=2)
    assert flags.split()[-1] == "--xla_force_host_platform_device_count=2"
    lives, errors = starts(package, flags)
    assert lives, errors
