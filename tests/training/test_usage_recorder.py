"""The use of experts over the last steps of training."""

import json

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.analysis import ExpertUsage, expert_usage, prune_experts, select_experts
from keras_moe.training import UsageRecorder
from tests.small_models import SMALL, images, with_weights

SHAPE = (6, 16, 8, 2)
LABELS = np.array([0, 1, 2, 0, 1, 2])

pytestmark = pytest.mark.usefixtures("op_by_op")


def classifier(**changes):
    sizes = {**SMALL, "router": "softmax_token_choice", "seed": 0, **changes}
    model = models.ViTImageClassifier(models.ViTBackbone.from_config(sizes), 3)
    with_weights(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def fit(model, *callbacks):
    return model.fit(
        images(*SHAPE), LABELS, batch_size=2, epochs=2, shuffle=False, verbose=0,
        callbacks=list(callbacks),
    ).history  # fmt: skip


def test_the_window_has_the_last_counts_and_training_is_the_same(tmp_path):
    recorder = UsageRecorder(
        images(*SHAPE), LABELS, ["a", "b", "c"], every=2, last=4, batch_size=4,
        path=tmp_path / "usage.json",
    )  # fmt: skip
    model, plain = classifier(), classifier()
    history, expected = fit(model, recorder), fit(plain)
    assert history["loss"] == expected["loss"]
    assert [record["step"] for record in recorder.records] == [2, 4, 6]
    assert 1 <= history["usage/experts"][-1] <= 4
    usage = recorder.usage
    assert usage.groups == ["a", "b", "c"]
    assert usage.to_dict() == ExpertUsage.load(tmp_path / "usage.json").to_dict()
    assert len(recorder.get_state()["counts"]) == 2
    kept = select_experts(usage, count=2, groups=["a", "b"])
    pruned = prune_experts(model, kept)
    assert pruned.predict(images(*SHAPE), verbose=0).shape == (6, 3)


def test_batches_follow_in_turn_and_count_like_a_pass():
    model = classifier()
    recorder = UsageRecorder(
        images(*SHAPE), LABELS, every=1, last=3, batch_size=4, training=False
    )
    recorder.set_model(model)
    for _ in range(3):
        recorder.measure()
    # Three batches of four are the six images twice.
    once = expert_usage(model, images(*SHAPE), LABELS, verbose=0).blocks["block_1"]
    actual = recorder.usage.blocks["block_1"]
    np.testing.assert_array_equal(actual.tokens, 2 * once.tokens)
    np.testing.assert_allclose(actual.mass, 2 * once.mass, rtol=1e-5)
    recorder.measure()
    assert recorder.usage.blocks["block_1"].tokens.sum() == actual.tokens.sum()


def test_a_run_goes_on_from_its_state():
    model = classifier()
    recorders = [
        UsageRecorder(images(*SHAPE), every=1, last=2, batch_size=4, training=False)
        for _ in range(2)
    ]
    first, second = recorders
    first.set_model(model)
    first.measure()
    first.measure()
    second.set_state(json.loads(json.dumps(first.get_state())))
    second.set_model(model)
    for recorder in recorders:
        recorder.measure()
    assert first.usage.to_dict() == second.usage.to_dict()


def test_routing_is_that_of_training():
    # Half of the choices find no slot.
    model = classifier(capacity_factor=0.5, noise_std=0.0)
    totals = []
    for training in (False, True):
        recorder = UsageRecorder(
            images(*SHAPE), every=1, batch_size=6, training=training
        )
        recorder.set_model(model)
        recorder.measure()
        totals.append(recorder.usage.blocks["block_1"].tokens.sum())
    assert totals[0] == 6 * 9 * 2
    assert totals[1] < 0.7 * totals[0]
