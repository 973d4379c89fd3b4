"""The README's first example runs as it is printed, for one epoch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import keras

ROOT = Path(__file__).resolve().parent.parent


def test_the_first_example_runs(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    backend = keras.backend.backend()
    if backend == "jax":
        # Nothing but the example itself says which backend it takes.
        environment.pop("KERAS_BACKEND", None)
    assert "epochs=5" in example
    example = example.replace("epochs=5", "epochs=1")
    done = subprocess.run(
        [sys.executable, "-c", example + "\nprint(keras.backend.backend())"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == backend


MISSING = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorflow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import keras_moe
"""


def test_a_backend_that_is_not_installed_is_named(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MISSING],
        cwd=tmp_path,
        env={**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Expected an installed backend of Keras")
    assert "KERAS_BACKEND=jax" in last
