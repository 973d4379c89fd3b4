"""Values that layers and routers refuse, with the value received."""

import numpy as np
import pytest

from keras_moe import layers, losses, ops, routers
from keras_moe.models import ViTBackbone
from keras_moe.ops import ExpertTypes
from tests.small_models import SMALL

pytestmark = pytest.mark.usefixtures("op_by_op")
NAN = float("nan")
GATES = np.ones((1, 6, 4), "float32")


def vit(**arguments):
    return ViTBackbone.from_config({**SMALL, **arguments})


def moe(router=None, experts=2, **arguments):
    return layers.MoE(
        router or routers.TokenChoiceRouter(2), layers.Experts(experts, 8), **arguments
    )


def choice(*arguments, **options):
    return routers.TokenChoiceRouter(4, *arguments, **options)


def choose(capacity):
    return ops.token_choice(GATES, GATES, 2, capacity)


def mumoe(kind, num_experts=4, **arguments):
    return layers.MuMoE(4, num_experts, kind, **arguments)


def pruned(kept_experts=0, **arguments):
    kept = {"block_1": [kept_experts]}
    return layers.MoEConfig(pruning={"kept_experts": kept, **arguments})


def run(**arguments):
    block = layers.Block(layers.Attention(2, 4), layers.MLP(4))
    return block(zeros(1, 6, 8), **arguments)


def zeros(*shape):
    return np.zeros(shape, "float32")


# What is made, its good arguments, and bad values of others: the error says name=value.
BAD_VALUES = [
    (layers.Experts, {"num_experts": 4, "mlp_dim": 16}, {
        "num_experts": [0], "mlp_dim": [0], "dropout": [1.0], "gated": ["yes"],
        "seed": [0.5], "shared_initialization": [1],
    }),
    (routers.TokenChoiceRouter, {"num_experts": 4}, {
        "num_experts": [0], "num_selected_experts": [5, 0],
        "capacity_factor": [0.0, -1], "capacity": [0], "eval_capacity_factor": [0],
        "capacity_rounding": ["up"], "capacity_multiple_of": [0], "dropless": ["yes"],
        "priority": ["best", None], "noise_std": [-1.0, "1"], "noisy_combine": [1],
        "affinity": ["soft"], "combine": ["hard"], "normalize_gates": ["x", 1],
        "seed": [-1], "num_modalities": [0], "excluded_experts": [1],
        "expert_pools": [[[0, 1], [1, 2]], [[0, 1], [1, 2, 3]]],
    }),
    (choice, {"dropless": True}, {"capacity": [2]}),
    (routers.TokenChoiceRouter, {"num_experts": 4, "affinity": "sinkhorn",
                         "combine": "affinity"}, {"noisy_combine": [False]}),
    (routers.ExpertChoiceRouter, {"num_experts": 4}, {
        "evaluation": ["no"], "capacity_factor": [0.0], "capacity": [2],
        "normalize_gates": ["before"], "eval_capacity_factor": [0],
        "expert_pools": [[[0, 1], []]],
    }),
    (routers.PathwayAwareRouter, {"num_experts": 4}, {
        "zero_experts": [4, -1], "copy_experts": [-1], "constant_experts": ["auto"],
        "tau": [0, -0.5], "capacity": [3], "gating_residual": [1],
        "gate_hidden_dim": [0], "logits_norm_std": [0], "zero_gates": ["drop"],
    }),
    (routers.PathwayAwareRouter, {"num_selected_experts": 1, "logits_norm_std": 1.0}, {
        "num_experts": [1],
    }),
    (routers.SoftRouter, {"num_experts": 4}, {
        "num_slots": [0], "noise_std": [NAN], "normalize": [1],
    }),
    (routers.SinkhornAffinity, {}, {"iterations": [0, 1e9]}),
    (routers.SparsityConstrainedAffinity, {}, {
        "solver": ["sgd"], "iterations": [0], "learning_rate": [0],
        "sparse": [1],
    }),
    (moe, {}, {
        "group_size": [0], "dispatcher": ["x"], "input_scale": [0],
        "router": ["softmax"],
    }),
    (choose, {}, {"capacity": [2.5, 0, -1, NAN, True]}),
    (layers.MuMoE, {"units": 4, "num_experts": 4}, {
        "units": [0], "num_experts": [0, ()], "rank": [0, 0.0, 4.0, True],
        "edited_outputs": [(4,), (1, 1)], "input_norm": [1],
        "factorization": ["svd"], "normalization": ["group"], "expert_noise": [-1.0],
    }),
    (layers.MoEConfig, {}, {"pruning": [{}, {"kept_experts": [0]}]}),
    (pruned, {}, {
        "method": ["router"], "removed": ["no", 1], "kept_experts": [True, -1, 0.5],
        "keep": [1],
    }),
    (run, {}, {"boundaries": [(9,), (0,), (2, 2), (3, 1), (-1,)]}),
    (mumoe, {"kind": "tr"}, {"rank": [3]}),
    (mumoe, {"kind": "tr", "num_experts": (4, 2)}, {"rank": [(2, 2, 2)]}),
    (mumoe, {"kind": "tucker"}, {"rank": [3]}),
    (layers.PatchEmbedding, {"hidden_dim": 8, "patch_size": 4}, {
        "patch_size": [0, 4.0, "44", (4, 4, 4), (4, 4.0), True, None],
        "interpolation": [3],
    }),
    (layers.resize_patch_kernel, {"kernel": zeros(2, 2, 1, 1), "patch_size": 4}, {
        "patch_size": [0], "interpolation": ["nearest"],
    }),
    (layers.MaskedPooling, {"pooling": "last"}, {
        "pooling": ["middle"], "end_of_text_id": [3],
    }),
    (layers.ZeroComputationExperts, {}, {"zero_experts": [-1, 0.5]}),
    (layers.TokenEmbedding, {"vocabulary_size": 4, "hidden_dim": 4}, {
        "vocabulary_size": [0], "hidden_dim": [0],
    }),
    (layers.Attention, {"num_heads": 2, "key_dim": 4}, {
        "query_key_norm": [1, "x"], "seed": [-1],
    }),
    (layers.LogitScale, {}, {"bias": [NAN, "-1"]}),
    (layers.PerExpert, {}, {"initializer": [{"a": 1}]}),
    (vit, {}, {
        "expert_mlp_dim": [0], "seed": [-1, 1.5, True, 2**32], "dtype": ["flot32", 3],
        "kernel_initializer": [3], "query_key_norm": [1], "dropout_rate": [1.0],
        "position_embedding": ["x"], "activation": ["x"], "normalize_gates": [1],
        "layer_norm_epsilon": [NAN], "shared_expert_initialization": [1],
    }),
    (losses.AuxiliaryLoss, {"function": "importance"}, {"weight": [NAN, "x", True]}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "arguments", "name"),
    [
        pytest.param(make, {**good, name: value}, name, id=f"{make.__name__}-{name}")
        for make, good, values in BAD_VALUES
        for name, bad in values.items()
        for value in bad
    ],
)
def test_a_bad_value_is_refused_by_its_name(make, arguments, name):
    with pytest.raises(ValueError, match="Expected") as error:
        make(**arguments)
    received = str(error.value).partition("received: ")[2]
    assert f"{name}={arguments[name]!r}" in received


TOKENS = zeros(1, 3, 8)


def pooled(pooling, **arguments):
    return layers.MaskedPooling(pooling)(TOKENS, **arguments)


def zero_experts(weights):
    return layers.ZeroComputationExperts(1, 1)(TOKENS, weights)


def built(*num_experts):
    experts = layers.MultilinearExperts(4, num_experts, rank=2)
    experts.build((None, 3))
    return experts


def pathway(*shape, gating_residual=True):
    """A call of a router of four experts with previous logits of a shape."""
    router = routers.PathwayAwareRouter(4, gating_residual=gating_residual)
    logits = {"previous_logits": zeros(*shape)} if shape else {}
    return router(zeros(2, 40, 8), **logits)


@pytest.mark.parametrize(("call", "message"), [
    # Two arguments that do not go together.
    (lambda: choice(capacity=2, capacity_factor=1.0), "not both"),
    (lambda: routers.SoftRouter(4, num_slots=1, capacity_factor=1.0), "not both"),
    (lambda: choice(expert_pools=[[0], [4]]), "expert_pools=4"),
    (lambda: choice(2, expert_pools=[[0], [1, 2]]), r"\[0\]"),
    (lambda: choice(1, num_modalities=3, expert_pools=[[0], [1]]), "modalities=3"),
    (lambda: moe(routers.TokenChoiceRouter(4)), "experts.num_experts=2"),
    (lambda: moe(routers.PathwayAwareRouter(3, zero_experts=1), 3), "2 FFN experts"),
    (lambda: routers.get("soft", ExpertTypes(2, zero=1)), "router='soft'"),
    (lambda: moe("soft", auxiliary_losses={"router_z": 0.1}), "SoftRouter"),
    (lambda: moe(auxiliary_losses={"loda": 1.0}), "'loda'"),
    (lambda: layers.LogitScale(scale=0.0), "scale > 0"),
    (lambda: layers.LogitScale(3.0, 2.0), "most largest_scale=2.0"),
    # Inputs that do not fit the layer.
    (lambda: run(mask=np.ones((1, 5), bool)), r"mask.shape=\(1, 5\)"),
    (lambda: moe()(TOKENS, mask=zeros(1, 2) > 0), r"mask.shape=\(1, 2\)"),
    (lambda: moe()(TOKENS, modality_ids=zeros(1, 2) > 0), "modality_ids.shape"),
    (lambda: routers.SoftRouter(4).build((None, None, 8)), "num_tokens=None"),
    (lambda: moe().build((2, 8)), r"\(2, 8\)"),
    (lambda: moe()(TOKENS, previous_logits=zeros(1, 3, 2)), "residual=False"),
    (pathway, "previous_logits.shape=None"),
    (lambda: pathway(2, 40, 4, gating_residual=False), "gating_residual=False"),
    (lambda: pathway(2, 40, 5), r"\(2, 40, 5\)"),
    (lambda: routers.SoftRouter(2)(TOKENS, modality_ids=TOKENS), "modality_ids"),
    (lambda: layers.PatchEmbedding(8, 3)(zeros(1, 8, 8, 3)), r"size=\(3, 3\)"),
    (lambda: layers.PositionEmbedding((2, 2))(TOKENS), r"\(1, 3, 8\)"),
    (lambda: layers.AttentionPooling(3, 8)(TOKENS), "num_heads=3, hidden_dim=8"),
    (lambda: pooled("last", mask=np.ones((1, 5), bool)), r"\(1, 5\)"),
    (lambda: pooled("end_of_text"), "token_ids=None"),
    (lambda: zero_experts(zeros(1, 3, 6)), r"\(1, 3, 6\)"),
    (lambda: built(4, 2)(zeros(1, 3), [zeros(1, 4)]), "received: 1"),
    (lambda: ViTBackbone(moe={"moe_layers": [], "router": "soft"}), r"yers=\[\]"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "Expected" in str(error.value)
