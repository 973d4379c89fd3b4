"""Dense layers that add their bias while they multiply are Keras's in all else."""

import keras
import numpy as np
import pytest

from keras_moe.layers._layer import fused_bias
from tests.compare import assert_close

TOKENS = np.random.default_rng(0).normal(size=(2, 3, 8)).astype("float32")
LAYERS = {
    "dense": lambda: keras.layers.Dense(
        6, activation="tanh", bias_initializer="normal", name="dense"
    ),
    "no bias": lambda: keras.layers.Dense(6, use_bias=False, name="dense"),
    "heads": lambda: keras.layers.EinsumDense(
        "abc,cde->abde", (3, 2, 4), bias_axes="de", bias_initializer="normal"
    ),
}


def pair(make):
    """A layer of Keras and the fused one, with the same weights."""
    plain, fused = make(), fused_bias(make())
    for layer in (plain, fused):
        layer.build(TOKENS.shape)
    fused.set_weights(plain.get_weights())
    return plain, fused


@pytest.mark.parametrize("change", ["nothing", "lora", "int8"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_outputs_are_those_of_keras(make, change):
    plain, fused = pair(make)
    for layer in (plain, fused):
        if change == "lora":
            layer.enable_lora(2)
            layer.lora_kernel_a.assign(np.ones(layer.lora_kernel_a.shape))
            layer.lora_kernel_b.assign(np.ones(layer.lora_kernel_b.shape))
        if change == "int8":
            layer.quantize("int8")
    assert_close(
        *(keras.ops.convert_to_numpy(x(TOKENS)) for x in (fused, plain)), atol=1e-5
    )
    assert [v.path.split("/")[-1] for v in fused.weights] == [
        v.path.split("/")[-1] for v in plain.weights
    ]
