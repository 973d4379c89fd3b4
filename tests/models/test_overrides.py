"""Flat names of mixtures and routers find their owner."""

from keras_moe.layers import MoEConfig
from keras_moe.models.loading._overrides import updated_moe
from keras_moe.routers import SoftRouter, TokenChoiceRouter
from tests.refusals import refuses


def named(**arguments):
    return {"name": "softmax_token_choice", **arguments}


def test_another_router_drops_arguments_that_only_the_one_before_has():
    router = named(num_selected_experts=3, combine="affinity", priority="max_gate")
    moe = MoEConfig(num_experts=8, router=router)
    changed = updated_moe(moe, {"router": "softmax_expert_choice"})
    assert changed.router == {
        "name": "softmax_expert_choice",
        "num_selected_experts": 3,
    }
    # K is 2 for tokens that choose, and then for any other router.
    changed = updated_moe({"num_experts": 8}, {"router": "soft", "num_slots": 2})
    assert changed.router == {"name": "soft", "num_selected_experts": 2, "num_slots": 2}
    assert changed.num_experts == 8
    with_zeros = MoEConfig(zero_experts=1, router=named(tau=0.5, dropless=True))
    changed = updated_moe(with_zeros, {"zero_experts": 0})
    assert changed.router == named(dropless=True)
    mumoe = updated_moe(moe, {"router": "mumoe", "rank": 3})
    assert (mumoe.num_experts, mumoe.rank, mumoe.moe_layers) == (8, 3, "every_2")
    assert updated_moe(mumoe, {"num_experts": 4}).rank == 3
    assert updated_moe(None, {}) is None
    assert updated_moe(None, {"num_experts": 3}).moe_layers is None


def test_one_limit_takes_the_place_of_another_and_none_is_the_default():
    moe = MoEConfig(router=named(capacity_factor=1.05, eval_capacity_factor=2.0))
    for changes in ({"dropless": True}, {"capacity": 8}):
        changed = updated_moe(moe, changes)
        assert changed.router == named(eval_capacity_factor=2.0, **changes)
    changed = updated_moe(moe, {"eval_capacity": 8})
    assert changed.router == named(capacity_factor=1.05, eval_capacity=8)
    moe = MoEConfig(router={"name": "softmax_token_choice", "capacity_factor": 2.0})
    assert updated_moe(moe, {"capacity_factor": None}) == MoEConfig()
    soft = updated_moe(moe, {"router": "soft", "noise_std": None})
    assert soft.router_arguments["noise_std"] == 0.0


def test_the_same_router_in_another_form_keeps_its_arguments():
    name = "keras_moe>TokenChoiceRouter"
    moe = MoEConfig(router={"name": name, "combine": "affinity"})
    for same in (name, TokenChoiceRouter):
        changed = updated_moe(moe, {"router": same, "num_experts": 8})
        assert changed == moe.replace(num_experts=8)
    assert "combine" not in updated_moe(moe, {"router": SoftRouter}).router
    refuses("received: router=None", updated_moe, moe, {"router": None})
    refuses("router='hard'", updated_moe, moe, {"router": "hard"})


def test_another_kind_keeps_no_biases_of_the_one_before():
    moe = MoEConfig(num_experts=8, expert_use_bias=False)
    assert updated_moe(moe, {"router": "mumoe"}).expert_use_bias
    without = updated_moe(moe, {"router": "mumoe", "expert_use_bias": False})
    assert not without.expert_use_bias
    assert not updated_moe(without, {"num_experts": 4}).expert_use_bias
    assert updated_moe(without, {"router": "soft"}).expert_use_bias
    assert not updated_moe(moe, {"router": "soft"}).expert_use_bias
