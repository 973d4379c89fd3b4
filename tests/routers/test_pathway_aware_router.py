"""The router of MoE++: capacity by kind, gating residuals, and what it refuses."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.ops import ExpertTypes
from keras_moe.routers import PathwayAwareRouter, SinkhornAffinity, get
from tests.compare import assert_close, assert_same

to_numpy = ops.convert_to_numpy
KINDS = {"zero_experts": 1, "copy_experts": 1, "constant_experts": 2}


def tokens(groups=2, length=40, dim=8, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(groups, length, dim)).astype("float32")


@pytest.mark.parametrize("tau", [0.25, 0.75, 1.5])
@pytest.mark.parametrize("affinity", ["softmax", SinkhornAffinity(iterations=5)])
def test_capacity_by_kind_is_never_exceeded(tau, affinity):
    router = PathwayAwareRouter(8, 2, **KINDS, tau=tau, affinity=affinity)
    x = tokens()
    plan, routing = router(x, training=True)
    capacity, in_place = router.capacities(40, training=True)
    # Equation 8 with T = S K, rounded up.
    assert capacity == np.ceil(1.1 * tau * 80 / (4 * tau + 4))
    assert in_place == np.ceil(1.1 * 80 / (4 * tau + 4))
    loads = to_numpy(routing.dispatched).sum(axis=1)
    assert loads[:, :4].max() <= capacity
    assert loads[:, 4:].max() <= in_place
    assert tuple(plan.plan.slot_tokens.shape) == (2, 4, capacity)
    # At inference nothing is dropped, whatever the load.
    _, routing = router(x)
    assert_same(to_numpy(routing.dispatched).sum(axis=-1), 2)


def test_gating_residual():
    router = PathwayAwareRouter(6, 2, zero_experts=2, gating_residual=True)
    x, previous = tokens(), tokens(dim=6, seed=1)
    plain = PathwayAwareRouter(6, 2, zero_experts=2)
    router.build(x.shape)
    plain.build(x.shape)
    plain.kernel.assign(router.kernel)
    # It begins as a router without residuals.
    assert_same(router(x, previous_logits=previous)[1].logits, plain(x)[1].logits)
    matrix = np.random.default_rng(2).normal(size=(6, 6)).astype("float32")
    router.residual_kernel.assign(matrix)
    _, routing = router(x, previous_logits=previous)
    assert_close(
        routing.logits, x @ to_numpy(router.kernel) + previous @ matrix, 1e-5, 1e-5
    )


def test_equal_logits_have_no_deviation():
    router = PathwayAwareRouter(4, 2, zero_experts=1, logits_norm_std=2.0)
    router.build((None, None, 8))
    _, routing = router(np.zeros((1, 3, 8), "float32"))
    assert_same(routing.gates, 0.25)
    _, routing = router(tokens(groups=1))
    deviation = to_numpy(routing.noisy_logits).std(axis=-1, ddof=1)
    assert_close(deviation, 2.0, 1e-5)
    assert np.abs(to_numpy(routing.logits).std(axis=-1, ddof=1) - 2).max() > 0.1


def test_removed_zero_gates_leave_the_rest_to_the_others():
    router = PathwayAwareRouter(
        3, 2, zero_experts=1, normalize_gates="before", zero_gates="remove"
    )
    router.build((None, None, 3))
    router.kernel.assign(np.eye(3))
    # The first token takes the zero expert (2) and expert 0, the second 0 and 1.
    x = np.array([[[1.0, 0.0, 2.0], [2.0, 1.0, 0.0]]], "float32")
    plan, _ = router(x)
    dispatched, combined = map(to_numpy, plan.assignments())
    assert dispatched[0].tolist() == [[1, 0, 1], [1, 1, 0]]
    gate = 1 / (1 + np.exp(-1.0))
    assert_close(combined[0], [[1, 0, 0], [gate, 1 - gate, 0]], 1e-6)


def test_costs():
    # Table B of the paper, in multiply-adds: its 50,331,648, and 272 more for each of
    # 2,048 tokens, of which 16 are the additions of the residual.
    original = PathwayAwareRouter(16, 2)
    aware = PathwayAwareRouter(16, 2, gating_residual=True)
    first, second = (router.cost((2048, 1536)).flops for router in (original, aware))
    assert first // 2 == 50_331_648
    more = (second - first) // 2
    assert more + 2048 * 16 == 50_888_704 - 50_331_648
    # Table 1: the share tau N_FFN / (tau N_FFN + N_ZC) of the FFN computation.
    router = PathwayAwareRouter(12, 2, **KINDS, tau=0.75)
    assert router.total_slots(1000) == 2000 * 6 // 10
    assert router.experts_per_token(1000) == pytest.approx(1.2)
    # Never more than there are.
    assert PathwayAwareRouter(2, 2, 1, tau=10.0).experts_per_token(10) == 1
    two_layers = PathwayAwareRouter(12, gate_hidden_dim=96)
    two_layers.build((None, None, 8))
    assert two_layers.cost((5, 8)).parameters == two_layers.count_params()


def test_by_name_every_token_choice_router_takes_kinds():
    for name in ("softmax", "sinkhorn", "sparsity_constrained"):
        router = get(f"{name}_token_choice", ExpertTypes(4, 1, 1, 2), tau=0.5)
        assert isinstance(router, PathwayAwareRouter)
        assert router.num_experts == 8
        assert type(router.affinity).__name__.lower().startswith(name.split("_")[0])
    assert keras.saving.get_registered_name(PathwayAwareRouter).startswith("keras_moe>")
