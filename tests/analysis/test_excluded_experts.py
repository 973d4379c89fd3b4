"""Experts that routers no longer choose, one by one and by type."""

import keras
import numpy as np
import pytest

from keras_moe import analysis, models
from keras_moe.routers import PathwayAwareRouter, TokenChoiceRouter
from tests import small_models
from tests.compare import assert_same, to_numpy
from tests.small_models import images

SHAPE = (16, 8, 2)
CLASSES = 3
LABELS = np.arange(24) % CLASSES
BLOCKS = ("block_0", "block_1")
# FFN 0-2, zero 3, copy 4, constant 5 and 6.
TYPES = {
    "num_experts": 3, "zero_experts": 1, "copy_experts": 1, "constant_experts": 2,
    "gating_residual": True, "moe_layers": [0, 1], "num_layers": 2,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("op_by_op")


def classifier():
    made = small_models.classifier(router="softmax_token_choice", **TYPES)
    return small_models.with_weights(made)


def routing(model, inputs):
    record = keras.Model(model.input, model.routing).predict(inputs, verbose=0)
    return record["block_0"], record["block_1"]


@pytest.mark.parametrize("cls", [TokenChoiceRouter, PathwayAwareRouter])
@pytest.mark.parametrize("training", [False, True])
def test_tokens_of_an_excluded_expert_go_to_the_next_best(cls, training):
    tokens = np.random.default_rng(0).normal(size=(2, 6, 4)).astype("float32")
    options = {"num_selected_experts": 2, "noise_std": 0.0, "capacity_factor": 4.0}
    if cls is PathwayAwareRouter:
        options["copy_experts"] = 1
    whole, part = cls(5, **options), cls(5, excluded_experts=(4, 1), **options)
    whole.build(tokens.shape)
    part.build(tokens.shape)
    part.kernel.assign(whole.kernel)
    _, actual = part(tokens, training=training)
    logits = to_numpy(whole(tokens, training=training)[1].logits)
    np.testing.assert_allclose(to_numpy(actual.logits), logits, rtol=1e-6)
    kept = np.exp(logits[..., [0, 2, 3]])
    gates = np.zeros_like(logits)
    gates[..., [0, 2, 3]] = kept / kept.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(to_numpy(actual.gates), gates, rtol=1e-5, atol=1e-7)
    order = np.argsort(-gates, axis=-1)[..., :2]
    chosen = np.zeros_like(gates)
    np.put_along_axis(chosen, order, 1.0, axis=-1)
    np.testing.assert_array_equal(to_numpy(actual.dispatched), chosen)
    assert cls.from_config(part.get_config()).excluded_experts == (1, 4)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [
    {"affinity": "sparsity_constrained"},
    {"affinity": "sinkhorn", "noise_std": 1.0, "noisy_combine": False, "seed": 0},
])  # fmt: skip
def test_clean_combine_weights_are_of_the_experts_that_are_left(options, training):
    tokens = np.random.default_rng(0).normal(size=(2, 6, 4)).astype("float32")
    router = TokenChoiceRouter(
        4, num_selected_experts=1, capacity_factor=4.0, excluded_experts=(1,), **options
    )
    _, actual = router(tokens, training=training)
    kept = np.exp(to_numpy(actual.logits))
    kept[..., 1] = 0.0
    gates = kept / kept.sum(axis=-1, keepdims=True)
    served = to_numpy(actual.dispatched)
    np.testing.assert_allclose(to_numpy(actual.combined), gates * served, rtol=1e-5)


def test_excluded_experts_stay_excluded():
    once = analysis.exclude_experts(classifier(), ["zero", 1])
    twice = analysis.exclude_experts(once, "copy")
    excluded = [
        x.backbone.moe.router_arguments["excluded_experts"] for x in (once, twice)
    ]
    assert excluded == [[1, 3], [1, 3, 4]]


def test_types_are_excluded_from_a_model_that_is_saved(tmp_path):
    model = classifier()
    inputs = images(6, *SHAPE)
    before = [to_numpy(w) for w in model.weights]
    without = analysis.exclude_experts(model, ("zero", "constant", 1))
    for first, second in zip(routing(model, inputs), routing(without, inputs)):
        assert first.dispatched[..., [1, 3, 5, 6]].any()
        assert not second.dispatched[..., [1, 3, 5, 6]].any()
        np.testing.assert_allclose(second.dispatched.sum(axis=-1), 2.0)
    # The first block's logits are those of the whole model.
    np.testing.assert_allclose(
        routing(without, inputs)[0].logits, routing(model, inputs)[0].logits, rtol=1e-5
    )
    outputs = without.predict(inputs, verbose=0)
    assert np.abs(outputs - model.predict(inputs, verbose=0)).max() > 1e-4
    without.save_to_preset(tmp_path / "preset")
    again = models.from_preset(tmp_path / "preset")
    np.testing.assert_allclose(again.predict(inputs, verbose=0), outputs, atol=1e-6)
    assert_same(model.weights, before)


def shares(model, inputs):
    logits = model.predict(inputs, verbose=0)
    right = (logits.argmax(axis=1) == LABELS) & (np.ptp(logits, axis=1) > 0)
    return np.bincount(LABELS, right, CLASSES) / np.bincount(LABELS)


def test_every_type_is_ablated():
    model = classifier()
    inputs = images(24, *SHAPE)
    removed = ["zero", 4, "constant", ("zero", "copy", "constant"), "ffn", 0]
    actual = analysis.ablate_experts(
        model, inputs, LABELS, "all", experts=removed, verbose=0
    )
    assert actual.experts.tolist() == [
        "zero", "4", "constant", "zero + copy + constant", "ffn", "0",
    ]  # fmt: skip
    np.testing.assert_allclose(actual.accuracy, shares(model, inputs))
    for row, experts in enumerate(removed[:-1]):
        expected = shares(analysis.exclude_experts(model, experts), inputs)
        np.testing.assert_allclose(actual.ablated[row], expected)
    assert len(np.unique(actual.ablated, axis=0)) > 2
    # By its number an FFN expert is zeroed, and by choice its tokens go elsewhere.
    zeroed = classifier()
    for block in BLOCKS:
        experts = zeroed.backbone.get_layer(block).feed_forward.experts
        for variable in (experts.output_kernel, experts.output_bias):
            value = to_numpy(variable)
            variable.assign(np.concatenate([0 * value[:1], value[1:]]))
    np.testing.assert_allclose(actual.ablated[-1], shares(zeroed, inputs))
    by_choice = analysis.ablate_experts(
        model, inputs, LABELS, "all", experts=[0], removal="choice", verbose=0
    )
    expected = shares(analysis.exclude_experts(model, 0), inputs)
    np.testing.assert_allclose(by_choice.ablated[0], expected)
    # One block alone, and the model is whole again.
    one = analysis.ablate_experts(model, inputs, LABELS, "block_1", ["copy"], verbose=0)
    np.testing.assert_allclose(one.accuracy, shares(model, inputs))
