"""Linear segmentation: labels of patches, interpolation and IoU, against others'."""

import json

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.evaluation import extract_features, segmentation_probe
from keras_moe.evaluation.few_shot import ridge_regression
from keras_moe.evaluation.segmentation import patch_labels, resize


def test_labels_of_patches_by_hand():
    mask = np.array([[0, 1, 1, 2], [1, 1, -1, -1], [-1, -1, 2, 0], [-1, -1, 0, 2]])
    # Most; of 1 and 2 the lower; no label; of 0 and 2 the lower.
    assert patch_labels(mask[None], (2, 2), 3).tolist() == [[[1, 1], [-1, 0]]]
    assert patch_labels(mask[None], (4, 4), 3).tolist() == [mask.tolist()]


def test_scores_are_interpolated_as_by_torch():
    torch = pytest.importorskip("torch")
    scores = np.random.default_rng(0).normal(size=(3, 4, 2))
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(scores.transpose(2, 0, 1)[None]), (12, 20), mode="bilinear"
    )
    actual = resize(scores, (12, 20)).transpose(2, 0, 1)
    np.testing.assert_allclose(actual, expected[0].numpy(), atol=1e-12)


def scenes(count, seed):
    """Noisy features of the class of each of 4 x 5 patches, and masks of 8 x 15."""
    draw = np.random.default_rng(seed)
    classes = draw.integers(3, size=(count, 4, 5))
    features = np.eye(3)[classes] + 0.5 * draw.normal(size=(count, 4, 5, 3))
    masks = classes.repeat(2, axis=1).repeat(3, axis=2)
    masks[draw.uniform(size=masks.shape) < 0.2] = 255
    return features, masks


def test_mean_iou_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    (train, train_masks), (test, masks) = scenes(10, 0), scenes(4, 1)
    masks[masks == 2] = 255
    result = segmentation_probe(train, train_masks, test, masks, l2s=[4.0])
    # The same in steps.
    own = patch_labels(np.where(train_masks == 255, -1, train_masks), (4, 5), 3)
    chosen = own >= 0
    ridge = ridge_regression(train[chosen], own[chosen], 3, 4.0)
    scores = ridge.scores(test.reshape(-1, 3)).reshape(4, 4, 5, 3)
    predictions = np.stack([resize(x, (8, 15)) for x in scores]).argmax(axis=-1)
    counted = masks != 255
    pairs = masks[counted], predictions[counted]
    expected = metrics.jaccard_score(*pairs, labels=range(3), average=None)
    np.testing.assert_allclose(result.iou, expected, atol=1e-12)
    assert result.mean_iou == pytest.approx(expected.mean())
    np.testing.assert_array_equal(
        result.confusion, metrics.confusion_matrix(*pairs, labels=range(3))
    )
    assert result.pixel_accuracy == metrics.accuracy_score(*pairs)
    assert result.l2 == 4.0


def test_classes_that_are_not_there_do_not_count():
    classes = np.arange(12).reshape(3, 2, 2) % 2
    features, masks = np.eye(2)[classes], classes.repeat(2, axis=1).repeat(2, axis=2)
    masks[masks == 1] = 3
    result = segmentation_probe(features, masks, features, masks, num_classes=5)
    assert np.isnan(result.iou).tolist() == [False, True, True, False, True]
    assert result.mean_iou == np.mean(result.iou[[0, 3]])
    assert json.loads(json.dumps(result.to_dict()))["iou"][1] is None
    assert result.table().row_count == 5


@pytest.mark.every_backend
def test_bright_pixels_are_found_by_a_model():
    backbone = models.from_preset("vmoe_digits").backbone
    draw = np.random.default_rng(0)
    bright = draw.integers(2, size=(40, *backbone.grid))
    size = backbone.image_shape[0] // backbone.grid[0]
    masks = bright.repeat(size, axis=1).repeat(size, axis=2)
    images = (masks + 0.1 * draw.normal(size=masks.shape))[..., None]
    images = images.astype("float32")
    train, test = (images[:30], masks[:30]), (images[30:], masks[30:])
    grid = keras.Model(backbone.input, backbone.features["grid"])
    train, test = (extract_features(grid, x, verbose=0) for x in (train, test))
    result = segmentation_probe(*train, *test)
    assert result.pixel_accuracy > 0.8
