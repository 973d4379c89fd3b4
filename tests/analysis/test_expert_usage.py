"""The use of experts: by hand, by class, by modality, and what follows from it."""

import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe import models
from keras_moe.analysis import (
    BlockUsage,
    ExpertUsage,
    coverage_curves,
    expert_scores,
    expert_usage,
    mask_experts,
    merged_usage,
    plots,
    print_coverage,
    prune_experts,
    routing_usage,
    select_experts,
)
from keras_moe.analysis.usage import UsageProbe
from keras_moe.ops import Routing
from tests.small_models import SMALL, images, with_weights

to_numpy = ops.convert_to_numpy
SHAPE = (5, 16, 8, 2)
LABELS = np.array([0, 1, 1, 2, 0])
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

pytestmark = pytest.mark.usefixtures("op_by_op")


@pytest.fixture(scope="module")
def model():
    sizes = {**SMALL, "moe_layers": [0, 1], "router": "softmax_token_choice"}
    model = models.ViTImageClassifier(models.ViTBackbone.from_config(sizes), 3)
    return with_weights(model)


@pytest.fixture(scope="module")
def text():
    sizes = {
        "vocabulary_size": 20, "max_length": 5, "hidden_dim": 8, "num_layers": 2,
        "num_heads": 2, "mlp_dim": 16, "moe_layers": [1], "num_experts": 4,
        "num_selected_experts": 1, "num_modalities": 2, "pooling": "last",
    }  # fmt: skip
    return with_weights(models.TextBackbone.from_config(sizes))


def texts():
    ids = np.random.default_rng(0).integers(1, 20, (3, 5))
    mask = np.arange(5) < [[5], [3], [4]]
    return {"token_ids": ids, "padding_mask": mask, "modality_ids": ids % 2}


# Functions of arrays


@pytest.mark.backend_free
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


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": np.array([0, 2])}, "below num_groups=2"),
        ({"groups": np.array([0.5, 1.0])}, "dtype=float64"),
        ({"groups": np.array([0, 1, 1])}, r"shape=\(3,\)"),
        ({"mask": np.ones((2, 2))}, r"mask of shape \(2, 3\)"),
        ({"contributions": np.ones((2, 3))}, "contributions of shape"),
        ({"contributions": np.full((2, 3, 2), np.inf)}, "finite contributions"),
    ],
)
def test_records_that_do_not_fit_are_refused(arguments, message):
    record = Routing(*[np.ones((2, 3, 2))] * 6)
    with pytest.raises(ValueError, match=message):
        routing_usage(record, num_groups=2, **arguments)


@pytest.mark.backend_free
def test_broken_records_are_refused():
    with pytest.raises(ValueError, match=r"received: shape=\(2, 3\)"):
        routing_usage(Routing(*[np.ones((2, 3))] * 6))
    with pytest.raises(ValueError, match="finite mass"):
        routing_usage(Routing(*[np.ones((2, 3, 2))] * 5, np.full((2, 3, 2), np.nan)))


# Coverage and selection


@pytest.mark.backend_free
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


@pytest.mark.backend_free
def test_coverage_by_hand():
    curve = coverage_curves(HAND, groups="image")["block_1"]
    np.testing.assert_array_equal(curve.experts, [1, 2, 3, 0])
    np.testing.assert_allclose(curve.covered, [0.5, 0.7, 0.9, 1.0])
    curve = coverage_curves(HAND, "mass", "image")["block_1"]
    np.testing.assert_array_equal(curve.experts, [2, 1, 0, 3])
    np.testing.assert_allclose(curve.covered, [0.45, 0.825, 0.95, 1.0])
    curve = coverage_curves(HAND, groups="image", criterion="reap")["block_1"]
    np.testing.assert_array_equal(curve.experts, [0, 1, 3, 2])
    np.testing.assert_allclose(curve.covered, [0.1, 0.6, 0.8, 1.0])
    assert json.loads(json.dumps(curve.to_dict()))["experts"] == [0, 1, 3, 2]
    print_coverage({"block_1": curve})


@pytest.mark.backend_free
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
    with pytest.raises(ValueError, match="usage with first_choices"):
        coverage_curves(HAND, "first_choices")


@pytest.mark.backend_free
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


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "count=None, coverage=None"),
        ({"count": 1, "coverage": 0.5}, "either count or coverage"),
        ({"count": 0}, "count=0"),
        ({"count": 5}, "at most the 4 experts"),
        ({"count": {"block_2": 1}}, "count of 'block_2'"),
        ({"coverage": 0}, "coverage=0"),
        ({"coverage": 1.5}, "coverage=1.5"),
        ({"coverage": float("nan")}, "coverage=nan"),
        ({"count": 1, "criterion": "load"}, "criterion='load'"),
        ({"count": 1, "groups": "audio"}, "groups='audio'"),
        ({"count": 1, "groups": []}, "groups=\\[\\]"),
        ({"count": 1, "groups": ["text", "text"]}, "different groups"),
        ({"coverage": 0.5, "minimum": 0}, "minimum=0"),
    ],
)
def test_bad_selections_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        select_experts(HAND, **arguments)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("block", "message"),
    [
        (BlockUsage(np.zeros((1, 2)), np.zeros((1, 2))), "empty usage"),
        (BlockUsage(np.array([[1.0, np.nan]]), np.ones((1, 2))), "finite tokens"),
        (BlockUsage(np.array([[1.0, -1.0]]), np.ones((1, 2))), "negative"),
        (BlockUsage(np.ones((1, 2)), np.ones((1, 3))), "mass of block_1"),
        (BlockUsage(np.ones((2, 2)), np.ones((2, 2))), "each of the groups"),
        (BlockUsage(np.ones(2), np.ones(2)), "each of the groups"),
    ],
)
def test_usages_that_rank_nothing_are_refused(block, message):
    with pytest.raises(ValueError, match=message):
        select_experts(ExpertUsage(["all"], {"block_1": block}), count=1)


@pytest.mark.backend_free
def test_a_group_without_tokens_and_a_usage_without_norms_are_refused():
    block = BlockUsage(np.array([[1.0, 2.0], [0.0, 0.0]]), np.ones((2, 2)))
    usage = ExpertUsage(["image", "text"], {"block_1": block})
    with pytest.raises(ValueError, match="groups='text' without"):
        select_experts(usage, count=1, groups="text")
    with pytest.raises(ValueError, match="contributions=True"):
        select_experts(usage, count=1, criterion="reap")
    with pytest.raises(ValueError, match="at least one group and block"):
        select_experts(ExpertUsage([], {}), count=1)


@pytest.mark.backend_free
def test_files_and_sums(tmp_path):
    HAND.save(tmp_path / "usage.json")
    loaded = ExpertUsage.load(tmp_path / "usage.json")
    assert loaded.to_dict() == HAND.to_dict()
    twice = merged_usage([HAND, loaded])
    np.testing.assert_array_equal(
        twice.blocks["block_1"].mass, 2 * HAND.blocks["block_1"].mass
    )
    other = ExpertUsage(["image"], {"block_1": HAND.blocks["block_1"]})
    with pytest.raises(ValueError, match="same groups"):
        merged_usage([HAND, other])
    with pytest.raises(ValueError, match="at least one usage"):
        merged_usage([])
    for content in ("{", "[]", '{"groups": [], "blocks": {}}', '{"groups": [1]}'):
        (tmp_path / "usage.json").write_text(content)
        with pytest.raises(ValueError, match=r"usage\.json"):
            ExpertUsage.load(tmp_path / "usage.json")


@pytest.mark.backend_free
def test_the_picture_is_written(tmp_path):
    curves = {group: coverage_curves(HAND, groups=group) for group in HAND.groups}
    plots.plot_coverage(curves, tmp_path / "coverage.png")
    assert (tmp_path / "coverage.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="at least one group"):
        plots.plot_coverage({}, tmp_path / "none.png")
    plots.plot_expert_usage(HAND, tmp_path / "usage.png")
    assert (tmp_path / "usage.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="blocks="):
        plots.plot_expert_usage(ExpertUsage(["all"], {}), tmp_path / "none.png")


# Passes over data


@pytest.mark.backend_free
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
    np.testing.assert_array_equal(
        again.blocks["block_1"].tokens, usage.blocks["block_1"].tokens
    )


@pytest.mark.backend_free
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


@pytest.mark.backend_free
def test_pruned_experts_are_not_used(model):
    kept = {"block_0": [1, 2], "block_1": [0, 1, 3]}
    inputs = images(*SHAPE)
    usages = [
        expert_usage(
            f(model, kept, "router_pred_skip"), inputs, contributions=True, verbose=0
        )
        for f in (mask_experts, prune_experts)
    ]
    for name, experts in kept.items():
        # First choices are those of routers that still have all columns.
        for figure, other in zip(*(usage.blocks[name][:3] for usage in usages)):
            np.testing.assert_allclose(figure, other, rtol=1e-5)
            assert figure[0, experts].min() > 0
            assert figure.sum() == pytest.approx(figure[0, experts].sum())


@pytest.mark.backend_free
def test_modalities_come_with_the_inputs(text):
    inputs = texts()
    usage = expert_usage(
        text, inputs, "modality_ids", ["image", "text"], "padding_mask", verbose=0
    )
    record = keras.Model(text.input, text.routing).predict(inputs, verbose=0)
    served, ids = record["block_1"].dispatched, inputs["modality_ids"]
    for modality in (0, 1):
        own = (ids == modality) & inputs["padding_mask"]
        np.testing.assert_array_equal(
            usage.blocks["block_1"].tokens[modality], served[own].sum(axis=0)
        )
    assert usage.blocks["block_1"].tokens.sum() == 12
    # K = 1, and padding is not routed: its gates are nobody's choice.
    usage = expert_usage(text, inputs, verbose=0).blocks["block_1"]
    np.testing.assert_array_equal(usage.first_choices, usage.tokens)


class TwoModalities(keras.Model):
    """A text tower whose block has two records, as if of two modalities."""

    def __init__(self, backbone):
        super().__init__(backbone.inputs, backbone.outputs)
        self.tower = backbone
        record = backbone.routing["block_1"]
        self.routing = {
            "image/block_1": Routing(*(x[:, :2] for x in record)),
            "text/block_1": Routing(*(ops.copy(x) for x in record)),
        }

    @property
    def input(self):
        return self.tower.input

    def get_layer(self, name):
        return self.tower.get_layer(name.rpartition("/")[2])

    def get_config(self):
        return self.tower.get_config()


@pytest.mark.backend_free
def test_records_of_a_shared_block_are_modalities(text):
    inputs = texts()
    both = TwoModalities(text)
    usage = expert_usage(both, inputs, contributions=True, verbose=0)
    assert usage.groups == ["image", "text"]
    assert list(usage.blocks) == ["block_1"]
    record = keras.Model(text.input, text.routing).predict(inputs, verbose=0)
    served = record["block_1"].dispatched
    totals = [served[:, :2].sum(axis=(0, 1)), served.sum(axis=(0, 1))]
    np.testing.assert_array_equal(usage.blocks["block_1"].tokens, totals)
    with pytest.raises(ValueError, match="records of \\['image', 'text'\\]"):
        expert_usage(both, inputs, "modality_ids", ["a", "b"], verbose=0)
    with pytest.raises(ValueError, match=r"a dict of names .*mask='padding_mask'"):
        expert_usage(both, inputs, mask="padding_mask", verbose=0)
    # Any input that is 0 for tokens that do not count is a mask.
    usage = UsageProbe(both).count(inputs, mask={"text": "modality_ids"})
    counted = served[inputs["modality_ids"] == 1].sum(axis=0)
    np.testing.assert_array_equal(usage.blocks["block_1"].tokens, [totals[0], counted])


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": np.zeros((0, 16, 8, 2))}, "at least one batch"),
        ({"inputs": []}, "at least one batch"),
        ({"groups": np.array([0, 1])}, "one length"),
        ({"groups": "modality_ids"}, "group_names=None"),
        ({"groups": "labels", "group_names": ["a"]}, "only inputs"),
        ({"groups": "ids", "group_names": ["a"]}, "groups='ids'"),
        ({"mask": "padding_mask"}, "mask='padding_mask'"),
        ({"group_names": ["a"]}, "group_names=None without groups"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_bad_passes_are_refused(model, arguments, message):
    arguments = {"inputs": images(*SHAPE), **arguments}
    with pytest.raises(ValueError, match=message):
        expert_usage(model, verbose=0, **arguments)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router": "soft"}, "SoftRouter"),
        ({"router": "mumoe"}, "ExpertCoefficients"),
        ({"moe_layers": None}, "without"),
    ],
)
def test_other_mixtures_have_no_usage(changes, message):
    model = models.ViTBackbone.from_config({**SMALL, **changes})
    with pytest.raises(ValueError, match=message):
        UsageProbe(model)


@pytest.mark.backend_free
def test_a_model_with_nan_is_refused(model):
    broken = model.copy()
    broken.backbone.get_layer("block_0").feed_forward.router.kernel.assign(
        np.full((16, 4), np.nan)
    )
    with pytest.raises(ValueError, match="NaN"):
        expert_usage(broken, images(*SHAPE), verbose=0)
