"""Contrastive accuracy: by hand, against brute force, and in `fit` and `evaluate`."""

import keras
import numpy as np
import pytest

from keras_moe.losses import SoftmaxContrastiveLoss
from keras_moe.models import ContrastiveAccuracy, ContrastiveModel
from tests.pair_models import FOUR, PAIRS, one_block
from tests.small_models import with_weights


def result(outputs, ids=None, weights=None, **options):
    metric = ContrastiveAccuracy(**options)
    metric.update_state(ids, outputs, weights)
    return float(metric.result())


def brute_force(outputs, ids, weights):
    """Image by image and text by text."""
    images, texts = outputs["image_embeddings"], outputs["text_embeddings"]
    total = 0.0
    counted = np.flatnonzero(weights)
    for i in counted:
        own = [
            j
            for j in counted
            if i == j or any(ids[name][i] == ids[name][j] for name in ids)
        ]
        others = [j for j in counted if j not in own]
        for x, y in ((images, texts), (texts, images)):
            x, y = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y))
            nearest = max((x[i] @ y[j] for j in others), default=-np.inf)
            total += weights[i] * 0.5 * (max(x[i] @ y[j] for j in own) > nearest)
    return total / weights.sum()


@pytest.mark.every_backend
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_equals_brute_force(chunk_size):
    draw = np.random.default_rng(0)
    images = draw.normal(size=(11, 3)).astype("float32")
    texts = (images + 0.6 * draw.normal(size=images.shape)).astype("float32")
    outputs = {"image_embeddings": images, "text_embeddings": texts}
    weights = np.array([1, 2, 1, 0, 1, 0.5, 1, 1, 0, 1, 1], "float32")
    ids = {
        "image_ids": np.array([0, 1, 2, 3, 0, 5, 6, 0, 8, 9, 10]),
        "text_ids": np.array([0, 1, 1, 3, 4, 5, 6, 7, 8, 9, 9]),
    }
    for some in ({}, ids):
        expected = brute_force(outputs, some, weights)
        assert 0.2 < expected < 0.9
        # NaN in padding is nobody's neighbour.
        outputs["text_embeddings"][3] = np.nan
        actual = result(outputs, some or None, weights, chunk_size=chunk_size)
        outputs["text_embeddings"][3] = 1.0
        assert actual == pytest.approx(expected, rel=1e-6)


def test_by_hand():
    x = np.eye(3, dtype="float32")
    # Two captions changed places, which are one caption by their ids.
    outputs = {"image_embeddings": x, "text_embeddings": x[[1, 0, 2]]}
    assert result(outputs) == pytest.approx(1 / 3)
    assert result(outputs, {"text_ids": np.array([5, 5, 7])}) == 1.0
    # A model that tells nothing apart.
    same = {name: np.ones((3, 2), "float32") for name in outputs}
    assert result(same) == 0.0
    # The mean over pairs, not over batches.
    metric = ContrastiveAccuracy()
    metric.update_state(None, outputs)
    metric.update_state(None, {name: x[:1] for name in outputs})
    assert float(metric.result()) == pytest.approx(2 / 4)
    again = ContrastiveAccuracy.from_config(ContrastiveAccuracy(7).get_config())
    assert (again.chunk_size, again.name) == (7, "contrastive_accuracy")


@pytest.mark.every_backend
def test_fit_and_evaluate_report_it(tmp_path):
    model = ContrastiveModel(with_weights(one_block("clip")))
    model.compile(
        keras.optimizers.SGD(0.0),
        SoftmaxContrastiveLoss(),
        metrics=[ContrastiveAccuracy()],
    )
    expected = result(model.predict(PAIRS, verbose=0))
    weights = np.array([1.0, 1.0, 1.0, 0.0])
    history = model.fit(
        FOUR,
        sample_weight=weights,
        validation_data=(FOUR, None, weights),
        batch_size=4,
        verbose=0,
    ).history
    assert set(history) == {
        "loss",
        "contrastive_accuracy",
        "val_loss",
        "val_contrastive_accuracy",
    }
    assert history["val_contrastive_accuracy"] == [pytest.approx(expected)]
    # The compiled state comes back with the model, and the metric is no weight of it.
    model.save(tmp_path / "pairs.keras")
    again = keras.saving.load_model(tmp_path / "pairs.keras")
    actual = again.evaluate(PAIRS, verbose=0, return_dict=True)
    assert actual["contrastive_accuracy"] == pytest.approx(expected)
    again.compile(loss=SoftmaxContrastiveLoss())
    assert set(again.evaluate(PAIRS, verbose=0, return_dict=True)) == {"loss"}
    twice = [ContrastiveAccuracy(), ContrastiveAccuracy(4)]
    with pytest.raises(ValueError, match="Expected each metric once"):
        again.compile(weighted_metrics=twice)
    with pytest.raises(ValueError, match="Expected a list of metrics"):
        again.compile(metrics=ContrastiveAccuracy())
    with pytest.raises(ValueError, match=r"the loss's; received: \['loss'\]"):
        again.compile(metrics=[ContrastiveAccuracy(name="loss")])
