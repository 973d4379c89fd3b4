"""The README's first example runs as it is printed, for one epoch."""

import os
import re

import keras
import pytest

from tests.forks import ROOT, run_python

# Nothing else of the suite's environment, such as XLA's flags, reaches the example.
OF_THE_SYSTEM = {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TMPDIR"}


@pytest.mark.every_backend
def test_the_first_example_runs_as_users_run_it(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    backend = keras.backend.backend()
    for name in os.environ.keys() - OF_THE_SYSTEM:
        monkeypatch.delenv(name)
    if backend != "jax":
        # The example itself says that it takes JAX.
        monkeypatch.setenv("KERAS_BACKEND", backend)
    assert "epochs=5" in example
    example = example.replace("epochs=5", "epochs=1")
    example += "\nprint(keras.backend.backend())"
    done = run_python("-c", example, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == backend


def test_fast_runs_only_what_is_marked(pytestconfig):
    assert not pytestconfig.getoption("--fast")


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
    done = run_python("-c", MISSING, cwd=tmp_path, KERAS_BACKEND="tensorflow")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Expected an installed backend of Keras")
    assert "KERAS_BACKEND=jax" in last
