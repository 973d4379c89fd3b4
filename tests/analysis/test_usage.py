"""The use of experts: by hand, by class, by modality, and what follows from it."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.analysis import (
    BlockUsage,
    ExpertUsage,
    expert_usage,
    merged_usage,
    prune_experts,
)
from keras_moe.analysis.usage import routing_usage
from keras_moe.ops import Routing
from tests.compare import to_numpy
from tests.pair_models import IDS, PAIRS, TEXTS, clip, limoe, text_of_modalities
from tests.refusals import refuses
from tests.small_models import classifier, images, with_weights

SHAPE = (5, 16, 8, 2)
LABELS = np.array([0, 1, 1, 2, 0])
pytestmark = pytest.mark.usefixtures("op_by_op")


@pytest.fixture(scope="module")
def model():
    return with_weights(classifier(moe_layers=[0, 1], router="softmax_token_choice"))


# Functions of arrays


def test_groups_and_masks_by_hand():
    served = np.zeros((2, 3, 2))
    served[0, :, 0], served[1, :2, 1] = 1.0, 1.0
    combined = served * np.array([[[0.5], [0.25], [1.0]]])
    record = Routing(*[np.full(served.shape, np.nan)] * 4, served, combined)
    usage = routing_usage(record)
    np.testing.assert_array_equal(usage.tokens, [[3, 2]])
    np.testing.assert_array_equal(usage.mass, [[1.75, 0.75]])
    usage = routing_usage(record, np.array([1, 0]), num_groups=3)
    np.testing.assert_array_equal(usage.tokens, [[0, 2], [3, 0], [0, 0]])
    by_token = np.array([[0, 1, -1], [1, 1, 0]])
    mask = np.array([[True, True, True], [True, False, True]])
    usage = routing_usage(record, by_token, mask=mask, contributions=4 * combined)
    np.testing.assert_array_equal(usage.tokens, [[1, 0], [1, 1]])
    np.testing.assert_array_equal(usage.contributions, [[2, 0], [1, 2]])


def test_files_and_sums(tmp_path):
    tokens = np.array([[1.0, 5.0], [0.0, 1.0]])
    block = BlockUsage(tokens, tokens / 2, first_choices=tokens + 1)
    usage = ExpertUsage(["image", "text"], {"block_1": block})
    usage.save(tmp_path / "usage.json")
    loaded = ExpertUsage.load(tmp_path / "usage.json")
    assert loaded.to_dict() == usage.to_dict()
    twice = merged_usage([usage, loaded]).blocks["block_1"]
    np.testing.assert_array_equal(twice.mass, tokens)
    assert twice.contributions is None


# Passes over data


def test_classes_are_counted_batch_by_batch(model):
    inputs = images(*SHAPE)
    usage = expert_usage(model, inputs, groups=LABELS, batch_size=2, verbose=0)
    assert usage.groups == ["0", "1", "2"]
    assert list(usage.blocks) == ["block_0", "block_1"]
    records = keras.Model(model.input, model.routing).predict(inputs, verbose=0)
    for name, block in usage.blocks.items():
        for label in range(3):
            own = records[name].dispatched[label == LABELS].sum(axis=(0, 1))
            np.testing.assert_array_equal(block.tokens[label], own)
        mass = records[name].combined.sum(axis=(0, 1))
        np.testing.assert_allclose(block.mass.sum(axis=0), mass, rtol=1e-5)
    batches = [(inputs[:3], LABELS[:3]), (inputs[3:], LABELS[3:])]
    again = expert_usage(
        model, iter(batches), "labels", group_names=["a", "b", "c"], verbose=0
    )
    assert again.groups == ["a", "b", "c"]
    both = (x.blocks["block_1"].tokens for x in (again, usage))
    np.testing.assert_array_equal(*both)


def test_contributions_are_weights_times_norms(model):
    inputs = images(*SHAPE)
    block = model.backbone.get_layer("block_1")
    experts = block.feed_forward.experts
    usage = expert_usage(model, inputs, contributions=True, verbose=0)
    tokens = keras.Model(model.input, block.input).predict(inputs, verbose=0)
    tokens = ops.convert_to_tensor(tokens)
    mixed = block.token_mixer(block.mixer_norm(tokens)) + tokens
    x = block.feed_forward_norm(mixed)
    combined = to_numpy(block.feed_forward(x)[1].combined)
    outputs = to_numpy(experts(ops.repeat(ops.expand_dims(x, 1), 4, axis=1)))
    norms = np.linalg.norm(outputs, axis=-1).transpose(0, 2, 1)
    actual = usage.blocks["block_1"].contributions[0]
    np.testing.assert_allclose(actual, (combined * norms).sum(axis=(0, 1)), rtol=1e-4)
    # The record is a record again.
    routing = block.feed_forward(x)[1]
    np.testing.assert_allclose(to_numpy(routing.affinity), to_numpy(routing.gates))


def test_pruned_experts_are_not_used(model):
    kept = {"block_0": [1, 2], "block_1": [0, 1, 3]}
    inputs = images(*SHAPE)
    pruned = [prune_experts(model, kept, "router_pred_skip", x) for x in (False, True)]
    usages = [expert_usage(x, inputs, contributions=True, verbose=0) for x in pruned]
    for name, experts in kept.items():
        # First choices are those of routers that still have all columns.
        for figure, other in zip(*(usage.blocks[name][:3] for usage in usages)):
            np.testing.assert_allclose(figure, other, rtol=1e-5)
            assert figure[0, experts].min() > 0
            assert figure.sum() == pytest.approx(figure[0, experts].sum())


def test_modalities_come_with_the_inputs():
    text, inputs = with_weights(text_of_modalities()), TEXTS | {"modality_ids": IDS % 2}
    groups = ("modality_ids", ["image", "text"])
    usage = expert_usage(text, inputs, *groups, mask="padding_mask", verbose=0)
    record = keras.Model(text.input, text.routing).predict(inputs, verbose=0)
    served = record["block_1"].dispatched
    for modality in (0, 1):
        own = (modality == IDS % 2) & (IDS != 0)
        np.testing.assert_array_equal(
            usage.blocks["block_1"].tokens[modality], served[own].sum(axis=0)
        )
    assert usage.blocks["block_1"].tokens.sum() == 11
    # K = 1, and padding is not routed: its gates are nobody's choice.
    usage = expert_usage(text, inputs, verbose=0).blocks["block_1"]
    np.testing.assert_array_equal(usage.first_choices, usage.tokens)


def test_records_of_a_shared_block_are_modalities():
    model = with_weights(limoe())
    usage = expert_usage(model, PAIRS, contributions=True, verbose=0)
    assert usage.groups == ["image", "text"]
    assert list(usage.blocks) == ["block_1"]
    records = keras.Model(model.input, model.routing).predict(PAIRS, verbose=0)
    served = [records[f"{x}/block_1"].dispatched for x in usage.groups]
    totals = [x.sum(axis=(0, 1)) for x in served]
    block = usage.blocks["block_1"]
    np.testing.assert_array_equal(block.tokens, totals)
    assert ((block.contributions > 0) == (block.tokens > 0)).all()
    for arguments, message in (
        ({"groups": IDS, "group_names": ["a", "b"]}, r"records are by modality"),
        ({"mask": "padding_mask"}, r"a dict of names .*mask='padding_mask'"),
    ):
        refuses(message, expert_usage, model, PAIRS, **arguments, verbose=0)
    mask = {"text": "padding_mask"}
    usage = expert_usage(model, PAIRS, mask=mask, verbose=0)
    expected = [totals[0], served[1][IDS != 0].sum(axis=0)]
    np.testing.assert_array_equal(usage.blocks["block_1"].tokens, expected)


def test_padding_of_two_towers():
    model = with_weights(clip())
    usage = expert_usage(model, PAIRS, mask={"text": "padding_mask"}, verbose=0)
    records = keras.Model(model.input, model.routing).predict(PAIRS, verbose=0)
    for name, record in records.items():
        kept = IDS != 0 if name.startswith("text") else slice(None)
        expected = record.dispatched[kept].reshape(-1, 4).sum(axis=0)
        np.testing.assert_array_equal(usage.blocks[name].tokens[0], expected)
    with pytest.raises(ValueError, match=r"a dict of names.*\['image', 'text'\]"):
        expert_usage(model, PAIRS, mask="padding_mask", verbose=0)
    options = {"mask": "padding_mask", "modality": "text", "verbose": 0}
    usage = expert_usage(model, PAIRS, **options).blocks
    expected = records["text/block_1"].dispatched[IDS != 0].sum(axis=0)
    np.testing.assert_array_equal(usage["text/block_1"].tokens[0], expected)
