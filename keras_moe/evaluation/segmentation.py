"""A linear probe of patch features: the classes of an image's pixels.

Axes: N images of H x W pixels, h x w patches, F feature dim, C classes.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from rich.table import Table

from keras_moe._checks import check_integer, unfit
from keras_moe._tables import numbers_table
from keras_moe._types import Config
from keras_moe.evaluation._features import check_features, check_labels, to_numpy
from keras_moe.evaluation.few_shot import L2S, check_l2s, chosen_l2, ridge_regression


class SegmentationResult(NamedTuple):
    """How well pixels are classified.

    Attributes:
        mean_iou: mean of `iou` over the classes that are there.
        iou: (C,), intersection over union of the pixels of each class; NaN for one that
            is neither in the labels nor predicted.
        pixel_accuracy: share of pixels whose class is right.
        confusion: int (C, C), number of pixels by label and prediction.
        l2: penalty of the ridge regression.
    """

    mean_iou: float
    iou: np.ndarray
    pixel_accuracy: float
    confusion: np.ndarray
    l2: float

    def table(self, title: str | None = None) -> Table:
        """A table for `rich.print`, with one row per class."""
        caption = f"mean {self.mean_iou:.2%}, pixel accuracy {self.pixel_accuracy:.2%}"
        columns = zip(self.iou, self.confusion.sum(axis=1))
        rows = [(i, f"{iou:.2%}", pixels) for i, (iou, pixels) in enumerate(columns)]
        head = ("class", "IoU", "pixels")
        return numbers_table(title, head, rows, texts=(), caption=caption)

    def to_dict(self) -> Config:
        """Returns a dict for JSON, with None as the IoU of absent classes."""
        iou = [None if np.isnan(x) else float(x) for x in self.iou]
        return {
            **self._asdict(),
            "iou": iou,
            "confusion": self.confusion.tolist(),
        }


def segmentation_probe(
    train_features: ArrayLike,
    train_masks: ArrayLike,
    test_features: ArrayLike,
    test_masks: ArrayLike,
    *,
    l2s: ArrayLike = L2S,
    num_classes: int | None = None,
    ignore_label: int | None = 255,
) -> SegmentationResult:
    """Mean IoU of a linear classifier of patches, with its scores scaled to pixels.

    The classifier is a ridge regression from each patch's features to the class that
    most of its pixels have. Its l2 is chosen on the patches of a fifth of the training
    images. Scores of test patches are interpolated bilinearly between the centres of
    patches, and the highest one is a pixel's class.

    Args:
        train_features: (N, h, w, F), such as `extract_features` gives of a backbone's
            features named `"grid"`.
        train_masks: (N, H, W) integers in [0, num_classes), or `ignore_label`; H and W
            are multiples of h and w.
        test_features, test_masks: the same for the test images.
        l2s: positive penalties to choose from.
        num_classes: C; by default the highest label + 1.
        ignore_label: label of pixels that do not count; None for no such label.

    References: *DINOv2*, section 7.4, whose linear classifier is trained by gradients;
        *The Pascal Visual Object Classes Challenge*, for the IoU.

    Example:

    >>> from keras_moe.evaluation import segmentation_probe
    >>> classes = np.random.default_rng(0).integers(2, size=(6, 4, 4))
    >>> masks = classes.repeat(8, axis=1).repeat(8, axis=2)
    >>> features = np.stack([classes, 1 - classes], axis=-1)
    >>> segmentation_probe(features, masks, features, masks).mean_iou > 0.7
    True
    """
    l2s = check_l2s(l2s)
    train = _check_grids("train_features", train_features)
    test = _check_grids("test_features", test_features, train.shape[-1])
    train_masks = _check_masks("train_masks", train_masks, train, ignore_label)
    test_masks = _check_masks("test_masks", test_masks, test, ignore_label)
    highest = int(max(train_masks.max(), test_masks.max()))
    if num_classes is None:
        num_classes = highest + 1
    if highest < 0 or highest >= check_integer("num_classes", num_classes):
        expected = f"labels of pixels in [0, {num_classes}), and at least one"
        raise unfit(expected, highest if highest >= 0 else "none")
    labels = patch_labels(train_masks, train.shape[1:3], num_classes)
    labelled = np.flatnonzero((labels >= 0).any(axis=(1, 2)))
    if len(labelled) < 2:
        raise unfit("at least 2 training images with labelled pixels", len(labelled))
    order = np.random.default_rng(0).permutation(labelled)
    held, rest = np.split(order, [max(len(order) // 5, 1)])
    # Patches of an image are alike, so whole images are held out.
    fitted, measured = (_labelled(train[x], labels[x]) for x in (rest, held))
    l2 = chosen_l2(fitted, measured, num_classes, l2s)
    classifier = ridge_regression(*_labelled(train, labels), num_classes, l2)
    confusion = np.zeros((num_classes, num_classes), "int64")
    for grid, mask in zip(test, test_masks):
        scores = classifier.scores(grid.reshape(-1, grid.shape[-1]))
        scores = resize(scores.reshape(*grid.shape[:2], num_classes), mask.shape)
        places = num_classes * mask + scores.argmax(axis=-1)
        counts = np.bincount(places[mask >= 0], minlength=confusion.size)
        confusion += counts.reshape(confusion.shape)
    right = confusion.diagonal()
    union = confusion.sum(axis=0) + confusion.sum(axis=1) - right
    if not union.any():
        raise ValueError("Expected labelled pixels in test_masks; received: none")
    iou = np.where(union > 0, right / np.maximum(union, 1), np.nan)
    accuracy = float(right.sum() / confusion.sum())
    return SegmentationResult(float(np.nanmean(iou)), iou, accuracy, confusion, l2)


def patch_labels(
    masks: np.ndarray, grid: tuple[int, ...], num_classes: int
) -> np.ndarray:
    """Labels (N, h, w) that most pixels of a patch have; -1 if none has a label."""
    # Of equally many, the lower label.
    rows, columns = (
        np.arange(size) // (size // patches)
        for size, patches in zip(masks.shape[1:], grid)
    )
    patches = rows[:, None] * grid[1] + columns
    labels = np.full((len(masks), grid[0] * grid[1]), -1)
    for mask, own in zip(masks, labels):
        places = patches * num_classes + mask
        counts = np.bincount(places[mask >= 0], minlength=own.size * num_classes)
        counts = counts.reshape(-1, num_classes)
        own[:] = np.where(counts.any(axis=1), counts.argmax(axis=1), -1)
    return labels.reshape(-1, *grid)


def resize(scores: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Interpolates (h, w, C) bilinearly between the centres of cells, to (H, W, C)."""
    rows, columns = map(_interpolation, scores.shape[:2], size)
    return np.einsum("yh,xw,hwc->yxc", rows, columns, scores, optimize=True)


def _interpolation(cells, pixels):
    """A matrix (pixels, cells) of weights; beyond the outer centres nothing changes."""
    places = (np.arange(pixels) + 0.5) * cells / pixels - 0.5
    distances = np.abs(np.clip(places, 0, cells - 1)[:, None] - np.arange(cells))
    return np.maximum(1 - distances, 0)


def _labelled(grids, labels):
    """Features (P, F) and labels (P,) of the patches that have one."""
    has_label = labels >= 0
    return grids[has_label], labels[has_label]


def _check_grids(name, features, dim=None) -> np.ndarray:
    """Checks that features (N, h, w, F) are finite; returns float64."""
    array = to_numpy(features)
    if array.ndim != 4:
        raise unfit(f"{name} of shape (images, rows, columns, dim)", shape=array.shape)
    flat = check_features(name, array.reshape(-1, array.shape[-1]), dim)
    return flat.reshape(array.shape)


def _check_masks(name, masks, grids, ignore_label) -> np.ndarray:
    """Checks labels (N, H, W) of pixels; returns int64, -1 where they do not count."""
    check_integer("ignore_label", ignore_label, minimum=-(2**31), optional=True)
    array, (count, rows, columns, _) = to_numpy(masks), grids.shape
    fits = array.ndim == 3 and len(array) == count and array.size
    if not fits or array.shape[1] % rows or array.shape[2] % columns:
        raise ValueError(
            f"Expected {name} of shape ({count}, height, width), multiples of the "
            f"{rows} x {columns} patches; received: shape={array.shape}"
        )
    ignored = False if ignore_label is None else array == ignore_label
    labels = check_labels(name, np.where(ignored, 0, array).ravel(), array.size)
    return np.where(ignored, -1, labels.reshape(array.shape))
