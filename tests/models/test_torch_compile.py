"""Models under `torch.compile`, as docs/keras.md describes it."""

import keras
import numpy as np

from keras_moe.models import ViTBackbone
from tests.small_models import SMALL, images, with_weights


def test_a_dense_model_compiles_as_one_graph():
    import torch

    sizes = {k: v for k, v in SMALL.items() if k not in ("moe_layers", "num_experts")}
    model = with_weights(ViTBackbone.from_config(sizes))
    inputs = torch.tensor(images(2, *SMALL["image_shape"]))
    # Without the compiler of C++ code, which takes most of the time and has no part
    # in whether a model can be read as one graph.
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        actual, expected = (
            keras.ops.convert_to_numpy(function(inputs, training=False))
            for function in (compiled, model)
        )
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
