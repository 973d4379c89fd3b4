"""Kernels stacked by expert: how they are drawn and loaded."""

import tracemalloc

import keras
import pytest
from keras import ops

from keras_moe import models
from keras_moe.layers import Experts
from tests.compare import assert_same


def _model(**options):
    inputs = keras.Input((4, 3, 128))
    return keras.Model(inputs, Experts(4, 256, **options)(inputs))


def _values(layer):
    return [ops.convert_to_numpy(ops.cast(w, "float32")) for w in layer.weights]


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["x.weights.h5", "x.weights.json"])
def test_stored_kernels_are_what_was_saved(tmp_path, dtype, name):
    # The last are cast.
    saved = _model(dtype="float32" if dtype == "float16" else dtype)
    loaded = _model(dtype=dtype)
    # Shards hold a kernel each.
    size = {"max_shard_size": 7e-4} if name.endswith("json") else {}
    saved.save_weights(tmp_path / name, **size)
    loaded.load_weights(tmp_path / name)
    for expected, received in zip(_values(saved), _values(loaded)):
        if dtype == "float16":
            expected = expected.astype(dtype)
        assert_same(received, expected)


def test_a_kernel_is_in_memory_once_while_it_is_read(tmp_path):
    saved, loaded = _model(), _model()
    saved.save_weights(tmp_path / "x.weights.h5")
    kernel = 4 * 4 * 128 * 256
    tracemalloc.start()
    try:
        loaded.load_weights(tmp_path / "x.weights.h5")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # PyTorch's weights are written in place; NumPy's memory becomes the others', of
    # which there are two kernels. The rest is h5py's and Keras's own.
    number = 0 if keras.backend.backend() == "torch" else 2
    assert peak < (number + 0.5) * kernel


def test_weights_that_are_loaded_are_not_drawn(tmp_path, monkeypatch):
    model = models.from_preset(
        "vmoe_digits", num_classes=3, mlp_dim=8, load_weights=False
    )
    model.save_to_preset(tmp_path / "preset")
    draws = []

    def draw(self, shape, dtype=None):
        draws.append(shape)
        return ops.zeros(shape, dtype)

    # The kernels' own, which are drawn for every other model.
    monkeypatch.setattr(keras.initializers.VarianceScaling, "__call__", draw)
    monkeypatch.setattr(keras.initializers.RandomNormal, "__call__", draw)
    loaded = models.from_preset(tmp_path / "preset")
    assert not draws
    for expected, received in zip(_values(model), _values(loaded)):
        assert_same(received, expected)
