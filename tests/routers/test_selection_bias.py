"""Sigmoid gates, a bias that balances what tokens select, and shared experts."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe import models, training
from keras_moe.layers import MLP, Experts, MoE
from keras_moe.routers import PathwayAwareRouter, TokenChoiceRouter
from keras_moe.routers._pruned import pruned_router
from tests.calls import call
from tests.compare import assert_close, assert_same
from tests.forks import run_python
from tests.refusals import refuses
from tests.small_models import SMALL, assert_same_outputs, images, with_weights

to_numpy = ops.convert_to_numpy
LABELS = np.arange(8) % 3


def router_of(num_experts=3, selected=1, rate=0.5, **arguments):
    """A router whose tokens are their own logits, and whom no capacity limits."""
    router = TokenChoiceRouter(
        num_experts, selected, selection_bias_rate=rate, dropless=True,
        kernel_initializer="identity", **arguments,
    )  # fmt: skip
    router.build((None, None, num_experts))
    return router


def bias_of(router):
    return to_numpy(router.selection_bias)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x)))


@pytest.mark.every_backend
def test_the_bias_enters_the_choice_and_not_the_gate():
    router = router_of(selected=2, rate=0.0, gates="sigmoid", route_scale=2.0)
    router.selection_bias.assign([0.0, 0.0, 0.9])
    tokens = np.array([[[2.0, 1.0, -3.0], [2.0, 1.9, -6.0]]], "float32")
    _, routing = call(router, tokens)
    # 0.047 + 0.9 is more than 0.73, and 0.002 + 0.9 more than 0.87.
    assert_same(routing.dispatched, [[[1, 0, 1], [1, 0, 1]]])
    gates = sigmoid(tokens)
    assert_close(routing.gates, gates, 1e-6)
    assert_close(routing.combined, 2 * gates * [[[1, 0, 1], [1, 0, 1]]], 1e-6)
    # Gates that sum to one do so before they are scaled.
    sigmoids = {"rate": None, "gates": "sigmoid", "normalize_gates": "before"}
    router = router_of(selected=2, route_scale=2.0, **sigmoids)
    _, routing = call(router, tokens)
    kept = gates * [[[1, 1, 0], [1, 1, 0]]]
    expected = 2 * kept / kept.sum(axis=-1, keepdims=True)
    assert_close(routing.combined, expected, 1e-6)


@pytest.mark.every_backend
def test_updates_by_hand():
    router = router_of(rate=0.25)
    # Loads 3, 1 and 0; their mean is 4 / 3.
    tokens = np.eye(3, dtype="float32")[None, [0, 0, 0, 1, 2]]
    mask = np.array([[True, True, True, True, False]])
    call(router, tokens, mask=mask, training=True)
    assert_same(bias_of(router), [-0.25, 0.25, 0.25])
    assert_same(router.expert_load, [3, 1, 0])
    # With softmax gates 0.58 and 0.21, expert 0 now has 0.33 against 0.46.
    call(router, tokens, mask=mask, training=True)
    assert_same(router.expert_load, [0, 4, 0])
    assert_same(bias_of(router), [0.0, 0.0, 0.5])
    for unchanged in (False, None):
        call(router, tokens, training=unchanged)
    assert_same(bias_of(router), [0.0, 0.0, 0.5])


@pytest.mark.every_backend
@pytest.mark.parametrize("method", ["excluded", "router_drop", "router_pred"])
def test_the_mean_is_over_experts_that_can_be_chosen(method):
    if method == "excluded":
        router = router_of(rate=0.25, excluded_experts=[2])
    else:
        router = pruned_router(router_of(rate=0.25), [0, 1], method, False)
        router.build((None, None, 3))
    tokens = np.eye(3, dtype="float32")[None, [0, 0, 0, 1]]
    call(router, tokens, training=True)
    # The third keeps its own, for the day when it can be chosen again.
    assert_same(bias_of(router), [-0.25, 0.25, 0.0])


@pytest.mark.every_backend
def test_accumulated_passes_are_one_step():
    tokens = np.random.default_rng(0).normal(size=(1, 12, 4)).astype("float32")
    whole, parts = (router_of(4, 2) for _ in range(2))
    parts.passes_per_step = 3
    for _ in range(2):
        call(whole, tokens, training=True)
        for part in range(3):
            before = bias_of(parts)
            call(parts, tokens[:, 4 * part : 4 * part + 4], training=True)
            if part < 2:
                assert_same(bias_of(parts), before)
        assert_same(bias_of(parts), bias_of(whole))
        assert_same(parts.expert_load, whole.expert_load)
        assert bias_of(whole).any()


@pytest.mark.every_backend
def test_loads_become_equal():
    """Tokens that nearly all want one expert are spread over all of them."""
    generator = np.random.default_rng(0)
    tokens = generator.normal(size=(1, 512, 8)) + np.linspace(2, 0, 8)
    router = router_of(8, 2, rate=0.02, gates="sigmoid")
    call(router, tokens.astype("float32"), training=True)
    load = to_numpy(router.expert_load)
    assert load.max() > 2 * load.mean()
    for _ in range(40):
        call(router, tokens.astype("float32"), training=True)
    load = to_numpy(router.expert_load)
    assert load.max() < 1.3 * load.mean()


@pytest.mark.every_backend
def test_frozen_routers_keep_their_bias():
    tokens = np.eye(3, dtype="float32")[None]
    for part in ("layer", "kernel"):
        router = router_of()
        (router if part == "layer" else router.kernel).trainable = False
        call(router, np.repeat(tokens[:, :1], 4, axis=1), training=True)
        assert_same(bias_of(router), np.zeros(3))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"gates": "tanh"}, "gates=tanh|gates='tanh'"),
    ({"rate": -0.1}, "selection_bias_rate=-0.1"),
    ({"route_scale": 0}, "route_scale=0"),
    ({"affinity": "sinkhorn"}, "selection_bias_rate=0.5"),
    ({"rate": None, "gates": "sigmoid", "affinity": "sinkhorn"}, "gates='sigmoid'"),
    ({"expert_pools": [[0], [1, 2]]}, r"expert_pools=\[\[0\], \[1, 2\]\]"),
])  # fmt: skip
def test_bad_arguments(arguments, message):
    refuses(message, router_of, **arguments)


def test_experts_without_a_common_load_are_refused():
    for name, value in (("gates", "sigmoid"), ("selection_bias_rate", 0.1)):
        refuses(
            f"{name}={value!r}", PathwayAwareRouter, 4, zero_experts=1, **{name: value}
        )


def test_defaults_follow_the_paper():
    with_bias, sigmoids = router_of(), router_of(rate=None, gates="sigmoid")
    assert with_bias.noise_std == sigmoids.noise_std == 0
    assert with_bias.default_auxiliary_losses() is None
    assert sigmoids.default_auxiliary_losses() == {"importance": 0.005}


# In models


def classifier(**options):
    keras.utils.set_random_seed(0)
    biased = {"selection_bias_rate": 0.125, "dropless": True, "shared_experts": 1}
    made = models.from_preset(
        "vit_s16", num_classes=3, load_weights=False,
        **{**SMALL, "seed": 0, "gates": "sigmoid", **biased, **options},
    )  # fmt: skip
    made = with_weights(made)
    for weight in made.weights:
        if weight.name in ("selection_bias", "expert_load", "num_passes"):
            weight.assign(np.zeros(weight.shape))
    return made


def fit(model, batch_size=8, rate=0.0, epochs=3, resumed=False, **options):
    if not resumed:
        optimizer = keras.optimizers.SGD(rate, **options)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(True))
    data = images(8, 16, 8, 2), LABELS
    model.fit(*data, batch_size, epochs, verbose=0, shuffle=False)
    return biases(model)


def biases(model):
    return [to_numpy(x) for x in model.weights if x.name == "selection_bias"]


@pytest.mark.every_backend
def test_a_step_is_one_in_parts_and_rematerialized():
    expected = fit(classifier())
    assert all(x.any() for x in expected)
    parts = fit(classifier(), batch_size=2, gradient_accumulation_steps=4)
    assert_same(parts, expected)
    assert_same(fit(classifier(rematerialize=True)), expected)


@pytest.mark.every_backend
def test_training_resumes_within_a_step(tmp_path):
    """Saved after two of the three passes of a step."""
    whole = classifier()
    fit(whole, 1, 0.01, 2, gradient_accumulation_steps=3)
    begun = classifier()
    fit(begun, 1, 0.01, 1, gradient_accumulation_steps=3)
    begun.save(tmp_path / "begun.keras")
    again = keras.models.load_model(tmp_path / "begun.keras")
    fit(again, 1, epochs=1, resumed=True)
    assert_same(biases(again), biases(whole))
    for one, other in zip(again.weights, whole.weights):
        if one.name in ("expert_load", "num_passes"):
            assert_same(one, other)


@pytest.mark.every_backend
def test_a_new_optimizer_begins_a_step():
    model = classifier()
    fit(model, 4, gradient_accumulation_steps=3, epochs=1)
    (passes,) = (x for x in model.weights if x.name == "num_passes")
    assert to_numpy(passes) == 2
    model.compile(keras.optimizers.SGD(0.0, gradient_accumulation_steps=3))
    assert to_numpy(passes) == 0


def test_a_rate_is_not_added_to_a_copy():
    message = "no weights; received: weights=.*'selection_bias'"
    refuses(message, classifier().with_router_arguments, selection_bias_rate=None)


def test_averages_and_soups_have_a_bias():
    model = classifier()
    expected = fit(model, 4, 0.01, use_ema=True)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    assert_same(biases(model), expected)
    other = classifier()
    for weight in other.weights:
        if weight.name == "selection_bias":
            weight.assign([3.0, -3.0, 1.0, 2.0])
    checkpoints = [model.get_weights(), other.get_weights()]
    means = [(a + b) / 2 for a, b in zip(expected, biases(other))]

    def closeness(model):
        return -sum(np.abs(x - y).max() for x, y in zip(biases(model), means))

    soup = training.greedy_soup(other, checkpoints, closeness, max_ingredients=2)
    assert sorted(soup.ingredients) == [0, 1]
    assert_close(biases(other), means, 1e-6)


def test_adapters_leave_the_bias():
    model = classifier()
    model.enable_lora(2)
    assert_same(fit(model, 4, 0.01), [np.zeros(4)] * len(biases(model)))


def test_a_copy_a_preset_and_a_pruned_model_keep_the_bias(tmp_path):
    model = classifier()
    fit(model, 4, 0.01)
    model.save_to_preset(tmp_path / "preset")
    for again in (model.copy(), models.from_preset(str(tmp_path / "preset"))):
        assert_same_outputs(again, model, images(8, 16, 8, 2))
        assert_same(biases(again), biases(model))
    name = next(iter(model.routing))
    pruned = model.with_kept_experts({name: [0, 2, 3]})
    assert_same(biases(pruned)[0], biases(model)[0][[0, 2, 3]])


def test_what_routers_report_has_the_bias():
    model = classifier()
    fit(model, 4, 0.01)
    limits = {"min_entropy": 0.0, "max_share": 1.0, "max_dead": 1.0}
    health = training.RouterHealth(images(8, 16, 8, 2), **limits)
    before = biases(model)
    model.fit(images(8, 16, 8, 2), LABELS, epochs=1, verbose=0, callbacks=[health])
    assert not np.array_equal(before, biases(model))
    assert [row["selection_bias"] for row in health.layers] == [
        x.tolist() for x in biases(model)
    ]


# Shared experts


def test_shared_experts_serve_every_token_and_no_padding():
    layer = MoE(
        TokenChoiceRouter(4, 1, capacity=1, noise_std=0.0),
        Experts(4, 8),
        shared_experts=MLP(8, name="shared_experts"),
    )
    layer.build((None, None, 6))
    for weight in layer.weights:
        weight.assign(keras.random.normal(weight.shape, seed=1))
    tokens, mask = images(2, 5, 6), np.arange(10).reshape(2, 5) < 9
    outputs, routing = call(layer, tokens, mask=mask, training=True)
    shared = call(layer.shared_experts, tokens)
    # Tokens without a slot have the shared experts' output only.
    is_dropped = mask & (to_numpy(routing.dispatched).sum(axis=-1) == 0)
    assert is_dropped.any()
    assert_close(to_numpy(outputs)[is_dropped], to_numpy(shared)[is_dropped], 1e-6)
    assert_same(to_numpy(outputs)[~mask], np.zeros((1, 6)))


def test_shared_experts_are_as_wide_as_their_number_of_experts():
    model = classifier(shared_experts=2, expert_mlp_dim=5)
    shapes = [x.shape for x in model.weights if "shared_experts/hidden/k" in x.path]
    assert shapes[0][-1] == 10
    described = models.describe(model)
    trained = sum(int(np.prod(x.shape)) for x in model.trainable_weights)
    assert described.parameters == trained
    assert "and shared" in described.parts[2].kind
    # Each token passes through K = 2 of 4 experts and both shared ones.
    unshared = models.describe(classifier(shared_experts=0, expert_mlp_dim=5))
    width = shapes[0][0]
    added = len(shapes) * (width * 10 + 10 + 10 * width + width)
    assert described.active_parameters - unshared.active_parameters == added


REPLICAS = """
import keras
import numpy as np
import tensorflow as tf
from keras_moe.routers import PathwayAwareRouter, TokenChoiceRouter

two = [tf.config.LogicalDeviceConfiguration()] * 2
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, two)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
tokens = np.eye(4, dtype="float32")[[[0, 0, 0, 1], [2, 2, 2, 3]]]
with strategy.scope():
    router = TokenChoiceRouter(
        4, 1, selection_bias_rate=0.25, dropless=True, kernel_initializer="identity"
    )
    router.build((None, None, 4))
parts = strategy.experimental_distribute_values_from_function(
    lambda context: tokens[context.replica_id_in_sync_group :][:1]
)
strategy.run(lambda part: (router(part, training=True), 0)[1], args=(parts,))
for value in router.selection_bias.value.values:
    np.testing.assert_array_equal(value, [-0.25, 0.25, -0.25, 0.25])
"""


@pytest.mark.every_backend
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tf.distribute")
def test_replicas_balance_by_the_load_of_all():
    done = run_python("-c", REPLICAS)
    assert done.returncode == 0, done.stderr
