"""Upcycling of models of pairs: one tower, both, or one for both modalities."""

import json

import keras
import numpy as np
import pytest
from rich.console import Console

from keras_moe import training
from keras_moe.models import ContrastiveModel, TextBackbone
from tests.pair_models import PAIRS, TEXT, clip, limoe
from tests.small_models import with_weights

pytestmark = pytest.mark.usefixtures("op_by_op")

BOTH = ("image/block_1", "text/block_1")


@pytest.fixture(scope="module")
def dense():
    keras.utils.set_random_seed(1)
    return {
        "clip": ContrastiveModel(with_weights(clip({}))),
        "limoe": with_weights(limoe(None)),
    }


def by_path(model):
    return {w.path: keras.ops.convert_to_numpy(w) for w in model.weights}


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("kind", "arguments", "blocks", "preserved"),
    [
        ("clip", {}, BOTH, (True, True)),
        ("clip", {"towers": ("image",)}, BOTH[:1], (True, True)),
        ("clip", {"preset": "clip_up", "towers": ("text",)}, BOTH[1:], (True, False)),
        ("clip", {"preset": "clip_up", "normalize_gates": True}, BOTH, (True, True)),
        ("limoe", {}, BOTH, (True, True)),
        ("limoe", {"preset": "clip_up"}, BOTH, (False, False)),
    ],
)
def test_the_function_is_preserved_by_modality(
    dense, kind, arguments, blocks, preserved
):
    model = dense[kind]
    before = by_path(model)
    sparse, report = training.upcycle(model, num_experts=4, images=PAIRS, **arguments)
    assert type(sparse) is type(model)
    assert report.blocks == blocks
    assert report.preserved == all(preserved)
    assert list(report.modalities) == ["image", "text"]
    for (name, each), same in zip(report.modalities.items(), preserved):
        assert each.preserved == same
        assert each.blocks == tuple(x for x in blocks if x.startswith(name))
        assert (each.largest_difference < 1e-4) == same
        assert (each.largest_token_difference < 1e-4) == same
    expected = max(each.largest_difference for each in report.modalities.values())
    assert report.largest_difference == expected
    assert report.dense_parameters == model.count_params()
    assert report.parameters == sparse.count_params() > report.dense_parameters
    after = by_path(sparse)
    for path, value in after.items():
        if "/moe/" not in path:
            np.testing.assert_array_equal(value, before[path], path)
    kernels = [path for path in after if path.endswith("experts/hidden_kernel")]
    assert len(kernels) == (1 if kind == "limoe" else len(blocks))
    for path in kernels:
        mlp = before[path.replace("moe/experts/hidden_kernel", "mlp/hidden/kernel")]
        np.testing.assert_array_equal(after[path], np.stack([mlp] * 4))


def test_each_tower_has_settings_of_its_own(dense):
    towers = {"image": {"num_experts": 3, "preset": "clip_up"}, "text": {}}
    sparse, report = training.upcycle(
        dense["clip"], num_experts=2, towers=towers, seed=5
    )
    config = sparse.backbone.get_config()
    assert [config[name]["moe"]["num_experts"] for name in towers] == [3, 2]
    assert [each.preserved for each in report.modalities.values()] == [False, True]
    # CLIP-UP routes padding.
    assert config["text"]["mask_padding"]
    routed, _ = training.upcycle(dense["clip"], num_experts=2, preset="clip_up")
    assert not routed.backbone.get_config()["text"]["mask_padding"]
    # Both towers follow from the pair's seed, and draw for themselves.
    assert [config["seed"], config["image"]["seed"], config["text"]["seed"]] == [
        5,
        None,
        None,
    ]
    # One tower after the other.
    first, _ = training.upcycle(dense["clip"], num_experts=2, towers=("image",))
    second, report = training.upcycle(first, num_experts=3, towers=["text"])
    assert report.blocks == BOTH[1:]
    assert list(second.backbone.routing) == list(BOTH)
    assert report.largest_difference < 1e-4
    with pytest.raises(ValueError, match=r"in \['image/block_1'\]"):
        training.upcycle(first)


def test_texts_alone_are_upcycled():
    dense = with_weights(TextBackbone(**TEXT))
    texts = {name: PAIRS[name] for name in ("token_ids", "padding_mask")}
    for arguments, preserved in (({}, True), ({"preset": "clip_up"}, False)):
        _, report = training.upcycle(dense, 4, images=texts, **arguments)
        assert report.blocks == ("block_1",)
        assert report.modalities == {}
        assert report.preserved == preserved
        assert (report.largest_difference < 1e-4) == preserved
        assert (report.largest_token_difference < 1e-4) == preserved


@pytest.mark.parametrize("kind", ["clip", "limoe"])
def test_the_optimizer_is_carried_over(kind):
    keras.utils.set_random_seed(1)
    dense = ContrastiveModel(clip({}) if kind == "clip" else limoe(None))
    dense.compile(keras.optimizers.AdamW(0.0123))
    dense.fit(PAIRS, verbose=0)
    sparse, report = training.upcycle(
        dense, num_experts=2, carry_optimizer=True, images=PAIRS
    )
    assert type(sparse.loss) is type(dense.loss)
    assert report.preserved
    assert report.largest_difference < 1e-4
    new, old = (
        {
            weight.path: keras.ops.convert_to_numpy(slot)
            for weight, slot in zip(
                model.trainable_variables, model.optimizer._momentums
            )
        }
        for model in (sparse, dense)
    )
    for path, value in new.items():
        if "/router/" in path:
            assert np.abs(value).max() == 0
            continue
        source = path.replace("moe/experts/hidden_", "mlp/hidden/")
        source = source.replace("moe/experts/output_", "mlp/output/")
        np.testing.assert_array_equal(
            value, np.broadcast_to(old[source], value.shape), path
        )
    assert any(np.abs(x).max() > 0 for path, x in new.items() if "experts" in path)
    slots = sum("/router/" not in path for path in new)
    # Two slots of each weight, the number of steps and the rate.
    assert report.slots == 2 * slots + 2
    sparse.fit(PAIRS, verbose=0)
    assert int(sparse.optimizer.iterations) == 2


def test_the_report_prints_and_is_plain_data(dense):
    _, report = training.upcycle(dense["clip"], num_experts=2, towers=("text",))
    console = Console(record=True, width=100)
    report.print(console)
    text = console.export_text()
    assert "text/block_1" in text
    assert "largest difference, image" in text
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["modalities"]["text"]["blocks"] == ["text/block_1"]
    assert plain["modalities"]["image"]["blocks"] == []
    assert plain["modalities"]["image"]["preserved"] is True
