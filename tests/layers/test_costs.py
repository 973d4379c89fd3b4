"""Costs and weight shapes on paper are those of the built layers."""

import math

import keras
import pytest

from keras_moe import layers, routers
from keras_moe.ops import Cost

N, D, E = 6, 8, 4
ATTENTION = {"num_heads": 2, "key_dim": 4}


def pathway_aware(**options):
    return routers.PathwayAwareRouter(
        7, zero_experts=1, copy_experts=1, constant_experts=1, **options
    )


def moe(router, **options):
    return layers.MoE(
        router, layers.Experts(E, 16, name="experts"), name="moe", **options
    )


LAYERS = {
    "LayerScale": layers.LayerScale,
    "MLP": lambda: layers.MLP(16),
    "gated MLP without biases": lambda: layers.MLP(16, gated=True, use_bias=False),
    "TokenMLP": lambda: layers.TokenMLP(16),
    "Experts": lambda: layers.Experts(E, 16),
    "gated Experts": lambda: layers.Experts(E, 16, gated=True),
    "Experts without biases": lambda: layers.Experts(E, 16, gated=True, use_bias=False),
    "ZeroComputationExperts": lambda: layers.ZeroComputationExperts(1, 1, 3),
    "zero and copy experts": lambda: layers.ZeroComputationExperts(1, 1),
    "TokenChoiceRouter": lambda: routers.TokenChoiceRouter(E),
    "TokenChoiceRouter of two modalities": lambda: routers.TokenChoiceRouter(
        E, num_modalities=2
    ),
    "ExpertChoiceRouter": lambda: routers.ExpertChoiceRouter(E, num_modalities=3),
    "SoftRouter": lambda: routers.SoftRouter(E, num_slots=2),
    "SoftRouter of a capacity factor": lambda: routers.SoftRouter(
        E, capacity_factor=2.0, normalize=False
    ),
    "PathwayAwareRouter": lambda: pathway_aware(gating_residual=True),
    "PathwayAwareRouter of two layers": lambda: pathway_aware(gate_hidden_dim=5),
    "MoE of token choice": lambda: moe(routers.TokenChoiceRouter(E)),
    "MoE of expert choice": lambda: moe(routers.ExpertChoiceRouter(E)),
    "MoE of soft routing": lambda: moe(routers.SoftRouter(E, capacity_factor=2.0)),
    "MoE of MoE++": lambda: moe(pathway_aware(gating_residual=True)),
    "ExpertCoefficients": lambda: layers.ExpertCoefficients((4, 2)),
    "MuMoE": lambda: layers.MuMoE(10, 4, rank=3, input_norm=True, edited_outputs=(2,)),
    "MuMoE of the whole tensor": lambda: layers.MuMoE(10, (4, 2), None, None),
    "MuMoE of a tensor ring": lambda: layers.MuMoE(10, (4, 2), "tr", (2, 3, 2, 5)),
    "MuMoEBlock": lambda: layers.MuMoEBlock(16, num_experts=4, input_norm=True),
    "MuMoEBlock of Tucker": lambda: layers.MuMoEBlock(
        16, num_experts=(4, 2), factorization="tucker", normalization="layer"
    ),
    "TokenMuMoE": lambda: layers.TokenMuMoE(
        layers.MuMoEBlock(16, num_experts=4, rank=3)
    ),
    "MultilinearExperts": lambda: layers.MultilinearExperts(10, 4, rank=3),
    "Attention with normalised queries": lambda: layers.Attention(
        **ATTENTION, query_key_norm="layer", query_key_norm_bias=True
    ),
    "Attention without biases": lambda: layers.Attention(**ATTENTION, use_bias=False),
    "Attention": lambda: layers.Attention(**ATTENTION),
    "Attention with grouped queries": lambda: layers.Attention(
        **ATTENTION, num_key_value_heads=1, use_bias=False, query_key_norm="rms"
    ),
    "Block of one RMS norm": lambda: layers.Block(
        layers.TokenMLP(5), layers.MLP(16), norm="rms", feed_forward_norm=False
    ),
    "Block": lambda: layers.Block(layers.Attention(**ATTENTION), layers.MLP(16)),
    "Block of a Mixer": lambda: layers.Block(layers.TokenMLP(5), layers.MLP(16)),
    "MoEBlock": lambda: layers.MoEBlock(
        layers.Attention(**ATTENTION), moe(routers.TokenChoiceRouter(E))
    ),
    "MoEBlock of muMoE": lambda: layers.MoEBlock(
        layers.TokenMuMoE(layers.MuMoEBlock(16, num_experts=4, rank=3)),
        layers.MuMoEBlock(16, num_experts=4, rank=3),
    ),
    "PatchEmbedding": lambda: layers.PatchEmbedding(D, patch_size=(2, 4)),
    "ClassToken": layers.ClassToken,
    "learned PositionEmbedding": lambda: layers.PositionEmbedding((2, 3)),
    "fixed PositionEmbedding": lambda: layers.PositionEmbedding((2, 3), kind="sincos"),
    "LayerNorm": layers.LayerNorm,
    "RMSNorm": layers.RMSNorm,
    "LayerNorm without offset": lambda: layers.LayerNorm(center=False),
    "TokenPooling": lambda: layers.TokenPooling("average"),
    "AttentionPooling": lambda: layers.AttentionPooling(2, 16, query_key_norm=True),
    "TokenEmbedding": lambda: layers.TokenEmbedding(20, D),
    "ReversibleTokenEmbedding": lambda: layers.ReversibleTokenEmbedding(
        20, D, tied=False
    ),
    "TextPositions": lambda: layers.TextPositions(9),
    "MaskedPooling": lambda: layers.MaskedPooling("average"),
    "LogitScale": lambda: layers.LogitScale(bias=-1.0),
}
SHAPES = {
    layers.PatchEmbedding: (8, 12, 3),
    layers.TokenEmbedding: (N,),
    layers.LogitScale: (D,),
}


def built(name):
    """The layer of a name, and the shape of an example of its inputs."""
    layer = LAYERS[name]()
    shape = SHAPES.get(type(layer), (N, D))
    layer.build(
        (None, E, *shape) if isinstance(layer, layers.Experts) else (None, *shape)
    )
    return layer, shape


@pytest.mark.parametrize("name", LAYERS)
def test_weight_shapes_and_parameters_are_those_of_the_built_layer(name):
    (layer, shape), unbuilt = built(name), LAYERS[name]()
    weights = {
        weight.path.removeprefix(f"{layer.path}/"): tuple(weight.shape)
        for weight in layer.trainable_weights
    }
    assert layer.weight_shapes(shape) == weights
    # Inner layers may have other numbers behind their names.
    assert sorted(unbuilt.weight_shapes(shape).values()) == sorted(weights.values())
    cost = unbuilt.cost(shape)
    assert isinstance(cost, Cost)
    assert cost == layer.cost(shape)
    assert cost.parameters == sum(map(math.prod, weights.values()))
    if not layer.non_trainable_weights:
        assert cost.parameters == layer.count_params()
    assert 0 <= cost.active_parameters <= cost.parameters
    assert all(isinstance(value, int) for value in cost)


def test_every_layer_has_its_costs():
    public = [getattr(layers, name) for name in layers.__all__]
    public += [getattr(routers, name) for name in routers.__all__]
    public = {
        cls
        for cls in public
        if isinstance(cls, type) and issubclass(cls, keras.layers.Layer)
    }
    # It has no weights, and returns a mask.
    public -= {layers.CausalMask}
    # Base classes, and the adversary of a training run, which is part of no model.
    public -= {routers.Router, routers.SparseRouter}
    assert {type(layer()) for layer in LAYERS.values()} == public


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 2 x (8 x 16) multiply-adds for each of 6 tokens.
        ("MLP", (280, 280, 2 * 6 * 2 * 8 * 16)),
        # The same across 6 tokens for each of 8 channels.
        ("TokenMLP", (214, 214, 2 * 8 * 2 * 6 * 16)),
        # A row meets one expert of four.
        ("Experts", (4 * 280, 280, 2 * 6 * 2 * 8 * 16)),
        # Kernel (8, 4), and two of four experts for each token.
        (
            "MoE of token choice",
            (32 + 4 * 280, 32 + 2 * 280, 2 * 6 * (32 + 2 * 2 * 8 * 16)),
        ),
        # Four projections, and queries by keys and weights by values.
        ("Attention", (288, 288, 2 * 6 * 4 * 64 + 2 * 2 * 6 * 6 * 8)),
        # A row for each of 20 ids, of which a lookup multiplies none.
        ("TokenEmbedding", (160, 160, 0)),
        # 4 x 3 patches of 2 x 4 x 3 numbers.
        ("PatchEmbedding", (200, 200, 2 * 12 * 24 * 8)),
    ],
)
def test_costs_by_hand(name, expected):
    layer, shape = built(name)
    assert tuple(layer.cost(shape)) == expected
