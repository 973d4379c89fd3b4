"""Every public layer of `layers` and `routers`, by our check and by Keras's own."""

import keras
import numpy as np
import pytest
from keras import tree
from keras.src import testing

from keras_moe import layers, losses, routers
from keras_moe.layers import (
    MLP,
    AttentionPooling,
    ClassToken,
    EncoderBlock,
    ExpertCoefficients,
    Experts,
    LayerNorm,
    LayerScale,
    MaskedPooling,
    MoE,
    MoEEncoderBlock,
    MuMoE,
    MuMoEBlock,
    PatchEmbedding,
    PositionEmbedding,
    SelfAttention,
    TextPositions,
    TokenEmbedding,
    TokenMLP,
    TokenMuMoE,
    TokenPooling,
    ZeroComputationExperts,
)
from keras_moe.ops import ExpertTypes
from keras_moe.routers import (
    ExpertChoiceRouter,
    PathwayAwareRouter,
    SinkhornAffinity,
    SoftRouter,
    SparsityConstrainedAffinity,
    TokenChoiceRouter,
)
from tests.layer_check import check_layer

B, N, D, E = 3, 6, 8, 4


def router(**kwargs):
    return TokenChoiceRouter(
        E,
        num_selected_experts=3,
        affinity=SinkhornAffinity(iterations=3),
        combine="affinity",
        normalize_gates="before",
        capacity_factor=1.5,
        eval_capacity_factor=2.0,
        capacity_rounding="round",
        capacity_multiple_of=2,
        priority="sum_gates",
        noise_std=0.5,
        kernel_initializer="glorot_normal",
        seed=7,
        **kwargs,
    )


def expert_choice_router(**kwargs):
    return ExpertChoiceRouter(
        E,
        affinity=SparsityConstrainedAffinity(
            sparse=False, solver="adam", iterations=3, learning_rate=0.1
        ),
        combine="affinity",
        normalize_gates="after",
        capacity_factor=1.5,
        eval_capacity_factor=2.0,
        evaluation="official",
        capacity_rounding="round",
        capacity_multiple_of=2,
        noise_std=0.5,
        kernel_initializer="glorot_normal",
        seed=7,
        **kwargs,
    )


def soft_router(**kwargs):
    return SoftRouter(
        E,
        capacity_factor=1.5,
        capacity_rounding="ceil",
        noise_std=0.5,
        slot_initializer="glorot_normal",
        scale_initializer=keras.initializers.Constant(2.0),
        seed=7,
        **kwargs,
    )


def experts(**kwargs):
    return Experts(
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
    return MoE(
        TokenChoiceRouter(E, 2, capacity_factor=4.0, noise_std=0.1, seed=1),
        Experts(E, mlp_dim=16, dtype=kwargs.get("dtype")),
        group_size=N,
        auxiliary_losses={"importance": 0.1, "load": 0.2, "router_z": 0.3},
        dispatcher="einsum",
        input_scale=2.0,
        **kwargs,
    )


def pathway_aware_router(**kwargs):
    return PathwayAwareRouter(
        E + 4,
        num_selected_experts=3,
        zero_experts=1,
        copy_experts=1,
        constant_experts=2,
        tau=0.5,
        gate_hidden_dim=7,
        logits_norm_std=1.5,
        zero_gates="remove",
        affinity=SinkhornAffinity(iterations=3),
        combine="affinity",
        normalize_gates="before",
        capacity_factor=3.0,
        eval_capacity_factor=4.0,
        capacity_rounding="round",
        capacity_multiple_of=2,
        priority="sum_gates",
        noise_std=0.5,
        kernel_initializer="glorot_normal",
        residual_initializer="identity",
        seed=7,
        **kwargs,
    )


def moe_plus_plus(**kwargs):
    router = PathwayAwareRouter(
        E + 4,
        4,
        zero_experts=1,
        copy_experts=1,
        constant_experts=2,
        capacity_factor=9.0,
    )
    return MoE(
        router,
        Experts(
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
    return MuMoE(
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
    return MuMoEBlock(
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
    return MLP(mlp_dim=16, activation="relu", dropout=0.1, seed=2, **kwargs)


def attention(**kwargs):
    return SelfAttention(
        num_heads=2,
        key_dim=D // 2,
        query_key_norm=True,
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
    "AttentionPooling": lambda **kw: AttentionPooling(
        2,
        16,
        activation="relu",
        layer_norm_epsilon=1e-5,
        query_key_norm=True,
        query_key_norm_bias=True,
        **kw,
    ),
    "ClassToken": ClassToken,
    "EncoderBlock": lambda **kw: EncoderBlock(
        attention(dtype=kw.get("dtype")), mlp(dtype=kw.get("dtype")), **BLOCK, **kw
    ),
    "ExpertCoefficients": lambda **kw: ExpertCoefficients(
        (4, 2), activation="softmax", normalization=None, **kw
    ),
    "Experts": experts,
    "LayerNorm": lambda **kw: LayerNorm(epsilon=1e-3, center=False, **kw),
    "LayerScale": lambda **kw: LayerScale(0.7, **kw),
    "MoE": moe,
    "MoE of several kinds": moe_plus_plus,
    "MuMoE": mumoe,
    "MuMoEBlock": mumoe_block,
    "MoEEncoderBlock": lambda **kw: MoEEncoderBlock(
        TokenMLP(mlp_dim=5, dtype=kw.get("dtype")),
        moe(dtype=kw.get("dtype")),
        **BLOCK,
        **kw,
    ),
    "PatchEmbedding": lambda **kw: PatchEmbedding(
        D, (2, 4), kernel_initializer="glorot_normal", **kw
    ),
    "PositionEmbedding": lambda **kw: PositionEmbedding(
        (2, 3), kind="learned", interpolation="bicubic", **kw
    ),
    "SelfAttention": attention,
    "MaskedPooling": lambda **kw: MaskedPooling("last", **kw),
    "TextPositions": lambda **kw: TextPositions(7, **kw),
    "TokenEmbedding": lambda **kw: TokenEmbedding(
        5, D, embeddings_initializer="glorot_normal", **kw
    ),
    "TokenMLP": lambda **kw: TokenMLP(
        mlp_dim=5, activation="relu", dropout=0.1, seed=2, **kw
    ),
    "TokenPooling": lambda **kw: TokenPooling("average", **kw),
    "ExpertChoiceRouter": expert_choice_router,
    "SoftRouter": soft_router,
    "TokenMuMoE": lambda **kw: TokenMuMoE(
        MuMoEBlock(5, num_experts=4, rank=3, dtype=kw.get("dtype")), **kw
    ),
    "PathwayAwareRouter": pathway_aware_router,
    "TokenChoiceRouter": router,
}


@pytest.mark.every_backend
@pytest.mark.parametrize("name", MAKERS)
def test_layer(name, tmp_path):
    generator = np.random.default_rng(0)
    shape = {"Experts": (B, E, 5, D), "PatchEmbedding": (B, 8, 8, 3)}.get(
        name, (B, N, D)
    )
    inputs = generator.normal(size=shape).astype("float32")
    if name == "TokenEmbedding":
        inputs = generator.integers(0, 5, size=(B, N)).astype("float32")
    # A query's bias shifts all of a head's scores alike, and one probe has one query;
    # a key's bias shifts all keys of a query alike: softmax sees neither.
    check_layer(
        MAKERS[name],
        inputs,
        tmp_path,
        no_gradient=("bias",) if name == "AttentionPooling" else (),
    )


def test_every_public_layer_is_checked():
    public = {
        name
        for module in (layers, routers)
        for name in module.__all__
        if isinstance(getattr(module, name), type)
        and issubclass(getattr(module, name), keras.layers.Layer)
    }
    # These take weights beside their input: MoE "of several kinds" and MuMoE have them.
    public -= {"Router", "SparseRouter", "ZeroComputationExperts", "MultilinearExperts"}
    # Its weights have no part in its output; see test_logit_scale.py.
    public -= {"LogitScale"}
    assert public == {name for name in MAKERS if " " not in name}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Experts(0, 16), "num_experts=0"),
        (lambda: Experts(4, 0), "mlp_dim=0"),
        (lambda: Experts(4, 16, dropout=1.0), "dropout=1.0"),
        (lambda: TokenChoiceRouter(0), "num_experts=0"),
        (lambda: TokenChoiceRouter(4, 5), "num_selected_experts=5"),
        (lambda: TokenChoiceRouter(4, 0), "num_selected_experts=0"),
        (lambda: TokenChoiceRouter(4, capacity_factor=0.0), "capacity_factor=0.0"),
        (lambda: TokenChoiceRouter(4, capacity_factor=-1), "capacity_factor=-1"),
        (lambda: TokenChoiceRouter(4, capacity=2, capacity_factor=1.0), "not both"),
        (lambda: TokenChoiceRouter(4, capacity=0), "capacity=0"),
        (lambda: TokenChoiceRouter(4, eval_capacity_factor=0), "eval_capacity_factor"),
        (lambda: TokenChoiceRouter(4, priority="best"), "priority='best'"),
        (lambda: TokenChoiceRouter(4, noise_std=-1.0), "noise_std=-1.0"),
        (lambda: TokenChoiceRouter(4, noise_std="1"), "noise_std='1'"),
        (lambda: TokenChoiceRouter(4, dropless="yes"), "dropless='yes'"),
        (lambda: ExpertChoiceRouter(4, evaluation="no"), "evaluation='no'"),
        (lambda: TokenChoiceRouter(4, capacity_rounding="up"), "capacity_rounding"),
        (lambda: TokenChoiceRouter(4, capacity_multiple_of=0), "capacity_multiple_of"),
        (lambda: MoE(TokenChoiceRouter(4), Experts(2, 8)), "experts.num_experts=2"),
        (lambda: MoE(TokenChoiceRouter(2), Experts(2, 8), group_size=0), "group_size"),
        (lambda: MoE(TokenChoiceRouter(2), Experts(2, 8), dispatcher="x"), "'x'"),
        (lambda: MoE("softmax", Experts(2, 8)), "router='softmax'"),
        (lambda: routers.get("soft", ExpertTypes(2, zero=1)), "router='soft'"),
        (lambda: PathwayAwareRouter(3, copy_experts=-1), "copy_experts=-1"),
        (lambda: MoE({"name": "soft", "slots": 1}, Experts(2, 8)), "slots=1"),
        (
            lambda: MoE(PathwayAwareRouter(3, zero_experts=1), Experts(3, 8)),
            "2 FFN experts",
        ),
        (
            lambda: MoE(TokenChoiceRouter(2), Experts(2, 8), input_scale=0),
            "input_scale=0",
        ),
        (lambda: Experts(2, 8, gated="yes"), "gated='yes'"),
        (lambda: ZeroComputationExperts(), "zero_experts=0"),
        (
            lambda: MoE(TokenChoiceRouter(2), Experts(2, 8))(
                np.zeros((1, 3, 8), "float32"),
                previous_logits=np.zeros((1, 3, 2), "float32"),
            ),
            "without gating_residual",
        ),
        (lambda: TokenChoiceRouter(4, affinity="soft"), "affinity='soft'"),
        (lambda: TokenChoiceRouter(4, combine="hard"), "combine='hard'"),
        (lambda: TokenChoiceRouter(4, normalize_gates="x"), "normalize_gates='x'"),
        (lambda: TokenChoiceRouter(4, dropless=True, capacity=2), "capacity=2"),
        (lambda: TokenChoiceRouter(4, num_modalities=0), "num_modalities=0"),
        (lambda: TokenChoiceRouter(4, expert_pools=[[0], [4]]), "\\[4\\]"),
        (lambda: TokenChoiceRouter(4, expert_pools=[[0.5]]), "expert_pools=0.5"),
        (
            lambda: TokenChoiceRouter(4, expert_pools=[[0, 1], [1, 2, 3]]),
            r"nothing in common; received: expert_pools=\[\[0, 1\], \[1, 2, 3\]\]",
        ),
        (
            lambda: ExpertChoiceRouter(4, expert_pools=[[0, 1], []]),
            r"at least one expert.*received: expert_pools=\[\[0, 1\], \[\]\]",
        ),
        (
            lambda: TokenChoiceRouter(4, expert_pools=[0, 1]),
            r"a sequence of experts for each modality; received: expert_pools=\[0, 1\]",
        ),
        (lambda: TokenChoiceRouter(4, expert_pools=2), "expert_pools=2"),
        (
            lambda: MoE(
                TokenChoiceRouter(4, num_modalities=2, capacity_factor=1.0),
                Experts(4, 8),
                auxiliary_losses=[losses.AuxiliaryLoss("local_entropy", modality=2)],
            ),
            "modality=2",
        ),
        (lambda: TokenChoiceRouter(4, 2, expert_pools=[[0], [1, 2]]), "\\[0\\]"),
        (
            lambda: TokenChoiceRouter(4, 1, num_modalities=3, expert_pools=[[0], [1]]),
            "num_modalities=3",
        ),
        (
            lambda: TokenChoiceRouter(
                4, combine="affinity", affinity=SinkhornAffinity(tolerance=0.1)
            ),
            "tolerance=0.1",
        ),
        (lambda: SinkhornAffinity(iterations=0), "iterations=0"),
        (lambda: SparsityConstrainedAffinity(solver="sgd"), "solver='sgd'"),
        (lambda: SparsityConstrainedAffinity(iterations=0), "iterations=0"),
        (lambda: SparsityConstrainedAffinity(learning_rate=0), "learning_rate=0"),
        (lambda: ExpertChoiceRouter(4, capacity_factor=0.0), "capacity_factor=0.0"),
        (lambda: ExpertChoiceRouter(4, normalize_gates="before"), "'before'"),
        (lambda: ExpertChoiceRouter(4, capacity=2), "capacity=2"),
        (lambda: ExpertChoiceRouter(4, eval_capacity_factor=0), "eval_capacity"),
        (lambda: SoftRouter(4, num_slots=0), "num_slots=0"),
        (lambda: SoftRouter(4, num_slots=1, capacity_factor=1.0), "not both"),
        (lambda: SoftRouter(4, noise_std=float("nan")), "noise_std=nan"),
        (lambda: SoftRouter(4).build((None, None, 8)), "num_tokens=None"),
        (
            lambda: MoE("soft", Experts(2, 8), auxiliary_losses={"router_z": 0.1}),
            "SoftRouter",
        ),
        (
            lambda: MoE(
                TokenChoiceRouter(2, noise_std=0.0),
                Experts(2, 8),
                auxiliary_losses={"load": 1.0},
            ),
            "noise_std=0.0",
        ),
        (
            lambda: MoE(
                TokenChoiceRouter(2), Experts(2, 8), auxiliary_losses={"loda": 1.0}
            ),
            "'loda'",
        ),
        (
            lambda: MoE(
                TokenChoiceRouter(2), Experts(2, 8), auxiliary_losses={"router_z": -1.0}
            ),
            "weight=-1.0",
        ),
        (lambda: PatchEmbedding(8, 3)(np.zeros((1, 8, 8, 3))), "patch_size=\\(3, 3\\)"),
        (lambda: PatchEmbedding(8, 0), "patch_size=0"),
        (lambda: PositionEmbedding((2, 2), "fixed"), "kind='fixed'"),
        (lambda: PositionEmbedding((2, 2))(np.zeros((1, 7, 8))), "\\(1, 7, 8\\)"),
        (lambda: TokenPooling("max"), "pooling='max'"),
        (lambda: SelfAttention(2, 4, query_key_norm=1), "query_key_norm=1"),
        (
            lambda: AttentionPooling(2, 8, query_key_norm_bias=True),
            "query_key_norm=False",
        ),
        (lambda: LayerNorm(0.0), "epsilon=0.0"),
        (
            lambda: AttentionPooling(3, 8)(np.zeros((1, 4, 8), "float32")),
            "num_heads=3, hidden_dim=8",
        ),
        (
            lambda: AttentionPooling(0, 8)(np.zeros((1, 4, 8), "float32")),
            "num_heads=0",
        ),
        (
            lambda: AttentionPooling(2.0, 8)(np.zeros((1, 4, 8), "float32")),
            "num_heads=2.0",
        ),
        (lambda: MoE(TokenChoiceRouter(2), Experts(2, 8)).build((2, 8)), "\\(2, 8\\)"),
        (lambda: Experts(2, 8).build((1, 3, 4, 8)), "num_experts=2"),
    ],
)
def test_bad_arguments_are_refused_with_their_values(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "Expected" in str(error.value)
    assert "received" in str(error.value)


SHAPES = {"Experts": (B, E, 5, D), "PatchEmbedding": (B, 8, 8, 3)}
# Layers that take layers as arguments.
WITH_PARTS = (
    "EncoderBlock",
    "MoE",
    "MoE of several kinds",
    "MoEEncoderBlock",
    "TokenMuMoE",
)


class Case(testing.TestCase):
    """Not collected by its own name: a test makes it and calls what it has."""

    __test__ = False

    def runTest(self):
        pass


@pytest.fixture
def case():
    case = Case()
    case.setUp()
    yield case
    case.doCleanups()


def spec(outputs):
    shapes = tree.map_structure(lambda x: tuple(x.shape), outputs)
    dtypes = tree.map_structure(
        lambda x: keras.backend.standardize_dtype(x.dtype), outputs
    )
    return shapes, dtypes


@pytest.mark.parametrize("name", MAKERS)
def test_keras_checks_it(case, name):
    make = MAKERS[name]
    cls = type(make())
    config = make().get_config()
    config.pop("name")
    shape = SHAPES.get(name, (B, N, D))
    expected_shape, expected_dtype = spec(make()(np.zeros(shape, "float32")))
    case.run_layer_test(
        cls,
        # Layers in it are configs: Keras makes the layer many times from them.
        init_kwargs=config,
        input_shape=shape,
        expected_output_shape=expected_shape,
        expected_output_dtype=expected_dtype,
        # Auxiliary losses are added while training only.
        expected_num_losses=0,
        supports_masking=make().supports_masking,
        # It changes the dtype of the layer alone, and the parts keep theirs.
        run_mixed_precision_check=name not in WITH_PARTS,
    )


def test_zero_computation_experts(case):
    case.run_layer_test(
        ZeroComputationExperts,
        init_kwargs={"zero_experts": 1, "copy_experts": 2, "constant_experts": 3},
        input_shape={"tokens_shape": (B, N, D), "weights_shape": (B, N, 6)},
        expected_output_shape=(B, N, D),
        expected_output_dtype="float32",
        expected_num_trainable_weights=2,
        expected_num_losses=0,
        supports_masking=False,
        # Keras's model for it passes one input on; an MoE layer trains them.
        run_training_check=False,
    )
