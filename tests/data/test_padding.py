"""Full batches: the numbers of the examples alone."""

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.data import padded, padding, predictions
from tests.pair_models import limoe
from tests.refusals import refuses
from tests.small_models import SMALL, images, with_weights

# 11 images in batches of 4: the last has 3, with one copy that weighs nothing.
IMAGES = images(11, *SMALL["image_shape"])
LABELS = np.arange(11) % 3
WEIGHTS = np.linspace(0.5, 2, 11).astype("float32")


def classifier(**overrides):
    model = models.from_preset("vit_s16", num_classes=3, **{**SMALL, **overrides})
    metrics = keras.metrics
    weighted = [metrics.SparseCategoricalCrossentropy(from_logits=True)]
    weighted.append(metrics.SparseCategoricalAccuracy())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=None, weighted_metrics=weighted)
    return with_weights(model)


@pytest.fixture(scope="module")
def model():
    return classifier()


def dataset(*arrays, batch_size=4):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)


@pytest.mark.parametrize("arrays", [(IMAGES, LABELS), (IMAGES, LABELS, WEIGHTS)])
def test_loss_and_metrics_are_those_of_the_examples(model, arrays):
    keys = dict(zip(("sample_weight",), arrays[2:]))
    expected = model.evaluate(*arrays[:2], batch_size=4, verbose=0, **keys)
    for batches in (padded(*arrays, batch_size=4), padded(dataset(*arrays))):
        assert {len(part) for batch in batches for part in batch} == {4}
        actual = model.evaluate(batches, verbose=0)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_pairs_are_weighed_in_loss_and_metrics(traced):
    backbone = limoe(None, image_shape=SMALL["image_shape"], num_layers=1)
    model = with_weights(models.ContrastiveModel(backbone))
    model.compile(metrics=[models.ContrastiveAccuracy()])
    token_ids = np.random.default_rng(0).integers(1, 20, (11, 6))
    texts = {"token_ids": token_ids, "padding_mask": token_ids > 0}
    x, ids = {"images": IMAGES, **texts}, {"image_ids": np.arange(11)}
    options = {"batch_size": 4, "verbose": 0, "return_dict": True}
    first, last = (
        model.evaluate({name: part[rows] for name, part in x.items()}, **options)
        for rows in (slice(8), slice(8, None))
    )
    # Two batches of four pairs, and one of three.
    expected = {name: (8 * first[name] + 3 * last[name]) / 11 for name in first}
    assert abs(first["loss"] - last["loss"]) > 0.01
    batches = padded(x, ids, batch_size=4, model=model)
    actual = model.evaluate(batches, verbose=0, return_dict=True)
    assert actual == pytest.approx(expected, rel=1e-5)
    # Weights of one's own weigh pairs in the whole epoch.
    weights = np.array([1.0] * 8 + [0.0] * 3)
    actual = model.evaluate(x, ids, sample_weight=weights, **options)
    assert actual == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize(
    "make", [lambda: IMAGES, lambda: dataset(IMAGES, LABELS, batch_size=5)]
)
def test_predictions_have_no_padding(model, make):
    actual = predictions(model, make(), batch_size=4, verbose=0)
    expected = model.predict(IMAGES, batch_size=4, verbose=0)
    assert actual.shape == (11, 3)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_groups_of_real_images_are_as_they_were():
    capacity = {"eval_capacity_factor": 0.5, "evaluation": "official"}
    model = classifier(**capacity, examples_per_group=2)
    whole = model.predict(IMAGES[:10], batch_size=4, verbose=0)
    # Ten images: the last batch has a group of two, and a group of copies.
    actual = predictions(model, IMAGES[:10], batch_size=4, verbose=0)
    np.testing.assert_allclose(actual, whole, rtol=1e-5, atol=1e-6)
    # Eleven: the last of them shares its group with a copy.
    actual = predictions(model, IMAGES, batch_size=4, verbose=0)
    np.testing.assert_allclose(actual[:10], whole, rtol=1e-5, atol=1e-6)


def test_batch_sizes(model):
    def sizes(batches):
        return [len(batch[0]) for batch in batches]

    assert sizes(padded(dataset(IMAGES, LABELS))) == [4, 4, 4]
    assert sizes(padded(dataset(IMAGES, LABELS), batch_size=6)) == [6, 6]
    assert padded(dataset(IMAGES), num_examples=11).cardinality() == 3
    assert sizes(padded(IMAGES, LABELS, model=model)) == [11]
    # Metrics that would count the padding are refused.
    plain = models.from_preset("vit_s16", num_classes=3, **SMALL)
    refuses("weighted_metrics", padded, IMAGES, LABELS, model=plain)


def test_processes_make_equally_many_batches(monkeypatch):
    # Another process has 3 batches of 4 where this one has 5 examples.
    monkeypatch.setattr(padding, "checked_all_gather", lambda work: [work(), (3, 11)])
    batches = list(padded(IMAGES[:5], LABELS[:5], batch_size=4).as_numpy_iterator())
    weights = np.concatenate([batch[2] for batch in batches])
    assert weights.shape == (12,)
    # The mean over 3 x 4 x 2 places is that of 16 examples.
    np.testing.assert_allclose(weights[:5], 24 / 16)
    assert not weights[5:].any()
