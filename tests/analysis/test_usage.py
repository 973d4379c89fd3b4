"""The use of experts: by hand, by class, by modality, and what follows from it."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe import models
from keras_moe.analysis import (
    BlockUsage,
    ExpertUsage,
    expert_usage,
    mask_experts,
    merged_usage,
    prune_experts,
    routing_usage,
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


def test_broken_records_are_refused():
    with pytest.raises(ValueError, match=r"received: shape=\(2, 3\)"):
        routing_usage(Routing(*[np.ones((2, 3))] * 6))
    with pytest.raises(ValueError, match="finite mass"):
        routing_usage(Routing(*[np.ones((2, 3, 2))] * 5, np.full((2, 3, 2), np.nan)))


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
    np.testing.assert_array_equal(
        again.blocks["block_1"].tokens, usage.blocks["block_1"].tokens
    )


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


def test_a_model_with_nan_is_refused(model):
    broken = model.copy()
    broken.backbone.get_layer("block_0").feed_forward.router.kernel.assign(
        np.full((16, 4), np.nan)
    )
    with pytest.raises(ValueError, match="NaN"):
        expert_usage(broken, images(*SHAPE), verbose=0)
