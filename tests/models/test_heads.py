"""Heads of classifiers: which tokens they read, and muMoE heads."""

import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe import models
from keras_moe.layers import MuMoE
from tests.compare import assert_close, assert_same, to_numpy
from tests.small_models import images, vit, with_weights

SHAPE = (16, 8, 2)
RING = MuMoE(
    3, (4, 2), "tr", (2, 3, 2, 4), activation="softmax", normalization="layer",
    expert_noise=0.5, edited_outputs=(1,),
)  # fmt: skip
HEADS = {
    "final": {
        "head": RING, "output_activation": "softmax", "representation_dim": 6,
        "dropout": 0.3, "preprocessor": keras.layers.Rescaling(2.0), "name": "mine",
    },
    "penultimate": {
        "head": MuMoE(7, 4, rank=5), "head_position": "penultimate", "head_bias": -2.0,
        "multi_label": True, "head_dtype": "mixed_bfloat16", "pooling": "map",
    },
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("op_by_op")


def backbone(**kwargs):
    return vit(num_layers=1, moe_layers=None, seed=0, **kwargs)


@pytest.mark.parametrize("position", HEADS)
def test_outputs_config_and_counts(position):
    arguments = HEADS[position]
    model = models.ViTImageClassifier(backbone(), 3, **arguments)
    model = with_weights(model)
    for weight in model.weights:
        if "moving_variance" in weight.path:
            weight.assign(ops.ones(weight.shape))
    inputs = images(5, *SHAPE)
    actual = keras.Model(
        model.input,
        {"outputs": model.output, "features": model.features, **model.routing},
    ).predict(inputs, verbose=0)
    assert list(model.routing) == ["head"]
    assert actual["head"].gates.shape == (5, 1, model.head.gate.expert_types.total)
    # The same by hand, from what the head reads.
    y, _ = model.head(actual["features"])
    y = to_numpy(ops.cast(y, "float32"))
    if position == "final":
        y = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
        tolerance = 1e-5
    else:
        kernel, bias = (to_numpy(w) for w in model.output_dense.weights)
        y = np.maximum(y, 0) @ kernel + bias
        # Heads in bfloat16, of 8 bits.
        tolerance = 3e-2
    assert_close(actual["outputs"], y, tolerance, tolerance)
    trained = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert models.describe(model).parameters == trained

    config = json.loads(json.dumps(model.get_config()))
    for name in arguments.keys() - {"head", "preprocessor"}:
        assert config[name] == arguments[name]
    again = models.ViTImageClassifier.from_config(config)
    assert again.get_config() == model.get_config()
    assert [w.path for w in again.weights] == [w.path for w in model.weights]


def test_a_head_is_a_description_or_a_dict_of_arguments():
    head = MuMoE(3, 4, rank=5, name="mine")
    first, second = (models.ViTImageClassifier(backbone(), 3, head=head) for _ in "ab")
    assert first.head.name == second.head.name == "head"
    assert not head.built
    of_first, of_second = ({id(v) for v in x.head.weights} for x in (first, second))
    assert not of_first & of_second
    model = models.ViTImageClassifier(backbone(), 3, head={"num_experts": 4, "rank": 5})
    assert (model.head.units, model.head.gate.num_experts) == (3, (4,))
    again = models.ViTImageClassifier.from_config(model.get_config())
    assert again.get_config() == model.get_config()


@pytest.mark.parametrize(
    ("of_head", "norms"), [(None, 2), (True, 2), (False, 0), ("without", 0)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_attention_pooling_normalises_where_the_blocks_do(of_head, norms, bias):
    normalizes = of_head != "without"
    of_head = None if of_head == "without" else of_head
    model = models.ViTImageClassifier(
        backbone(query_key_norm=normalizes, query_key_norm_bias=normalizes and bias),
        3,
        pooling="map",
        pooling_query_key_norm=of_head,
    )
    actual = [
        weight.path
        for weight in model.pooler.weights
        if "query_norm" in weight.path or "key_norm" in weight.path
    ]
    assert len(actual) == norms * (1 + bias)
    assert models.describe(model).parameters == model.count_params()
    again = models.ViTImageClassifier.from_config(model.get_config())
    assert again.get_config()["pooling_query_key_norm"] is of_head
    assert again.count_params() == model.count_params()


def test_the_first_patchs_token():
    model = models.ViTImageClassifier(backbone(class_token=False), 3, pooling="first")
    tokens = np.random.default_rng(0).normal(size=(2, 8, 16)).astype("float32")
    assert_same(model.pooler(tokens), tokens[:, 0])
    assert models.ViTImageClassifier.from_config(model.get_config()).pooling == "first"
