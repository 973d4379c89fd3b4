"""Capacity at inference, and whether an image's result depends on its batch."""

import warnings

import numpy as np
import pytest
from keras import ops

from keras_moe.layers import Experts, MoE
from keras_moe.models import ViTBackbone, describe
from keras_moe.routers import ExpertChoiceRouter, SoftRouter, get
from tests.compare import assert_close

EVALUATIONS = ("batch_invariant", "official")
to_numpy = ops.convert_to_numpy
SMALL = {
    "image_shape": (8, 8, 3), "patch_size": 4, "hidden_dim": 8, "num_layers": 1,
    "num_heads": 2, "mlp_dim": 16, "moe_layers": [0], "num_experts": 4,
    "examples_per_group": 2, "seed": 0,
}  # fmt: skip


def router_of(**arguments):
    backbone = ViTBackbone.from_config({**SMALL, **arguments})
    return backbone.get_layer("block_0").feed_forward.router


@pytest.mark.parametrize(("arguments", "limits"), [
    ({"capacity_factor": 0.5}, (0.5, None)),
    ({}, (1.05, None)),
    ({"capacity": 3}, (None, 3)),
    ({"eval_capacity_factor": 4.0}, (4.0, None)),
    ({"eval_capacity": 7}, (None, 7)),
    ({"zero_experts": 1}, (1.1, None)),
    ({"router": "softmax_expert_choice"}, (1.0, None)),
    ({"dropless": True}, (None, None)),
])  # fmt: skip
def test_the_official_evaluation_has_the_capacity_of_training(arguments, limits):
    router = router_of(evaluation="official", **arguments)
    assert router.limits(training=False) == limits
    assert not router.groups_per_example(training=False)


@pytest.mark.parametrize("name", ["softmax_token_choice", "softmax_expert_choice"])
def test_dependence_on_the_batch_is_never_silent(name):
    with pytest.warns(
        UserWarning, match="eval_capacity=3 make the result of an example"
    ):
        assert not get(name, 4, eval_capacity=3).groups_per_example(False)
    with pytest.warns(UserWarning, match="eval_capacity_factor=2.0"):
        assert not router_of(router=name, eval_capacity_factor=2.0).groups_per_example(
            False
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for evaluation in EVALUATIONS:
            router = get(name, 4, eval_capacity=3, evaluation=evaluation)
            by_example = evaluation == "batch_invariant"
            assert router.groups_per_example(False) == by_example
            again = type(router).from_config(router.get_config())
            assert again.get_config() == router.get_config()
        assert router_of(router=name).groups_per_example(False)
    for wrong in ({"eval_capacity": 1.5}, {"evaluation": "no"}):
        with pytest.raises(ValueError, match="Expected"):
            get(name, 4, **wrong)


@pytest.mark.parametrize("name", ["softmax_token_choice", "softmax_expert_choice"])
def test_capacity_within_each_image(name):
    draw = np.random.default_rng(0)
    tokens = draw.normal(size=(4, 6, 8)).astype("float32")
    by_evaluation = {}
    for evaluation in EVALUATIONS:
        router = get(name, 4, eval_capacity=2, evaluation=evaluation)
        assert router.group_capacity(12, training=False) == 2
        moe = MoE(router, Experts(4, 16), group_size=12)
        moe.build(tokens.shape)
        if by_evaluation:
            moe.set_weights(by_evaluation["batch_invariant"][0].get_weights())
        together, routing = map(to_numpy, moe(tokens)[0:1]), moe(tokens)[1]
        by_evaluation[evaluation] = moe, next(together), to_numpy(routing[4])
    moe, together, dispatched = by_evaluation["batch_invariant"]
    alone = np.concatenate([to_numpy(moe(tokens[i : i + 1])[0]) for i in range(4)])
    assert_close(together, alone, 1e-5, 1e-6)
    # Two tokens an expert for each image, and for each group of two images.
    assert dispatched.astype(bool).sum(axis=1).max() == 2
    per_group = by_evaluation["official"][2].astype(bool).reshape(2, 12, 4).sum(axis=1)
    assert per_group.max() == 2


def test_descriptions_count_an_image_s_share_of_its_group():
    limits = {"evaluation": "official", "eval_capacity": 4}
    config = {**SMALL, "router": "softmax_expert_choice", **limits}
    tower = ViTBackbone.tower(ViTBackbone.make_config(config), "float32")
    experts = tower.blocks[0].feed_forward
    # Groups of 10 tokens have 4 experts x 4 slots, of which an image of 5 has half.
    cost, routing = experts.cost((5, 8)), experts.router.cost((5, 8))
    of_slots = experts.experts.cost((8, 8))
    assert cost.flops - routing.flops == of_slots.flops
    active = cost.active_parameters - routing.active_parameters
    assert active == round(1.6 * of_slots.active_parameters)


def test_k_is_a_factor_of_every_capacity():
    # 48 x 2 x 1.5 / 4.
    router = ExpertChoiceRouter(4, capacity_factor=1.5, num_selected_experts=2)
    assert router.group_capacity(48, True) == 36
    soft = SoftRouter(4, capacity_factor=1.5, num_selected_experts=2)
    assert soft.group_capacity(48) == 36
    assert SoftRouter.from_config(soft.get_config()).group_capacity(48) == 36
    described = describe("vmoe_b32", router="softmax_expert_choice")
    assert described.parts[2].kind == "MoE 32, c=2.1"
