"""MoE++'s layer: what each type of expert gives, and what it has in common with MoE."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.layers import Experts, MoE, ZeroComputationExperts
from keras_moe.routers import PathwayAwareRouter
from tests.calls import call
from tests.compare import assert_close, assert_same
from tests.training_gradients import training_gradients

to_numpy = ops.convert_to_numpy
TYPES = {"zero_experts": 1, "copy_experts": 1, "constant_experts": 2}
N, D = 12, 8


def tokens(batch=2, length=N, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(batch, length, D)).astype("float32")


def make(num_experts=4, types=TYPES, selected=1, **router):
    total = num_experts + sum(types.values())
    moe = MoE(
        PathwayAwareRouter(total, selected, **types, **router),
        Experts(num_experts, mlp_dim=16, shared_initialization=False),
    )
    moe.build((None, None, D))
    return moe


def forced(moe, expert, scale=1000.0):
    """The layer, whose tokens all take `expert` with a gate of 1."""
    kernel = np.zeros((D, moe.router.num_experts), "float32")
    kernel[0, expert] = scale
    moe.router.kernel.assign(kernel)
    return moe


def positive(x):
    """Tokens whose first feature, which the forced router reads, is 1."""
    x = x.copy()
    x[..., 0] = 1.0
    return x


@pytest.mark.parametrize("training", [False, True])
def test_each_type_gives_what_its_equation_says(training):
    x = positive(tokens())
    moe = make(capacity_factor=100.0)
    zeros, _ = call(forced(moe, 4), x, training=training)
    assert_same(zeros, 0)
    copies, _ = call(forced(moe, 5), x, training=training)
    # TensorFlow's softmax gives the only expert 1 less the last bit.
    assert_close(copies, x, 2e-7)
    generator = np.random.default_rng(3)
    vector = generator.normal(size=(2, D)).astype("float32")
    kernel = generator.normal(size=(2, D, 2)).astype("float32")
    moe.zero_computation_experts.vector.assign(vector)
    moe.zero_computation_experts.kernel.assign(kernel)
    for constant in range(2):
        actual, routing = call(forced(moe, 6 + constant), x, training=training)
        assert_same(to_numpy(routing.dispatched)[..., 6 + constant], 1)
        alpha = to_numpy(ops.softmax(x @ kernel[constant]))
        expected = alpha[..., :1] * x + alpha[..., 1:] * vector[constant]
        assert_close(actual, expected, 1e-5, 1e-6)
    # And an FFN expert what it always gives.
    actual, _ = call(forced(moe, 2), x, training=training)
    expected = to_numpy(moe.experts(np.stack([x.reshape(-1, D)] * 4)[None]))[0, 2]
    assert_close(to_numpy(actual).reshape(-1, D), expected, 1e-4, 1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_without_zero_computation_experts_it_is_an_moe(training):
    x = tokens()
    mine = make(types={}, selected=2)
    vanilla = MoE(
        "softmax_token_choice", Experts(4, mlp_dim=16, shared_initialization=False)
    )
    vanilla.build((None, None, D))
    for a, b in zip(mine.weights, vanilla.weights):
        if "seed" not in b.path:
            b.assign(to_numpy(a))
    vanilla.router.noise_std = 0.0
    vanilla.router.capacity_factor = mine.router.capacity_factor
    for a, b in zip(mine(x, training=training), vanilla(x, training=training)):
        assert_same(keras.tree.flatten(a), keras.tree.flatten(b))


def test_padding_of_tokens_and_previous_logits_is_nobodys():
    moe = make(selected=2, gating_residual=True)
    moe.zero_computation_experts.vector.assign(np.ones((2, D)))
    x, previous = tokens(), tokens(seed=1)
    mask = np.ones((2, N), bool)
    mask[:, 7:] = False
    x[:, 7:] = previous[:, 7:] = np.nan
    arguments = {"mask": mask, "previous_logits": previous}
    for training in (False, True):
        outputs, routing = call(moe, x, training=training, **arguments)
        assert np.isfinite(to_numpy(outputs)).all()
        assert_same(to_numpy(outputs)[:, 7:], 0)
        assert_same(to_numpy(routing.dispatched)[:, 7:], 0)
    for value in training_gradients(moe, tokens(), **arguments):
        assert np.isfinite(value).all()


def test_previous_logits_go_by_group_and_stay_float32():
    moe = MoE(
        PathwayAwareRouter(8, 2, **TYPES, gating_residual=True),
        Experts(4, mlp_dim=16, dtype="mixed_bfloat16"),
        # A last group with padding.
        group_size=7,
        dtype="mixed_bfloat16",
    )
    x = tokens()
    previous = np.random.default_rng(1).normal(size=(2, N, 8)).astype("float32")
    moe.build(x.shape)
    moe.router.kernel.assign(np.zeros((D, 8)))
    moe.router.residual_kernel.assign(np.eye(8))
    for training in (False, True):
        outputs, routing = call(moe, x, previous_logits=previous, training=training)
        assert_close(routing.logits, previous, 1e-6)
        assert "bfloat16" in str(outputs.dtype)


@pytest.mark.parametrize("gap", [10.0, 60.0, 95.0])
def test_gradients_are_finite_where_a_zero_gate_takes_all(gap):
    moe = MoE(
        PathwayAwareRouter(4, 2, 1, 1, normalize_gates="before", zero_gates="remove"),
        Experts(2, 4),
    )
    moe.build((None, 1, 4))
    moe.router.kernel.assign(np.eye(4))
    x = np.array([[[0.0, -5.0, gap, -5.0]]], "float32")
    _, routing = call(moe, x)
    for value in training_gradients(moe, x, training=False):
        assert np.isfinite(value).all()
    if gap < 80:
        # The other expert has all of what is left.
        assert to_numpy(routing.combined)[0, 0, 0] == pytest.approx(1.0)


def test_the_mask_of_keras_goes_with_previous_logits():
    first, second = (
        MoE(
            PathwayAwareRouter(4, 2, zero_experts=1, gating_residual=residual),
            Experts(3, 8),
        )
        for residual in (False, True)
    )
    inputs = keras.Input((5, D))
    x = keras.layers.Masking()(inputs)
    _, before = first(x)
    _, after = second(x, previous_logits=before.logits)
    x = tokens(length=5)
    x[:, 3:] = 0.0
    actual = keras.Model(inputs, after.dispatched).predict(x, verbose=0)
    assert_same(actual.sum(axis=-1), [[2, 2, 2, 0, 0]] * 2)


def test_gated_experts_by_hand():
    experts = Experts(1, 2, activation="relu", gated=True, use_bias=False)
    experts.build((None, 1, None, 1))
    experts.gate_kernel.assign([[[1.0, -1.0]]])
    experts.hidden_kernel.assign([[[3.0, 5.0]]])
    experts.output_kernel.assign([[[1.0], [10.0]]])
    # relu(x) 3 x + 10 relu(-x) 5 x
    actual = experts(np.array([[[[2.0], [-1.0]]]], "float32"))
    assert_close(to_numpy(actual).ravel(), [12.0, -50.0])
    assert experts.count_params() == 6
    assert experts.cost((10, 1)) == (6, 6, 3 * 2 * 10 * 2, 0)
    rows = experts(np.array([[2.0], [-1.0]], "float32"), np.array([2], "int32"))
    assert_close(to_numpy(rows).ravel(), [12.0, -50.0])


def test_tokens_that_overflow_are_dropped():
    moe = forced(make(tau=0.5, capacity_factor=1.0), 5)
    x = positive(tokens(batch=1))
    outputs, routing = call(moe, x, training=True)
    # 12 assignments over 4 * 0.5 + 4: two for a zero-computation expert.
    served = to_numpy(routing.dispatched)[0, :, 5]
    assert served.tolist() == [1, 1] + [0] * 10
    assert_close(to_numpy(outputs)[0, :2], x[0, :2], 2e-7)
    assert_same(to_numpy(outputs)[0, 2:], 0)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_zero_computation_experts_by_themselves(dtype):
    layer = ZeroComputationExperts(1, 2, 3, dtype=dtype)
    x = tokens()
    weights = np.random.default_rng(2).random((2, N, 6)).astype("float32")
    actual = layer(x, weights)
    assert dtype.removeprefix("mixed_") in str(actual.dtype)
    kernel, vector = to_numpy(layer.kernel), to_numpy(layer.vector)
    expected = weights[..., 1:3].sum(axis=-1, keepdims=True) * x
    for j in range(3):
        alpha = to_numpy(ops.softmax(x @ kernel[j]))
        constant = alpha[..., :1] * x + alpha[..., 1:] * vector[j]
        expected += weights[..., 3 + j : 4 + j] * constant
    tolerance = 1e-5 if dtype == "float32" else 5e-2
    assert_close(ops.cast(actual, "float32"), expected, tolerance, tolerance)
