"""Which tokens a classifier's head reads, and how attention pooling normalises."""

import numpy as np
import pytest

from keras_moe import models
from keras_moe.models import ViTBackbone, ViTImageClassifier

SMALL = {
    "image_shape": (8, 8, 3),
    "patch_size": 4,
    "hidden_dim": 8,
    "num_layers": 1,
    "num_heads": 2,
    "mlp_dim": 16,
}


def classifier(pooling, pooling_query_key_norm=None, **kwargs):
    return ViTImageClassifier(
        ViTBackbone.from_config({**SMALL, **kwargs}),
        3,
        pooling=pooling,
        pooling_query_key_norm=pooling_query_key_norm,
    )


@pytest.mark.parametrize(
    ("of_head", "norms"), [(None, 2), (True, 2), (False, 0), ("without", 0)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_attention_pooling_normalises_where_the_blocks_do(of_head, norms, bias):
    normalizes = of_head != "without"
    of_head = None if of_head == "without" else of_head
    model = classifier(
        "map",
        of_head,
        query_key_norm=normalizes,
        query_key_norm_bias=normalizes and bias,
    )
    actual = [
        weight.path
        for weight in model.pooler.weights
        if "query_norm" in weight.path or "key_norm" in weight.path
    ]
    assert len(actual) == norms * (1 + bias)
    assert models.describe(model).parameters == model.count_params()
    again = ViTImageClassifier.from_config(model.get_config())
    assert again.get_config()["pooling_query_key_norm"] is of_head
    assert again.count_params() == model.count_params()


def test_the_first_patchs_token():
    model = classifier("first", class_token=False)
    tokens = np.random.default_rng(0).normal(size=(2, 4, 8)).astype("float32")
    np.testing.assert_array_equal(model.pooler(tokens), tokens[:, 0])
    assert ViTImageClassifier.from_config(model.get_config()).pooling == "first"
