"""Routers of layers some of whose experts are pruned."""

import numpy as np
import pytest
from keras import ops

from keras_moe import routers
from keras_moe.layers import Experts, MoE
from keras_moe.routers._pruned import METHODS, PrunedTokenChoiceRouter, pruned_router
from tests.calls import call
from tests.compare import assert_close, assert_same
from tests.gradients import one_program

to_numpy = ops.convert_to_numpy
KEPT = (0, 2, 5)
GONE = (1, 3, 4)
TOKENS = np.random.default_rng(0).normal(size=(2, 9, 4)).astype("float32")

pytestmark = pytest.mark.usefixtures("op_by_op")


def layer(router, experts, seed=1):
    """An MoE layer with the weights of some of six experts."""
    moe = MoE(router, Experts(len(experts), 3, activation="relu"))
    moe.build(TOKENS.shape)
    generator = np.random.default_rng(seed)
    for weight in moe.experts.weights:
        values = generator.normal(size=(6, *weight.shape[1:]))
        weight.assign(values[list(experts)])
    kernel = generator.normal(size=(4, 6))
    is_whole = router.num_experts == 6
    router.kernel.assign(kernel if is_whole else kernel[:, list(KEPT)])
    return moe


def outputs_of(moe):
    return one_program(lambda tokens: moe(tokens)[0])(ops.convert_to_tensor(TOKENS))


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("method", METHODS)
def test_gates_and_choices_follow_the_definitions(method):
    whole = layer(routers.TokenChoiceRouter(6, num_selected_experts=2), range(6))
    router = pruned_router(whole.router, KEPT, method, removed=False)
    _, routing = call(layer(router, range(6)), TOKENS)
    logits = TOKENS @ to_numpy(whole.router.kernel)
    gates = softmax(logits)
    preferred = gates.copy()
    if method == "router_drop":
        gates = np.zeros_like(logits)
        gates[..., KEPT] = softmax(logits[..., KEPT])
        preferred = gates
    elif method == "router_pred":
        preferred[..., GONE] = -1.0
    chosen = np.zeros_like(logits)
    order = np.argsort(-preferred, axis=-1)[..., :2]
    np.put_along_axis(chosen, order, 1.0, axis=-1)
    if method == "router_pred_skip":
        # Some tokens lose one choice, some both.
        assert {*chosen[..., GONE].sum(axis=-1).ravel()} == {0.0, 1.0, 2.0}
        chosen[..., GONE] = 0.0
    assert_same(routing.dispatched, chosen)
    assert_close(routing.gates, gates, 1e-5)
    assert_close(routing.combined, chosen * gates, 1e-5)


@pytest.mark.parametrize("affinity", ["softmax", "sinkhorn"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [
    {"normalize_gates": "before"},
    {"normalize_gates": "after"},
    {"eval_capacity_factor": 1.0, "evaluation": "official"},
    {
        "eval_capacity": 2,
        "evaluation": "official",
        "normalize_gates": "after",
        "priority": "max_gate",
    },
])  # fmt: skip
def test_removed_experts_change_no_output(method, affinity, options):
    whole = routers.TokenChoiceRouter(
        6, num_selected_experts=2, affinity=affinity, **options
    )
    masked = layer(pruned_router(whole, KEPT, method, removed=False), range(6))
    small = layer(pruned_router(whole, KEPT, method, removed=True), KEPT)
    expected, actual = outputs_of(masked), outputs_of(small)
    assert np.abs(to_numpy(expected)).max() > 0.1
    assert_close(actual, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "capacity"),
    [("router_drop", 6), ("router_pred_skip", 3), ("router_pred", 6)],
)
@pytest.mark.parametrize("removed", [False, True])
def test_the_capacity_counts_the_experts_that_serve_all_tokens(
    method, capacity, removed
):
    router = routers.TokenChoiceRouter(
        6, num_selected_experts=2, eval_capacity_factor=1.0, evaluation="official"
    )
    pruned = pruned_router(router, KEPT, method, removed)
    assert pruned.group_capacity(9, training=False) == capacity


def test_the_noise_of_fewer_experts_has_the_same_deviation():
    router = routers.TokenChoiceRouter(6, noise_std=1.0)
    small = pruned_router(router, KEPT, "router_drop", removed=True)
    assert small.noise_std / small.num_experts == pytest.approx(1 / 6)


def test_pools_keep_their_experts():
    router = routers.TokenChoiceRouter(
        6, num_selected_experts=1, expert_pools=[[0, 1, 2], [3, 4, 5]]
    )
    small = pruned_router(router, KEPT, "router_drop", removed=True)
    assert small.expert_pools == [[0, 1], [2]]
    ids = np.arange(18).reshape(2, 9) % 2
    small = layer(small, KEPT)
    masked = layer(pruned_router(router, KEPT, "router_drop", False), range(6))
    expected = call(masked, TOKENS, modality_ids=ids)[0]
    actual = call(small, TOKENS, modality_ids=ids)[0]
    assert_close(actual, expected, atol=1e-5)


def test_the_config_makes_an_equal_router():
    router = routers.TokenChoiceRouter(6, num_selected_experts=1, priority="max_gate")
    for method in METHODS:
        pruned = pruned_router(router, [5, 0], method, removed=False)
        again = PrunedTokenChoiceRouter.from_config(pruned.get_config())
        assert again.get_config() == pruned.get_config()
        assert again.priority == "max_gate"
        assert again.kept_experts == (0, 5)


@pytest.mark.parametrize(("router", "kept", "message"), [
    (routers.TokenChoiceRouter(6, 1, expert_pools=[[0, 1], [2]]), [0], "expert_pools"),
    (routers.TokenChoiceRouter(4), [], "at least one"),
    (routers.TokenChoiceRouter(4), "01", "kept_experts='0'"),
    (routers.TokenChoiceRouter(4, affinity="sparsity_constrained"), [0, 1],
     "router_pred"),
])  # fmt: skip
@pytest.mark.parametrize("removed", [False, True])
def test_errors_name_what_cannot_be_pruned(router, kept, message, removed):
    with pytest.raises(ValueError, match=message):
        pruned_router(router, kept, "router_drop", removed)
