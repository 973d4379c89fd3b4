"""Triton is imported before TensorFlow, wherever this is imported first."""

import json

import keras
import pytest

from tests.forks import run_python

BACKEND = keras.backend.backend()
# A Triton that tells whether TensorFlow came before it, and is broken.
STAND_IN = """
import json, pathlib, sys

log = pathlib.Path(__file__).with_name("log.json")
log.write_text(json.dumps("tensorflow" in sys.modules))
raise OSError("no driver")
"""
# On PyTorch Keras itself imports Triton, before anything can import TensorFlow.
PROGRAMS = {
    "jax": {
        "pipelines": "from keras_moe.data import loading as door",
        "KerasHub": "from keras_hub.src.utils import tensor_utils as door",
    },
    "tensorflow": {"Keras": ""},
    "torch": {},
}[BACKEND]
# The library is light: it imports neither, and nor does who looks for TensorFlow.
JAX = """
import importlib.util, pathlib, sys
import keras_moe, keras_moe.models
{door}

assert importlib.util.find_spec("tensorflow") is not None
assert "tensorflow" not in sys.modules
assert not pathlib.Path(sys.path[0], "triton", "log.json").exists()
if door.__name__ == "keras_moe.data.loading":
    next(iter(door.load("digits", "test", (8, 8, 1), 8)))
else:
    door.tf.zeros(1)
"""
LOADED = "\nimport sys; assert 'tensorflow' in sys.modules"


def order_seen(folder, program):
    """Whether TensorFlow came before Triton; None if Triton was not imported."""
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").write_text(STAND_IN, encoding="utf-8")
    first = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    done = run_python("-c", first + program + LOADED, KERAS_BACKEND=BACKEND)
    assert done.returncode == 0, done.stderr
    log = folder / "triton" / "log.json"
    return json.loads(log.read_text(encoding="utf-8")) if log.exists() else None


@pytest.mark.every_backend
@pytest.mark.parametrize("name", PROGRAMS)
def test_triton_comes_before_tensorflow(tmp_path, name):
    program = (
        JAX.format(door=PROGRAMS[name]) if BACKEND == "jax" else "import keras_moe"
    )
    assert order_seen(tmp_path, program) is False


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "tensorflow", reason="one backend will do")
def test_triton_is_left_alone_where_it_is_too_late(tmp_path):
    program = "import keras, keras_moe; keras_moe.models"
    assert order_seen(tmp_path, program) is None
