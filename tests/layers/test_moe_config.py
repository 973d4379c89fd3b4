"""Which blocks are mixtures of experts, and of what: the configs."""

import json

import keras
import numpy as np
import pytest

from keras_moe import losses, routers
from keras_moe.layers import (
    MLP,
    Attention,
    MoE,
    MoEConfig,
    MuMoEBlock,
    MuMoEConfig,
    TowerSpec,
)
from keras_moe.layers.moe_config import moe_config
from tests.refusals import refuses

NOT_DEFAULT = {
    "moe_layers": [0, 2], "num_experts": 6,
    "router": {
        "name": "sinkhorn_token_choice", "num_selected_experts": 3,
        "evaluation": "official", "priority": "sum_gates", "normalize_gates": "after",
        "tau": 0.5,
    },
    "expert_mlp_dim": 5, "examples_per_group": None,
    "auxiliary_losses": {"router_z": 0.1},
    "expert_dropout": 0.1, "shared_expert_initialization": False,
    "dispatcher": "einsum", "zero_experts": 1, "copy_experts": 2,
    "constant_experts": "auto", "gating_residual": True, "gated_experts": True,
    "expert_use_bias": False, "expert_activation": "silu", "input_scale": 2.0,
    "shared_experts": 2,
    "pruning": {
        "method": "router_pred_skip",
        "kept_experts": {"block_1": [0, 2]},
        "removed": True,
    },
}  # fmt: skip
MUMOE_NOT_DEFAULT = {
    "moe_layers": "last_2", "num_experts": [3, 2], "expert_mlp_dim": 5,
    "expert_activation": "relu", "factorization": "tr", "rank": [2, 2, 2, 2],
    "input_norm": True, "gate_activation": "softmax", "gate_normalization": None,
    "expert_use_bias": False, "expert_noise": 0.5, "block_norm": False,
}  # fmt: skip


def named(**arguments):
    return {"name": "softmax_token_choice", **arguments}


def blocks(moe, num_layers=3, **arguments):
    spec = TowerSpec(
        num_layers=num_layers, num_tokens=9, mlp_dim=8, moe=moe, **arguments
    )
    return [b.feed_forward for b in spec.blocks(lambda _: Attention(2, 4))]


@pytest.mark.parametrize(
    ("cls", "values"), [(MoEConfig, NOT_DEFAULT), (MuMoEConfig, MUMOE_NOT_DEFAULT)]
)
def test_every_field_round_trips_through_json(cls, values):
    assert set(values) == set(cls.field_names())
    config, default = cls(**values), cls()
    plain = json.loads(json.dumps(config.to_dict()))
    again = moe_config(plain)
    assert type(again) is cls
    assert json.loads(json.dumps(again.to_dict())) == plain
    for name, value in values.items():
        assert plain[name] == value, name
        assert getattr(default, name) != value, name


def test_a_config_says_which_blocks_are_mixtures():
    layers = blocks(MoEConfig(moe_layers=[0, 2], num_experts=4, expert_mlp_dim=5))
    assert [type(layer) for layer in layers] == [MoE, MLP, MoE]
    assert layers[0].experts.mlp_dim == 5
    assert layers[1].mlp_dim == 8
    layers = blocks(MuMoEConfig(moe_layers=[1], num_experts=4))
    assert [type(layer) for layer in layers] == [MLP, MuMoEBlock, MLP]
    assert [type(layer) for layer in blocks(None)] == [MLP] * 3
    assert [type(layer) for layer in blocks(MoEConfig(moe_layers=None))] == [MLP] * 3


def test_routers_get_their_arguments_and_a_seed():
    moe = MoEConfig(moe_layers="every_1", num_experts=4)
    for name, (cls, _) in routers.ROUTERS.items():
        named = {"name": name, "capacity_factor": 2.0}
        router = blocks(moe.replace(router=named), seed=3)[1].router
        assert type(router) is cls
        assert router.capacity_factor == 2.0
        # The block's own: 3 + 4 x (1 + 1) + 3.
        assert router.seed == 14
    named = {"name": "softmax_token_choice", "tau": 0.5}
    aware = blocks(moe.replace(zero_experts=1, router=named))
    assert all(type(layer.router) is routers.PathwayAwareRouter for layer in aware)
    assert [layer.router.gating_residual for layer in aware] == [False, True, True]
    assert {layer.router.tau for layer in aware} == {0.5}


def test_a_router_may_be_a_class_or_an_instance():
    own = routers.TokenChoiceRouter(
        4, affinity=routers.SinkhornAffinity(5), num_selected_experts=1
    )
    for router in (routers.TokenChoiceRouter, "keras_moe>TokenChoiceRouter", own):
        moe = moe_config(json.loads(json.dumps(MoEConfig(router=router).to_dict())))
        if router is own:
            moe = moe.replace(num_experts=4)
        first, second = (
            layer.router for layer in blocks(moe.replace(moe_layers=[0, 1]), seed=0)[:2]
        )
        assert type(first) is routers.TokenChoiceRouter
        assert first is not own
        assert first.seed != second.seed
    assert first.affinity.iterations == 5
    assert first.num_selected_experts == 1


def test_a_class_that_nobody_registered_is_refused():
    class Unknown(routers.TokenChoiceRouter):
        pass

    refuses("registered", MoEConfig, router=Unknown)


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="stands for SoftRouter"):
        routers.register_router("soft")(type("Other", (routers.Router,), {}))
    refuses("Dense", routers.register_router("dense"), keras.layers.Dense)
    assert routers.register_router("soft")(routers.SoftRouter) is routers.SoftRouter


@pytest.mark.parametrize(("make", "message"), [
    (lambda: MoEConfig(router="softmax"), "router='softmax'.*nearest"),
    (lambda: MoEConfig(router=named(dropls=True)), "nearest: dropless"),
    (lambda: MoEConfig(router=named(seed=1)), "seed=1"),
    (lambda: blocks(MoEConfig(router=named(dropless=1))), "dropless=1"),
    (lambda: MoEConfig(auxiliary_losses={"loads": 1}), "nearest: load"),
    (lambda: MoEConfig().replace(num_expert=3), "nearest: num_experts"),
    (lambda: MoEConfig.from_dict({"tow": 3}), "MoEConfig; received: tow=3"),
    (lambda: MuMoEConfig.from_dict({"tau": 1}), "MuMoEConfig; received: tau=1"),
    (lambda: moe_config(3), "moe=3"),
    (lambda: MoEConfig(router=named(tau=2)),
     "TokenChoiceRouter in an encoder; received: tau=2"),
])  # fmt: skip
def test_bad_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "Expected" in str(error.value)


def test_losses_may_be_objects():
    moe = MoEConfig(
        auxiliary_losses=[losses.AuxiliaryLoss("router_z", 0.25)], num_experts=4
    )
    (loss,) = blocks(moe_config(json.loads(json.dumps(moe.to_dict()))))[
        1
    ].auxiliary_losses
    assert loss.weight == 0.25


def test_numpy_integers_become_plain():
    moe = MoEConfig(moe_layers=np.array([1, 2]), num_experts=np.int64(4))
    assert json.dumps(moe.to_dict()["moe_layers"]) == "[1, 2]"
    assert json.dumps(moe.to_dict()["num_experts"]) == "4"


def test_configs_share_nothing_with_what_they_are_made_of():
    mine, router = {"router_z": 0.5}, named(expert_pools=np.array([[0], [1]]))
    moe = MoEConfig(auxiliary_losses=mine, router=router)
    mine["router_z"], router["dropless"] = 7.0, True
    assert moe.auxiliary_losses == {"router_z": 0.5}
    plain = json.loads(json.dumps(moe.to_dict()))
    assert plain["router"] == named(expert_pools=[[0], [1]])


def test_a_router_that_is_a_layer_has_the_counts_of_experts():
    aware = routers.PathwayAwareRouter(
        6, zero_experts=1, copy_experts=1, gating_residual=True
    )
    moe = moe_config(MoEConfig(moe_layers="every_1", router=aware).to_dict())
    assert moe.expert_types == aware.expert_types
    residuals = [layer.router.gating_residual for layer in blocks(moe)]
    assert residuals == [False, True, True]
    refuses("num_experts=5", MoEConfig, num_experts=5, router=aware)
