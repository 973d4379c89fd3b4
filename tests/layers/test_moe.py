import keras
import numpy as np
import pytest
from keras import ops

from keras_moe import routers
from keras_moe.layers import Experts, MoE, moe
from keras_moe.ops import expert_types, token_choice
from keras_moe.routers import ExpertChoiceRouter, TokenChoiceRouter
from tests.calls import call, call_with_losses
from tests.compare import assert_close, assert_same
from tests.ops.programs import compiled_arguments
from tests.training_gradients import training_gradients

BACKEND = keras.backend.backend()
to_numpy = ops.convert_to_numpy


def make(num_experts=4, selected=2, group_size=None, dim=8, **router):
    router = TokenChoiceRouter(num_experts, selected, **{"noise_std": 0.0, **router})
    experts = Experts(num_experts, mlp_dim=16, shared_initialization=False)
    moe = MoE(router, experts, group_size)
    moe.build((None, None, dim))
    moe.router.kernel.assign(
        np.random.default_rng(5).normal(size=(dim, num_experts)).astype("float32")
    )
    return moe


def images(batch=5, tokens=6, dim=8):
    return np.random.default_rng(0).normal(size=(batch, tokens, dim)).astype("float32")


def test_identity_experts_by_hand():
    # relu(x) - relu(-x) = x, so each expert returns its scale times the token.
    router = TokenChoiceRouter(2, 1, capacity=1, noise_std=0.0)
    moe = MoE(router, Experts(2, mlp_dim=2, activation="relu"))
    moe.build((None, None, 1))
    moe.router.kernel.assign([[1.0, 0.0]])
    moe.experts.hidden_kernel.assign([[[1.0, -1.0]], [[1.0, -1.0]]])
    moe.experts.output_kernel.assign([[[10.0], [-10.0]], [[100.0], [-100.0]]])
    moe.experts.hidden_bias.assign(np.zeros((2, 2)))
    moe.experts.output_bias.assign(np.zeros((2, 1)))
    tokens = np.array([[[2.0], [1.0], [-1.0]]], "float32")
    outputs, routing = call(moe, tokens, training=True)
    gate = 1 / (1 + np.exp([-2.0, -1.0, -1.0]))
    # Tokens 0 and 1 want expert 0, which has one slot; token 2 wants expert 1.
    assert_close(to_numpy(outputs)[0, :, 0], [20 * gate[0], 0, -100 * gate[2]], 1e-5)
    assert_same(to_numpy(routing.dispatched)[0], [[1, 0], [0, 0], [0, 1]])
    assert_close(
        to_numpy(routing.combined)[0], [[gate[0], 0], [0, 0], [0, gate[2]]], 1e-6
    )


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7])
def test_a_last_group_that_is_not_full_is_padded(batch):
    """The real tokens fare like groups of their own capacity."""
    moe, tokens = make(capacity_factor=0.5, group_size=12), images(batch=batch)
    outputs, routing = call(moe, tokens, training=True)
    flat = tokens.reshape(-1, 8)
    size = min(12, len(flat))
    capacity = moe.router.group_capacity(size, training=True)
    gates = to_numpy(routing.gates).reshape(-1, 4)
    dispatched = to_numpy(routing.dispatched).reshape(-1, 4)
    assert to_numpy(outputs).shape == tokens.shape
    for start in range(0, len(flat), size):
        part = gates[None, start : start + size]
        plan = token_choice(part, part, 2, capacity)
        slots = to_numpy(plan.slot_tokens)[0]
        for expert in range(4):
            served = np.flatnonzero(dispatched[start : start + size, expert])
            assert_same(served, np.sort(slots[expert][slots[expert] >= 0]))


def test_whole_tiles_of_slots_change_nothing(monkeypatch):
    layer = make(capacity=15, evaluation="official")
    tokens, shapes, results = images(batch=7), [], []
    for weight in layer.experts.weights:
        weight.assign(keras.random.normal(weight.shape, seed=1))
    run = layer.experts.call

    def experts(slots, *args, **kwargs):
        shapes.append(slots.shape)
        return run(slots, *args, **kwargs)

    monkeypatch.setattr(layer.experts, "call", experts)
    for on_tpus in (False, True):
        monkeypatch.setattr(moe, "is_bfloat16_on_tpus", lambda x, on=on_tpus: on)
        results.append(to_numpy(call(layer, tokens, training=True)[0]))
    assert shapes == [(1, 4, 15, 8), (1, 4, 16, 8)]
    assert np.abs(results[0]).max() > 0.01
    assert_close(results[1], results[0], 1e-6, 1e-6)


def test_losses_are_added_in_training_alone_and_skip_padding():
    tokens = images(batch=3)

    def loss(layer, tokens):
        return sum(call_with_losses(layer, tokens, training=True)[1])

    layers, losses = [], {"importance": 1.0, "router_z": 0.5, "load_balance": 2.0}
    for group_size in (18, 12):
        moe = make(group_size=group_size)
        layers.append(MoE(moe.router, moe.experts, group_size, losses))
        assert not call_with_losses(layers[-1], tokens, training=False)[1]
    for weight, value in zip(layers[1].weights, layers[0].weights):
        weight.assign(value)
    # Two groups, the second of which is half padding, are averaged.
    expected = (loss(layers[0], tokens[:2]) + loss(layers[0], tokens[2:])) / 2
    assert_close(loss(layers[1], tokens), expected, 1e-5)


@pytest.mark.every_backend
def test_a_tiny_fit_lowers_the_loss_with_uneven_batches():
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(22, 6, 8)).astype("float32")
    y = np.tanh(x[:, :, ::-1])
    inputs = keras.Input((6, 8))
    losses = {"importance": 0.01, "load": 0.01}
    moe = MoE(TokenChoiceRouter(4, 2, seed=0), Experts(4, mlp_dim=32), 12, losses)
    model = keras.Model(inputs, moe(inputs)[0])
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
    history = model.fit(x, y, batch_size=8, epochs=15, verbose=0).history["loss"]
    assert history[-1] < 0.6 * history[0]


@pytest.mark.every_backend
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="constants of XLA on TensorFlow"
)
@pytest.mark.parametrize("kind", ["dropless", "capacity", "expert choice", "MoE++"])
def test_one_program_for_all_batches(kind):
    # XLA compiles again for each value of an input that it takes as a constant.
    import tensorflow as tf

    quiet = {"noise_std": 0.0}
    router = {
        "dropless": lambda: TokenChoiceRouter(4, 2, dropless=True, **quiet),
        "capacity": lambda: TokenChoiceRouter(4, 2, **quiet),
        "expert choice": lambda: ExpertChoiceRouter(4, **quiet),
        "MoE++": lambda: routers.get(
            "softmax_token_choice", expert_types(4, 1, 1, 2), **quiet
        ),
    }[kind]()
    moe = MoE(router, Experts(4, mlp_dim=16))
    tokens = tf.constant(images())
    moe.build(tokens.shape)

    def program(training):
        @tf.function(jit_compile=True)
        def step(tokens):
            with tf.GradientTape() as tape:
                outputs = tf.reduce_sum(moe(tokens, training=training)[0] ** 2)
            weights = [v.value for v in moe.trainable_variables]
            return outputs, tape.gradient(outputs, weights) if training else []

        return step

    for training in (False, True):
        arguments = compiled_arguments(program(training), tokens)
        assert len(arguments) == 1 + len(moe.trainable_variables), arguments


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND == "tensorflow", reason="a vmap of JAX and PyTorch")
@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")
@pytest.mark.parametrize("router", [{"dropless": True}, {"capacity_factor": 0.8}])
def test_gradients_of_each_example(router):
    """By one vectorised gradient, and by one after another."""
    moe, tokens = make(**router), images(batch=3)
    weights = [variable.value for variable in moe.trainable_variables]
    state = [variable.value for variable in moe.non_trainable_variables]
    if BACKEND == "jax":
        import jax

        grad, vmap = jax.grad, lambda *args: jax.jit(jax.vmap(*args))
    else:
        from torch.func import grad, vmap

        weights = [weight.detach() for weight in weights]
        tokens = ops.convert_to_tensor(tokens)

    def loss(weights, x):
        (outputs, _), _ = moe.stateless_call(weights, state, x[None], training=True)
        return (outputs**2).sum()

    together = vmap(grad(loss), (None, 0))(weights, tokens)
    for i, x in enumerate(tokens):
        alone = training_gradients(
            moe, np.asarray(x)[None], lambda outputs: ops.sum(outputs[0] ** 2)
        )
        for all_values, expected in zip(together, alone):
            assert_close(all_values[i], expected, 1e-4, 1e-5)
