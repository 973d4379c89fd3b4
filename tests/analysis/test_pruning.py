"""Which experts cover how much, and models whose experts are pruned."""

import functools
import json

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.analysis import (
    BlockUsage,
    ExpertUsage,
    ablate_experts,
    coverage_curves,
    expert_usage,
    merged_usage,
    prune_experts,
    select_experts,
)
from keras_moe.analysis.interventions import expert_scores
from keras_moe.analysis.usage import routing_usage
from keras_moe.ops import Routing
from keras_moe.routers._pruned import METHODS
from tests import small_models
from tests.compare import to_numpy
from tests.pair_models import IDS, MOE, PAIRS, TEXTS, clip, limoe, text_of_modalities
from tests.small_models import images, with_weights

mask_experts = functools.partial(prune_experts, removed=False)
PRUNINGS = (mask_experts, prune_experts)
SHAPE = (3, 16, 8, 2)
# Experts 2 and 3 have equal numbers of tokens.
HAND = ExpertUsage(
    ["image", "text"],
    {
        "block_1": BlockUsage(
            np.array([[1.0, 5.0, 2.0, 2.0], [0.0, 1.0, 9.0, 0.0]]),
            np.array([[0.5, 1.5, 1.8, 0.2], [0.0, 0.5, 4.5, 0.0]]),
            np.array([[4.0, 5.0, 1.0, 2.0], [0.0, 1.0, 1.0, 0.0]]),
        )
    },
)
KEPT = {"block_0": [1, 3, 4], "block_1": [0, 2]}

pytestmark = pytest.mark.usefixtures("op_by_op")


def classifier(**changes):
    sizes = {"moe_layers": [0, 1], "num_experts": 5, "router": "softmax_token_choice"}
    return with_weights(small_models.classifier(**{**sizes, **changes}))


def test_scores_by_hand():
    def scores(*arguments):
        return expert_scores(HAND, *arguments)["block_1"].tolist()

    assert scores("tokens") == [1, 6, 11, 2]
    assert scores("tokens", "text") == [0, 1, 9, 0]
    assert scores("mass", ["image"]) == [0.5, 1.5, 1.8, 0.2]
    # The rarest expert adds most to its tokens.
    assert scores("reap", "image") == [4.0, 1.0, 0.5, 1.0]
    assert scores("reap") == pytest.approx([4.0, 1.0, 2 / 11, 1.0])
    assert scores("reap", "text") == pytest.approx([0.0, 1.0, 1 / 9, 0.0])


@pytest.mark.parametrize(("options", "experts", "covered"), [
    ({}, [1, 2, 3, 0], [0.5, 0.7, 0.9, 1.0]),
    ({"by": "mass"}, [2, 1, 0, 3], [0.45, 0.825, 0.95, 1.0]),
    ({"criterion": "reap"}, [0, 1, 3, 2], [0.1, 0.6, 0.8, 1.0]),
])  # fmt: skip
def test_coverage_by_hand(options, experts, covered):
    curve = coverage_curves(HAND, groups="image", **options)["block_1"]
    np.testing.assert_array_equal(curve.experts, experts)
    np.testing.assert_allclose(curve.covered, covered)
    assert json.loads(json.dumps(curve.to_dict()))["experts"] == experts
    assert curve.needed(covered[2]) == 3


def test_coverage_of_first_choices_by_hand():
    # Three tokens prefer expert 0, which has room for one; K = 2.
    gates = np.array([[[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.5, 0.4, 0.1]]])
    served = np.array([[[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]])
    record = Routing(*[gates] * 4, served, served * gates)
    block = routing_usage(record)
    np.testing.assert_array_equal(block.first_choices, [[3, 0, 0]])
    usage = ExpertUsage(["all"], {"block_1": block})
    # Expert 1 served most, and without expert 0 no first choice is serviceable.
    curve = coverage_curves(usage, "first_choices")["block_1"]
    np.testing.assert_array_equal(curve.experts, [1, 0, 2])
    np.testing.assert_array_equal(curve.covered, [0, 1, 1])
    np.testing.assert_allclose(coverage_curves(usage)["block_1"].covered, [0.75, 1, 1])
    masked = routing_usage(record, mask=np.array([[True, True, False]]))
    np.testing.assert_array_equal(masked.first_choices, [[2, 0, 0]])
    again = ExpertUsage.from_dict(usage.to_dict())
    total = merged_usage([usage, again]).blocks["block_1"]
    np.testing.assert_array_equal(total.first_choices, [[6, 0, 0]])


def test_the_smallest_set_covers():
    def kept(**arguments):
        return select_experts(HAND, **arguments)["block_1"]

    assert kept(count=2) == [1, 2]
    assert kept(count={"block_1": 3}, groups="image") == [1, 2, 3]
    assert kept(count=1, criterion="reap") == [0]
    assert kept(coverage=0.7, groups="image") == [1, 2]
    assert kept(coverage=0.71, groups="image") == [1, 2, 3]
    assert kept(coverage=0.9, groups="text") == [2]
    assert kept(coverage=0.9, groups="text", minimum=2) == [1, 2]
    assert kept(coverage=1.0, groups="text") == [1, 2]
    assert kept(coverage=0.8, groups="image", criterion="mass") == [1, 2]
    assert kept(coverage=0.6, groups="image", criterion="reap") == [0, 1]


@pytest.fixture(scope="module")
def model():
    return classifier()


def outputs(model):
    return model.predict(images(*SHAPE), verbose=0)


def assert_close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(to_numpy(actual), to_numpy(expected), atol=atol)


@pytest.mark.parametrize("method", METHODS)
def test_the_smaller_saved_model_is_the_masked_one(model, method, tmp_path):
    masked = mask_experts(model, KEPT, method)
    pruned = prune_experts(model, KEPT, method)
    expected = outputs(masked)
    assert np.abs(expected - outputs(model)).max() > 1e-2
    assert_close(outputs(pruned), expected)
    pruned.save_to_preset(tmp_path / "pruned")
    loaded = models.from_preset(str(tmp_path / "pruned"))
    assert_close(outputs(loaded), expected)
    layers = [loaded.backbone.get_layer(name).feed_forward for name in KEPT]
    assert [layer.experts.num_experts for layer in layers] == [3, 2]
    moe = pruned.get_config()["backbone"]["config"]["moe"]
    expected = {"method": method, "kept_experts": KEPT, "removed": True}
    assert moe["pruning"] == expected
    # An expert has two kernels and two biases; a column of the router has 16 weights.
    expert, column = 16 * 32 * 2 + 32 + 16, 16 if method == "router_drop" else 0
    assert model.count_params() - loaded.count_params() == 5 * (expert + column)


@pytest.mark.parametrize("method", METHODS)
def test_the_papers_capacity_is_that_of_the_masked_model(model, method):
    whole = classifier(evaluation="official", capacity_factor=1.0)
    expected = outputs(mask_experts(whole, KEPT, method))
    assert_close(outputs(prune_experts(whole, KEPT, method)), expected)
    dropless = outputs(mask_experts(model, KEPT, method))
    assert np.abs(expected - dropless).max() > 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_a_pruned_model_can_be_pruned_further(model, method):
    at_once = prune_experts(model, {**KEPT, "block_0": [1, 4]}, method)
    once = prune_experts(model, KEPT, method)
    again = [0, 2] if method == "router_drop" else [1, 4]
    from_masked = prune_experts(
        mask_experts(model, KEPT, method), {"block_0": [1, 4]}, method
    )
    for other in (prune_experts(once, {"block_0": again}, method), from_masked):
        assert other.backbone.moe == at_once.backbone.moe
        assert_close(outputs(other), outputs(at_once), 1e-6)


MOEPP = {"num_experts": 3, "copy_experts": 1, "constant_experts": 2}
# FFN experts 0 to 2, a copy expert 3, and constant experts 4 and 5.
KEPT_MOEPP = {"block_0": [0, 2, 3, 5], "block_1": [1, 3, 4, 5]}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"evaluation": "official", "tau": 0.5}])
def test_moe_plus_plus_keeps_its_residuals(method, options, tmp_path):
    model = classifier(**MOEPP, **options)
    assert model.backbone.get_layer("block_1").feed_forward.router.gating_residual
    masked = mask_experts(model, KEPT_MOEPP, method)
    pruned = prune_experts(model, KEPT_MOEPP, method)
    expected = outputs(masked)
    assert np.abs(expected - outputs(model)).max() > 1e-2
    assert_close(outputs(pruned), expected)
    # Two FFN experts and one of three are left; the router keeps its columns.
    assert model.count_params() - pruned.count_params() == 3 * (16 * 32 * 2 + 48)
    further = prune_experts(pruned, {"block_0": [2, 3, 5]}, method)
    at_once = {**KEPT_MOEPP, "block_0": [2, 3, 5]}
    expected = outputs(prune_experts(model, at_once, method))
    np.testing.assert_allclose(outputs(further), expected, atol=1e-6)
    further.save_to_preset(tmp_path / "pruned")
    loaded = models.from_preset(str(tmp_path / "pruned"))
    np.testing.assert_allclose(outputs(loaded), expected, atol=1e-6)


@pytest.mark.parametrize("fields", [MOEPP, {}])
def test_the_experts_of_a_pruned_model_are_ablated(fields):
    model = classifier(**fields, moe_layers=[0, 1])
    kept = {"block_0": [0, 2], "block_1": [1, 2]}
    pixels = images(24, *model.input.shape[1:])

    def logits():
        pruned = prune_experts(model, kept, "router_pred")
        return pruned.predict(pixels, verbose=0)

    # Centred, so that no class is every image's.
    bias = model.weights[-1]
    bias.assign(bias - logits().mean(axis=0))
    labels = logits().argmax(axis=1)

    def ablated(prune, experts=None):
        smaller = prune(model, kept, "router_pred")
        return ablate_experts(smaller, pixels, labels, "all", experts, verbose=0)

    masked, pruned = ablated(mask_experts, [0, 1, 2]), ablated(prune_experts)
    assert pruned.experts.tolist() == [0, 1, 2]
    assert (masked.changes != 0).any()
    np.testing.assert_allclose(pruned.changes, masked.changes)


def test_texts_with_a_kernel_for_each_modality_are_pruned():
    model = with_weights(text_of_modalities())
    inputs = {**TEXTS, "modality_ids": IDS % 2}
    kept = {"block_1": [0, 2]}
    expected = mask_experts(model, kept)(inputs)["tokens"]
    pruned = prune_experts(model, kept)
    assert pruned.get_layer("block_1").feed_forward.router.kernel.shape == (2, 8, 2)
    assert_close(pruned(inputs)["tokens"], expected)


def test_a_pruned_model_trains_and_keeps_its_size(model):
    pruned = prune_experts(model, KEPT)
    pruned.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    kernel = pruned.backbone.get_layer("block_1").feed_forward.router.kernel
    before = to_numpy(kernel).copy()
    history = pruned.fit(images(*SHAPE), np.arange(3), batch_size=3, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert kernel.shape == (16, 2)
    assert np.abs(to_numpy(kernel) - before).max() > 0


def test_limoe_is_pruned_for_its_texts():
    model = with_weights(limoe({"num_experts": 6}))
    usage = expert_usage(model, PAIRS, mask={"text": "padding_mask"}, verbose=0)
    assert usage.groups == ["image", "text"]
    np.testing.assert_array_equal(usage.blocks["block_1"].tokens.sum(axis=1), [12, 11])
    kept = select_experts(usage, coverage=1.0, groups="text")
    assert len(kept["block_1"]) < 6
    masked, pruned = (f(model, kept, "router_pred_skip")(PAIRS) for f in PRUNINGS)
    for name, expected in masked.items():
        assert_close(pruned[name], expected)


def test_towers_are_pruned_by_modality():
    model = with_weights(clip({**MOE, "num_selected_experts": 1}))
    usage = expert_usage(model, PAIRS, verbose=0)
    assert list(usage.blocks) == ["image/block_1", "text/block_1"]
    used = np.argmax(usage.blocks["text/block_1"].tokens[0])
    kept = {"text/block_1": [e for e in range(4) if e != used][:2]}
    masked, pruned = (f(model, kept)(PAIRS) for f in PRUNINGS)
    whole = model(PAIRS)
    name = "text_embeddings"
    assert_close(pruned[name], masked[name])
    assert np.abs(to_numpy(whole[name] - pruned[name])).max() > 1e-3
    name = "image_embeddings"
    assert_close(pruned[name], whole[name], 1e-6)
