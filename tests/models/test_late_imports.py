"""Modules that are loaded when something of them is needed."""

import importlib
import os
import subprocess
import sys

import pytest

from keras_moe.models.late_imports import loaded_on_demand

NAME = "late_example"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that counts how often it is executed, and a module that imports it."""
    folder = tmp_path / NAME
    folder.mkdir()
    count = "import sys\nsys.loads = getattr(sys, 'loads', []) + [__name__]\n"
    (folder / "__init__.py").write_text(
        f"{count}from {NAME} import part\nclass Base: pass\ndef double(x): return 2 * x"
    )
    (folder / "part.py").write_text(f"{count}value = 3")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "loads", [], raising=False)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == NAME]:
        del sys.modules[name]


def test_listed_names_are_loaded_by_their_use(package):
    with loaded_on_demand({NAME: ("double", "part")}):
        module = importlib.import_module(NAME)
        double, part = module.double, module.part
    assert sys.loads == []
    assert NAME not in sys.modules
    assert double(4) == 8
    assert part.value == 3
    assert module.Base is importlib.import_module(NAME).Base
    assert sys.loads == [NAME, f"{NAME}.part"]


@pytest.mark.parametrize("statement", ["Base", "part", f"import {NAME}.part"])
def test_other_uses_within_load_the_module_once(package, statement):
    with loaded_on_demand({NAME: ("double",)}):
        module = importlib.import_module(NAME)
        if statement.startswith("import"):
            assert importlib.import_module(f"{NAME}.part").value == 3
        else:
            getattr(module, statement)
        assert sys.modules[NAME] is not module
    assert sorted(sys.loads) == [NAME, f"{NAME}.part"]
    spec = sys.modules[f"{NAME}.part"].__spec__
    assert spec.origin.endswith("part.py")


def test_absent_names_are_there_when_the_module_is(package):
    with loaded_on_demand({NAME: ()}, absent=("Base",)):
        module = importlib.import_module(NAME)
        assert not hasattr(module, "Base")
        assert sys.loads == []
        assert module.double(1) == 2
    assert module.Base.__name__ == "Base"


def test_a_loaded_or_missing_module_delays_nothing(package):
    with loaded_on_demand({NAME: (), "late_and_missing": ()}):
        assert importlib.import_module(NAME).double(1) == 2
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("late_and_missing")
    with loaded_on_demand({NAME: ()}):
        assert importlib.import_module(NAME) is sys.modules[NAME]


PROGRAM = """
import sys

import numpy as np

from keras_moe import models

model = models.from_preset(
    "vmoe_digits", num_classes=10, num_layers=2, load_weights=False
)
model.run_eagerly = True
model.predict(np.zeros((1, *model.input_shape[1:])), verbose=0)
assert "tensorflow" not in sys.modules

# KerasHub's own layers load it when they need it.
import keras_hub
import tensorflow as tf

texts = tf.data.Dataset.from_tensor_slices(["but tub"])
vocabulary = keras_hub.tokenizers.compute_word_piece_vocabulary(texts, 9)
assert "b" in vocabulary, vocabulary
tokenizer = keras_hub.tokenizers.BytePairTokenizer(
    vocabulary={"b": 0, "u": 1, "t": 2, "bu": 3, "but": 4}, merges=["b u", "bu t"]
)
assert np.array(tokenizer("but")).tolist() == [4]
assert [x.numpy().tolist() for x in texts.map(lambda x: tokenizer("but"))] == [[4]]
"""


def test_models_need_no_tensorflow():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
