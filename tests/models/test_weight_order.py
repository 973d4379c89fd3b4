"""Weights follow the graph, on every backend and however a model was made."""

import keras
import pytest

from keras_moe import models
from keras_moe.training import upcycle
from tests.backends import every_backend_for
from tests.pair_models import IMAGE, MOE, ONE, TEXT, clip, limoe
from tests.refusals import refuses
from tests.small_models import SMALL

pytestmark = pytest.mark.usefixtures("op_by_op")
BLOCK = """
    block_0/attention/query kernel bias
    block_0/attention/key kernel bias
    block_0/attention/value kernel bias
    block_0/attention/attention_output kernel bias
    block_0/moe/experts hidden_kernel output_kernel hidden_bias output_bias
    block_0/moe/router kernel
    block_0/mixer_norm gamma beta
    block_0/feed_forward_norm gamma beta
    final_norm gamma beta
"""
CLASSIFIER = f"""
    patch_embedding kernel bias
    class_token token
    position_embedding embedding
    {BLOCK}
    pooled_norm gamma beta
    pre_logits kernel bias
    predictions kernel bias
"""
PAIRS = f"""
    image/patch_embedding kernel bias
    image/class_token token
    image/position_embedding embedding
    {BLOCK.replace("    ", "    image/")}
    image/projection kernel
    text/token_embedding embeddings
    text/text_positions embedding
    {BLOCK.replace("    ", "    text/")}
    text/projection kernel
    logit_scale log_scale
"""


def classifier(moe=(), **options):
    """As many classes as the representation has dimensions."""
    fields = {**SMALL, "image_shape": (16, 8, 3), **dict(moe)}
    backbone = models.ViTBackbone.from_config(fields)
    return models.ViTImageClassifier(backbone, 16, **options)


def from_preset(name, **options):
    sizes = {key: SMALL[key] for key in ("hidden_dim", "num_layers", "mlp_dim")}
    sizes |= {"image_shape": (16, 16, 3), "patch_size": 8}
    return models.from_preset(
        name, num_classes=16, load_weights=False, **sizes, **options
    )


def decoder(**options):
    fields = {**TEXT, **MOE, "num_selected_experts": 2, **options}
    return models.DecoderBackbone.from_config(fields)


def adapted():
    model = classifier(representation_dim=16)
    model.enable_lora(2)
    return model


def deep_text():
    towers = {"image": {**IMAGE, **MOE}, "text": {**TEXT, "num_layers": 4}}
    return models.CLIPBackbone(**towers, projection_dim=4)


KINDS = {
    "V-MoE": lambda: classifier(representation_dim=16, pooled_norm=True),
    "attention pooling": lambda: classifier(pooling="map", representation_dim=16),
    "ViT": lambda: from_preset("vit_s16", num_heads=2),
    "upcycled": lambda: upcycle(from_preset("vit_s16", num_heads=2), 4)[0],
    "Soft MoE": lambda: classifier({"router": "soft"}, representation_dim=16),
    "MoE++": lambda: classifier({"copy_experts": 1}, representation_dim=16),
    "muMoE head": lambda: classifier(
        representation_dim=16,
        head={"num_experts": 3, "rank": 4, "units": 16},
        head_position="penultimate",
    ),
    "Mixer": lambda: from_preset("mixer_s16"),
    "muMoE": lambda: from_preset("mumoe_mixer_s16_cp"),
    "CLIP": lambda: clip({}),
    "CLIP-UP": lambda: models.ContrastiveModel(clip()),
    "text deeper than images": deep_text,
    "SigLIP": lambda: models.ContrastiveModel(clip(temperature="siglip")),
    "LIMoE": lambda: models.ContrastiveModel(limoe()),
    "text": lambda: models.TextBackbone.from_config({**TEXT, **MOE}),
    "decoder": decoder,
    "causal": lambda: models.CausalLM(decoder()),
    "causal, untied": lambda: models.CausalLM(
        decoder(tied_embeddings=False, positions="learned")
    ),
    "LoRA": adapted,
    "pruned": lambda: classifier(representation_dim=16).with_kept_experts(
        {"block_1": [0, 2]}
    ),
}


def paths(model):
    return [weight.path for weight in model.weights]


def in_the_graph(model):
    """Weights by the layers of the graph, and of the graphs within."""
    weights = []
    for layer in model.layers:
        is_model = isinstance(layer, keras.Model)
        weights += in_the_graph(layer) if is_model else layer.weights
    return list({id(weight): weight for weight in weights}.values())


@pytest.mark.every_backend
@pytest.mark.parametrize(("make", "expected"), [
    (
        lambda: classifier(
            {"num_layers": 1, "moe_layers": [0]},
            representation_dim=16,
            pooled_norm=True,
        ),
        CLASSIFIER,
    ),
    (lambda: models.ContrastiveModel(clip({**MOE, **ONE})), PAIRS),
], ids=["classifier", "pairs"])  # fmt: skip
def test_the_order_is_that_of_a_list(make, expected):
    lines = [line.split() for line in expected.splitlines() if line.strip()]
    assert paths(make()) == [f"{place}/{x}" for place, *names in lines for x in names]


@pytest.mark.parametrize(
    "kind", every_backend_for(KINDS, "V-MoE", "muMoE head", "LoRA")
)
def test_the_order_is_that_of_the_graph_and_keras_clones_are_refused(kind):
    model = KINDS[kind]()
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
