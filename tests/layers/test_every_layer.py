"""Every public layer of `layers` and `routers`, by one check."""

import keras
import numpy as np
import pytest

from keras_moe import layers, routers
from tests.backends import every_backend_for
from tests.layer_check import check_layer

B, N, D, E = 3, 6, 8, 4
EXPERT_TYPES = {"zero_experts": 1, "copy_experts": 1, "constant_experts": 2}
ROUTING = {
    "combine": "affinity",
    "capacity_factor": 1.5,
    "eval_capacity_factor": 2.0,
    "evaluation": "official",
    "capacity_rounding": "round",
    "capacity_multiple_of": 2,
    "noise_std": 0.5,
    "kernel_initializer": "glorot_normal",
    "seed": 7,
}
TOKENS_CHOOSE = {
    **ROUTING,
    "num_selected_experts": 3,
    "affinity": routers.SinkhornAffinity(iterations=3),
    "normalize_gates": "before",
    "priority": "sum_gates",
}


def router(**kwargs):
    return routers.TokenChoiceRouter(E, **TOKENS_CHOOSE, **kwargs)


def expert_choice_router(**kwargs):
    return routers.ExpertChoiceRouter(
        E,
        affinity=routers.SparsityConstrainedAffinity(
            sparse=False, solver="adam", iterations=3, learning_rate=0.1
        ),
        normalize_gates="after",
        **ROUTING,
        **kwargs,
    )


def soft_router(**kwargs):
    return routers.SoftRouter(
        E,
        capacity_factor=1.5,
        capacity_rounding="ceil",
        noise_std=0.5,
        seed=7,
        **kwargs,
    )


def experts(**kwargs):
    return layers.Experts(
        E,
        mlp_dim=16,
        activation="relu",
        dropout=0.1,
        shared_initialization=False,
        gated=True,
        seed=3,
        **kwargs,
    )


def moe(**kwargs):
    # Whole-image groups and room for all: the checks split the batch as they like.
    return layers.MoE(
        routers.TokenChoiceRouter(E, 2, capacity_factor=4.0, noise_std=0.1, seed=1),
        layers.Experts(E, mlp_dim=16, dtype=kwargs.get("dtype")),
        group_size=N,
        auxiliary_losses={"importance": 0.1, "load": 0.2, "router_z": 0.3},
        dispatcher="einsum",
        input_scale=2.0,
        **kwargs,
    )


def pathway_aware_router(**kwargs):
    return routers.PathwayAwareRouter(
        E + 4,
        tau=0.5,
        gate_hidden_dim=7,
        logits_norm_std=1.5,
        zero_gates="remove",
        **EXPERT_TYPES,
        **{**TOKENS_CHOOSE, "capacity_factor": 3.0, "eval_capacity_factor": 4.0},
        **kwargs,
    )


def moe_plus_plus(**kwargs):
    router = routers.PathwayAwareRouter(E + 4, 4, **EXPERT_TYPES, capacity_factor=9.0)
    return layers.MoE(
        router,
        layers.Experts(
            E,
            mlp_dim=16,
            activation="silu",
            gated=True,
            use_bias=False,
            dtype=kwargs.get("dtype"),
        ),
        group_size=N,
        auxiliary_losses={"heterogeneous_balance": 0.1},
        **kwargs,
    )


def mumoe(**kwargs):
    return layers.MuMoE(
        5,
        num_experts=(4, 2),
        factorization="tr",
        rank=(2, 3, 2, 3),
        activation="softmax",
        normalization="layer",
        use_bias=False,
        expert_noise=0.5,
        input_norm=True,
        edited_outputs=(3, 0),
        **kwargs,
    )


def mumoe_block(**kwargs):
    return layers.MuMoEBlock(
        16,
        5,
        num_experts=4,
        factorization="tucker",
        rank=(2, 3, 4),
        hidden_activation="relu",
        input_norm=True,
        **kwargs,
    )


def mlp(**kwargs):
    return layers.MLP(
        mlp_dim=16,
        activation="relu",
        dropout=0.1,
        seed=2,
        gated=True,
        use_bias=False,
        **kwargs,
    )


def attention(**kwargs):
    return layers.Attention(
        num_heads=2,
        key_dim=D // 2,
        query_key_norm="layer",
        query_key_norm_bias=True,
        layer_norm_epsilon=1e-5,
        dropout=0.2,
        seed=4,
        **kwargs,
    )


BLOCK = {
    "dropout": 0.1,
    "layer_norm_epsilon": 1e-5,
    "seed": 5,
    "stochastic_depth": 0.3,
    "layer_scale_initial_value": 0.7,
}
# LayerNorm keeps its weights as its policy says; routing is always float32.
MAKERS = {
    "MLP": mlp,
    "AttentionPooling": lambda **kw: layers.AttentionPooling(
        2,
        16,
        activation="relu",
        layer_norm_epsilon=1e-5,
        query_key_norm=True,
        query_key_norm_bias=True,
        **kw,
    ),
    "ClassToken": layers.ClassToken,
    "Block": lambda **kw: layers.Block(
        attention(dtype=kw.get("dtype")),
        mlp(dtype=kw.get("dtype")),
        use_bias=False,
        feed_forward_norm=False,
        **BLOCK,
        **kw,
    ),
    "ExpertCoefficients": lambda **kw: layers.ExpertCoefficients(
        (4, 2), activation="softmax", normalization=None, **kw
    ),
    "Experts": experts,
    "LayerNorm": lambda **kw: layers.LayerNorm(epsilon=1e-3, center=False, **kw),
    "LayerScale": lambda **kw: layers.LayerScale(0.7, **kw),
    "MoE": moe,
    "MoE of several expert types": moe_plus_plus,
    "MuMoE": mumoe,
    "MuMoEBlock": mumoe_block,
    "MoEBlock": lambda **kw: layers.MoEBlock(
        layers.TokenMLP(mlp_dim=5, dtype=kw.get("dtype")),
        moe(dtype=kw.get("dtype")),
        norm="rms",
        **BLOCK,
        **kw,
    ),
    "PatchEmbedding": lambda **kw: layers.PatchEmbedding(
        D, (2, 4), kernel_initializer="glorot_normal", **kw
    ),
    "PositionEmbedding": lambda **kw: layers.PositionEmbedding(
        (2, 3), kind="learned", interpolation="bicubic", **kw
    ),
    "RMSNorm": lambda **kw: layers.RMSNorm(epsilon=1e-3, **kw),
    "ReversibleTokenEmbedding": lambda **kw: layers.ReversibleTokenEmbedding(
        5, D, tied=False, **kw
    ),
    "Attention": attention,
    "MaskedPooling": lambda **kw: layers.MaskedPooling("last", **kw),
    "TextPositions": lambda **kw: layers.TextPositions(7, **kw),
    "TokenEmbedding": lambda **kw: layers.TokenEmbedding(5, D, **kw),
    "TokenMLP": lambda **kw: layers.TokenMLP(
        mlp_dim=5, activation="relu", dropout=0.1, seed=2, **kw
    ),
    "TokenPooling": lambda **kw: layers.TokenPooling("average", **kw),
    "ExpertChoiceRouter": expert_choice_router,
    "SoftRouter": soft_router,
    "TokenMuMoE": lambda **kw: layers.TokenMuMoE(
        layers.MuMoEBlock(5, num_experts=4, rank=3, dtype=kw.get("dtype")), **kw
    ),
    "PathwayAwareRouter": pathway_aware_router,
    "TokenChoiceRouter": router,
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


# Those made of layers whose policies may differ from their own. On JAX each of the
# others would take seconds.
OF_LAYERS = ("Block", "LayerScale", "MoE", "MoE of several expert types")


@pytest.mark.parametrize(
    "name", every_backend_for(MAKERS, *OF_LAYERS, "MoEBlock", "TokenMuMoE")
)
# What Keras says of layers without weights, and of weights that their call ignores.
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_by_keras(name):
    """Keras's own test: config, shapes, dtypes, a step of training, mixed precision."""
    from keras.src.testing import TestCase

    layer, reads_ids = MAKERS[name](), name.endswith("TokenEmbedding")
    TestCase().run_layer_test(
        type(layer),
        layer.get_config(),
        (B, N) if reads_ids else SHAPES.get(name, (B, N, D)),
        "int32" if reads_ids else "float32",
    )


@pytest.mark.parametrize("shape", [(B, 5, D), (B, 5, E, D)])
def test_experts_name_the_shape_that_they_expect(shape):
    message = rf"\(groups, 4, capacity, dim\).*received: inputs.shape=\({shape[0]}, 5"
    for inputs in (np.ones(shape, "float32"), keras.KerasTensor(shape)):
        with pytest.raises(ValueError, match=message):
            layers.Experts(E, 16)(inputs)


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


def test_every_public_layer_is_checked():
    public = {
        name
        for module in (layers, routers)
        for name in module.__all__
        if isinstance(getattr(module, name), type)
        and issubclass(getattr(module, name), keras.layers.Layer)
    }
    # These take weights beside their input: an MoE layer and MuMoE have them.
    public -= {"Router", "SparseRouter", "ZeroComputationExperts", "MultilinearExperts"}
    # Its output is a mask; see test_attention.py.
    public -= {"CausalMask"}
    # Its weights have no part in its output; see test_logit_scale.py.
    public -= {"LogitScale"}
    assert public == {name for name in MAKERS if " " not in name}
