"""Every public layer of `layers` and `routers`, by one check, and its costs."""

import math

import keras
import numpy as np
import pytest

from keras_moe import layers, routers
from keras_moe.ops import Cost
from tests.backends import every_backend_for
from tests.layer_check import check_layer
from tests.refusals import refuses

B, N, D, E = 3, 6, 8, 4
EXPERT_TYPES = {"zero_experts": 1, "copy_experts": 1, "constant_experts": 2}
ROUTING = {
    "combine": "affinity", "capacity_factor": 1.5, "eval_capacity_factor": 2.0,
    "evaluation": "official", "capacity_rounding": "round", "capacity_multiple_of": 2,
    "noise_std": 0.5, "kernel_initializer": "glorot_normal", "seed": 7,
}  # fmt: skip
TOKENS_CHOOSE = {
    **ROUTING, "num_selected_experts": 3, "normalize_gates": "before",
    "affinity": routers.SinkhornAffinity(iterations=3), "priority": "sum_gates",
}  # fmt: skip
MLP = {
    "mlp_dim": 16, "activation": "relu", "dropout": 0.1, "seed": 2, "gated": True,
    "use_bias": False,
}  # fmt: skip
ATTENTION = {
    "num_heads": 2, "key_dim": D // 2, "query_key_norm": "layer", "seed": 4,
    "query_key_norm_bias": True, "layer_norm_epsilon": 1e-5, "dropout": 0.2,
}  # fmt: skip
BLOCK = {
    "dropout": 0.1, "layer_norm_epsilon": 1e-5, "seed": 5, "stochastic_depth": 0.3,
    "layer_scale_initial_value": 0.7,
}  # fmt: skip
# Classes, and arguments that all differ from the defaults.
ARGUMENTS = {
    "MLP": (layers.MLP, MLP),
    "AttentionPooling": (layers.AttentionPooling, {
        "num_heads": 2, "mlp_dim": 16, "activation": "relu", "layer_norm_epsilon": 1e-5,
        "query_key_norm": True, "query_key_norm_bias": True,
    }),
    "ClassToken": (layers.ClassToken, {}),
    "ExpertCoefficients": (layers.ExpertCoefficients, {
        "num_experts": (4, 2), "activation": "softmax", "normalization": None,
    }),
    "Experts": (layers.Experts, {
        "num_experts": E, "mlp_dim": 16, "activation": "relu", "dropout": 0.1,
        "shared_initialization": False, "gated": True, "seed": 3,
    }),
    "LayerNorm": (layers.LayerNorm, {"epsilon": 1e-3, "center": False}),
    "LayerScale": (layers.LayerScale, {"initial_value": 0.7}),
    "MuMoE": (layers.MuMoE, {
        "units": 5, "num_experts": (4, 2), "factorization": "tr", "rank": (2, 3, 2, 3),
        "activation": "softmax", "normalization": "layer", "use_bias": False,
        "expert_noise": 0.5, "input_norm": True, "edited_outputs": (3, 0),
    }),
    "MuMoEBlock": (layers.MuMoEBlock, {
        "mlp_dim": 16, "units": 5, "num_experts": 4, "factorization": "tucker",
        "rank": (2, 3, 4), "hidden_activation": "relu", "input_norm": True,
    }),
    "PatchEmbedding": (layers.PatchEmbedding, {
        "hidden_dim": D, "patch_size": (2, 4),
    }),
    "PositionEmbedding": (layers.PositionEmbedding, {
        "grid": (2, 3), "kind": "learned", "interpolation": "bicubic",
    }),
    "RMSNorm": (layers.RMSNorm, {"epsilon": 1e-3}),
    "RegisterTokens": (layers.RegisterTokens, {"count": 2, "index": 0}),
    "ReversibleTokenEmbedding": (layers.ReversibleTokenEmbedding, {
        "vocabulary_size": 5, "hidden_dim": D, "tied": False,
    }),
    "Attention": (layers.Attention, ATTENTION),
    "MaskedPooling": (layers.MaskedPooling, {"pooling": "last"}),
    "TextPositions": (layers.TextPositions, {"max_length": 7}),
    "TokenEmbedding": (layers.TokenEmbedding, {
        "vocabulary_size": 5, "hidden_dim": D,
    }),
    "TokenMLP": (layers.TokenMLP, {
        "mlp_dim": 5, "activation": "relu", "dropout": 0.1, "seed": 2,
    }),
    "TokenPooling": (layers.TokenPooling, {"pooling": "average", "register_tokens": 2}),
    "Attention with sinks": (layers.Attention, {
        "num_heads": 2, "key_dim": D, "num_key_value_heads": 1, "key_bias": False,
        "sinks": True, "query_key_norm": "plain_rms",
    }),
    "TokenChoiceRouter": (routers.TokenChoiceRouter, {
        "num_experts": E, **TOKENS_CHOOSE,
    }),
    "ExpertChoiceRouter": (routers.ExpertChoiceRouter, {
        "num_experts": E, "normalize_gates": "after", **ROUTING,
        "affinity": routers.SparsityConstrainedAffinity(
            sparse=False, solver="adam", iterations=3, learning_rate=0.1
        ),
    }),
    "SoftRouter": (routers.SoftRouter, {
        "num_experts": E, "capacity_factor": 1.5, "capacity_rounding": "ceil",
        "noise_std": 0.5, "seed": 7,
    }),
    "PathwayAwareRouter": (routers.PathwayAwareRouter, {
        "num_experts": E + 4, "tau": 0.5, "gate_hidden_dim": 7, "logits_norm_std": 1.5,
        "zero_gates": "remove", **EXPERT_TYPES,
        **TOKENS_CHOOSE, "capacity_factor": 3.0, "eval_capacity_factor": 4.0,
    }),
}  # fmt: skip


def maker(name):
    cls, arguments = ARGUMENTS[name]
    return lambda **kw: cls(**arguments, **kw)


def moe(dtype=None, **kwargs):
    # Whole-image groups and room for all: the checks split the batch as they like.
    return layers.MoE(
        routers.TokenChoiceRouter(E, 2, capacity_factor=4.0, noise_std=0.1, seed=1),
        layers.Experts(E, mlp_dim=16, dtype=dtype),
        N,
        {"importance": 0.1, "load": 0.2, "router_z": 0.3},
        dispatcher="einsum",
        input_scale=2.0,
        shared_experts=layers.MLP(5, dtype=dtype, name="shared_experts"),
        dtype=dtype,
        **kwargs,
    )


def moe_plus_plus(dtype=None, **kwargs):
    router = routers.PathwayAwareRouter(E + 4, 4, **EXPERT_TYPES, capacity_factor=9.0)
    swiglu = {"activation": "silu", "gated": True, "use_bias": False, "dtype": dtype}
    experts, losses = layers.Experts(E, 16, **swiglu), {"heterogeneous_balance": 0.1}
    return layers.MoE(router, experts, N, losses, dtype=dtype, **kwargs)


def block(dtype=None, **kwargs):
    mixer = layers.Attention(**ATTENTION, dtype=dtype)
    options = {**BLOCK, "use_bias": False, "feed_forward_norm": False, "dtype": dtype}
    return layers.Block(mixer, layers.MLP(**MLP, dtype=dtype), **options, **kwargs)


def moe_block(dtype=None, **kwargs):
    mixer, options = layers.TokenMLP(5, dtype=dtype), {**BLOCK, "dtype": dtype}
    return layers.MoEBlock(mixer, moe(dtype), norm="rms", **options, **kwargs)


# LayerNorm keeps its weights as its policy says; routing is always float32.
MAKERS = {
    **{name: maker(name) for name in ARGUMENTS},
    "Block": block,
    "MoE": moe,
    "MoE of several expert types": moe_plus_plus,
    "MoEBlock": moe_block,
    "TokenMuMoE": lambda **kw: layers.TokenMuMoE(
        layers.MuMoEBlock(5, num_experts=4, rank=3, dtype=kw.get("dtype")), **kw
    ),
}


SHAPES = {"Experts": (B, E, 5, D), "PatchEmbedding": (B, 8, 8, 3)}
# Those with a kernel, a gradient or random numbers of the backend's own.
OF_EACH_BACKEND = ("Experts", "LayerNorm", "MoE", "MuMoE", "RMSNorm", "Attention")


@pytest.mark.parametrize(
    "name", every_backend_for(MAKERS, *OF_EACH_BACKEND, "PositionEmbedding")
)
def test_layer(name, tmp_path):
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=SHAPES.get(name, (B, N, D))).astype("float32")
    no_gradient = {
        # A query's bias shifts all of a head's scores alike, and one probe has one
        # query; a key's bias shifts all keys of a query alike: softmax sees neither.
        "AttentionPooling": ("bias",),
        "ReversibleTokenEmbedding": ("reverse_embeddings",),
    }
    if name.endswith("TokenEmbedding"):
        inputs = generator.integers(0, 5, size=(B, N)).astype("float32")
    check_layer(MAKERS[name], inputs, tmp_path, no_gradient=no_gradient.get(name, ()))


@pytest.mark.parametrize("shape", [(B, 5, D), (B, 5, E, D)])
def test_experts_name_the_shape_that_they_expect(shape):
    message = rf"\(groups, 4, capacity, dim\).*received: inputs.shape=\({shape[0]}, 5"
    for inputs in (np.ones(shape, "float32"), keras.KerasTensor(shape)):
        refuses(message, layers.Experts(E, 16), inputs)


def test_a_subclass_names_its_attributes_and_adds_weights_as_it_likes():
    class Scaled(layers.MLP):
        def __init__(self, factor=2.0, **kwargs):
            super().__init__(8, **kwargs)
            self.scale = factor

        def build(self, input_shape):
            super().build(input_shape)
            self.ones = self.add_weight(input_shape[-1:], "ones", name="ones")
            self.shift = self.add_weight(shape=(2, 3), name="shift")

        def get_config(self):
            return {**super().get_config(), "factor": self.scale}

    layer = Scaled(3.0)
    config = layer.get_config()
    assert (config["factor"], config["mlp_dim"]) == (3.0, 8)
    layer(np.ones((1, 2, 4), "float32"))
    assert keras.ops.convert_to_numpy(layer.ones).tolist() == [1.0] * 4
    # Keras's default is drawn.
    assert np.ptp(keras.ops.convert_to_numpy(layer.shift)) > 0


def test_a_block_takes_any_layer_that_returns_a_record():
    class Recorded(layers.MLP):
        def call(self, inputs, training=None):
            return super().call(inputs, training=training), inputs

    block = layers.MoEBlock(layers.Attention(2, 2), Recorded(8))
    tokens, record = block(np.ones((1, 2, 4), "float32"))
    assert tuple(tokens.shape) == tuple(record.shape) == (1, 2, 4)


def pathway_aware(**options):
    return routers.PathwayAwareRouter(E + 3, 2, 1, 1, 1, **options)


def moe_of(router, **options):
    experts = layers.Experts(E, 16, name="experts")
    return layers.MoE(router, experts, name="moe", **options)


def mumoe_of(*arguments, **options):
    return lambda: layers.MuMoE(10, *arguments, **options)


HEADS = {"num_heads": 2, "key_dim": 4}
# Layers whose costs are counted, besides those above.
COUNTED = {
    "plain MLP": lambda: layers.MLP(16),
    "plain TokenMLP": lambda: layers.TokenMLP(16),
    "plain Experts": lambda: layers.Experts(E, 16),
    "Experts without biases": lambda: layers.Experts(E, 16, gated=True, use_bias=False),
    "ZeroComputationExperts": lambda: layers.ZeroComputationExperts(1, 1, 3),
    "zero and copy experts": lambda: layers.ZeroComputationExperts(1, 1),
    "two modalities": lambda: routers.TokenChoiceRouter(E, num_modalities=2),
    "three modalities": lambda: routers.ExpertChoiceRouter(E, num_modalities=3),
    "SoftRouter of slots": lambda: routers.SoftRouter(E, num_slots=2),
    "gating residual": lambda: pathway_aware(gating_residual=True),
    "MoE of token choice": lambda: moe_of(routers.TokenChoiceRouter(E)),
    "MoE of a selection bias": lambda: moe_of(
        routers.TokenChoiceRouter(E, gates="sigmoid", selection_bias_rate=0.1),
        shared_experts=layers.MLP(16, name="shared_experts"),
    ),
    "MoE of expert choice": lambda: moe_of(routers.ExpertChoiceRouter(E)),
    "MoE of soft routing": lambda: moe_of(routers.SoftRouter(E, capacity_factor=2.0)),
    "MoE of residuals": lambda: moe_of(pathway_aware(gating_residual=True)),
    "MuMoE of rank 3": mumoe_of(4, rank=3, input_norm=True, edited_outputs=(2,)),
    "MuMoE of the whole tensor": mumoe_of((4, 2), None, None),
    "plain MuMoEBlock": lambda: layers.MuMoEBlock(16, num_experts=4, input_norm=True),
    "MultilinearExperts": lambda: layers.MultilinearExperts(10, 4, rank=3),
    "plain Attention": lambda: layers.Attention(**HEADS),
    "no biases": lambda: layers.Attention(**HEADS, use_bias=False),
    "grouped Attention": lambda: layers.Attention(
        **HEADS, num_key_value_heads=1, use_bias=False, query_key_norm="rms"
    ),
    "plain block": lambda: layers.Block(layers.Attention(**HEADS), layers.MLP(16)),
    "block of muMoE": lambda: layers.MoEBlock(
        layers.TokenMuMoE(layers.MuMoEBlock(16, num_experts=4, rank=3)),
        layers.MuMoEBlock(16, num_experts=4, rank=3),
    ),
    "fixed PositionEmbedding": lambda: layers.PositionEmbedding((2, 3), kind="sincos"),
    "plain LayerNorm": layers.LayerNorm,
    "RMSNorm without a scale": lambda: layers.RMSNorm(has_scale=False),
    "vocabulary of 20": lambda: layers.TokenEmbedding(20, D),
    "LogitScale": lambda: layers.LogitScale(bias=-1.0),
}
COUNTED_SHAPES = {
    layers.PatchEmbedding: (8, 12, 3), layers.TokenEmbedding: (N,),
    layers.LogitScale: (D,), layers.Experts: (E, N, D),
}  # fmt: skip


def built(name):
    """The layer of a name, and the shape of an example of its inputs."""
    layer = {**MAKERS, **COUNTED}[name]()
    shape = COUNTED_SHAPES.get(type(layer), (N, D))
    layer.build((None, *shape))
    return layer, shape[-2:] if isinstance(layer, layers.Experts) else shape


@pytest.mark.parametrize("name", [*MAKERS, *COUNTED])
def test_weight_shapes_and_parameters_are_those_of_the_built_layer(name):
    (layer, shape), unbuilt = built(name), {**MAKERS, **COUNTED}[name]()
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


@pytest.mark.parametrize(("name", "expected"), [
    # 2 x (8 x 16) multiply-adds for each of 6 tokens.
    ("plain MLP", (280, 280, 2 * 6 * 2 * 8 * 16)),
    # The same across 6 tokens for each of 8 channels.
    ("plain TokenMLP", (214, 214, 2 * 8 * 2 * 6 * 16)),
    # A row meets one expert of four.
    ("plain Experts", (4 * 280, 280, 2 * 6 * 2 * 8 * 16)),
    # Kernel (8, 4), and two of four experts for each token.
    ("MoE of token choice", (1152, 32 + 2 * 280, 12 * (32 + 2 * 2 * 8 * 16))),
    # And an MLP of the same size for every token.
    ("MoE of a selection bias", (1432, 32 + 3 * 280, 12 * (32 + 3 * 2 * 8 * 16))),
    # Four projections, and queries by keys and weights by values.
    ("plain Attention", (288, 288, 2 * 6 * 4 * 64 + 2 * 2 * 6 * 6 * 8)),
    # A row for each of 20 ids, of which a lookup multiplies none.
    ("vocabulary of 20", (160, 160, 0)),
    # 4 x 3 patches of 2 x 4 x 3 numbers.
    ("PatchEmbedding", (200, 200, 2 * 12 * 24 * 8)),
])  # fmt: skip
def test_costs_by_hand(name, expected):
    layer, shape = built(name)
    assert layer.cost(shape)[:3] == expected


def test_every_public_layer_is_checked():
    public = {
        cls
        for module in (layers, routers)
        for cls in (getattr(module, name) for name in module.__all__)
        if isinstance(cls, type) and issubclass(cls, keras.layers.Layer)
    }
    # Base classes, one without weights that returns a mask, and one that takes heads.
    public -= {routers.Router, routers.SparseRouter, layers.CausalMask}
    public -= {layers.RotaryEmbedding2D}
    assert public == {type(make()) for make in (*MAKERS.values(), *COUNTED.values())}
    # These take weights beside their input: an MoE layer and MuMoE have them.
    public -= {layers.ZeroComputationExperts, layers.MultilinearExperts}
    # Its weights have no part in its output: see test_logit_scale.py.
    public -= {layers.LogitScale}
    assert public == {type(make()) for make in MAKERS.values()}
