"""Weights follow the graph, on every backend and however a model was made."""

import keras
import pytest

from keras_moe import models
from tests.backends import every_backend_for
from tests.models.kinds_of_models import KINDS, lm, vit
from tests.pair_models import IMAGE, MOE, TEXT
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("op_by_op")


def adapted():
    model = vit({"representation_dim": 4, "pooled_norm": True}, **MOE)
    model.enable_lora(2)
    return model


def deep_text():
    towers = {"image": {**IMAGE, **MOE}, "text": {**TEXT, "num_layers": 4}}
    return models.CLIPBackbone(**towers, projection_dim=4)


MAKERS = {
    **{name: make for name, (make, _) in KINDS.items()},
    "LoRA": adapted,
    "text deeper than images": deep_text,
    "untied": lambda: lm(tied_embeddings=False, positions="learned"),
}


def in_the_graph(model):
    """Weights by the layers of the graph, and of the graphs within."""
    weights = []
    for layer in model.layers:
        is_model = isinstance(layer, keras.Model)
        weights += in_the_graph(layer) if is_model else layer.weights
    return list({id(weight): weight for weight in weights}.values())


@pytest.mark.parametrize(
    "kind", every_backend_for(MAKERS, "vmoe", "mumoe head", "clip_up", "LoRA")
)
def test_the_order_is_that_of_the_graph_and_keras_clones_are_refused(kind):
    model = MAKERS[kind]()
    expected = [id(weight) for weight in in_the_graph(model)]
    assert [id(weight) for weight in model.weights] == expected
    # The optimizer's variables are in the order of these.
    trainable = [id(x) for x in in_the_graph(model) if x.trainable]
    assert [id(weight) for weight in model.trainable_variables] == trainable
    # They would be plain models, and a causal model's embedding no longer tied.
    match = r"Expected model\.copy\(\).* without " + type(model).__name__
    options = [{}, {"clone_function": lambda layer: layer}]
    options += [{"input_tensors": model.input}, {"call_function": lambda f, *x: f(*x)}]
    for each in options:
        refuses(match, keras.models.clone_model, model, **each)
