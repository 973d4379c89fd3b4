"""Zero-shot classification: images are compared with texts that name the classes.

Axes: N images, C classes, T templates, P embedding, K values of k.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_moe.evaluation.feature_checks import check_labels, check_real
from keras_moe.evaluation.similarities import (
    CHUNK_SIZE,
    check_embeddings,
    check_ks,
    count_before,
    norms,
    unit_vectors,
)

KS = (1, 5)


class ZeroShotResult(NamedTuple):
    """Accuracies of a zero-shot classification.

    Fields:
        ks: the values of k.
        accuracy: (K,), share of images whose class is among the k nearest.
        per_class: (C,), top-1 accuracy of each class's images; NaN for classes without
            images.
        ranks: int (N,), rank from 1 of each image's class.
    """

    ks: tuple[int, ...]
    accuracy: np.ndarray
    per_class: np.ndarray
    ranks: np.ndarray

    def figures(self) -> dict[str, float]:
        """The accuracies by name, such as `"top_5"`, for logs and JSON.

        `"mean_per_class"` is the mean of `per_class` over classes with images.
        """
        figures = {f"top_{k}": float(x) for k, x in zip(self.ks, self.accuracy)}
        return {**figures, "mean_per_class": float(np.nanmean(self.per_class))}


def class_embeddings(prompt_embeddings: Any) -> np.ndarray:
    """One vector for each class from the embeddings of its prompts.

    Each prompt's embedding is divided by its length, a class's are averaged, and the
    average is divided by its length, as in CLIP's classifier.

    Args:
        prompt_embeddings: (C, T, P), those of T templates for each class.

    Returns:
        Unit vectors, float64 (C, P).

    Raises:
        ValueError: if the shape is wrong, an embedding is not finite or 0, or those of
            a class cancel.

    Reference:
        *Learning Transferable Visual Models From Natural Language Supervision*, 3.1.4.

    Example:

    >>> from keras_moe.evaluation import class_embeddings
    >>> class_embeddings([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 3.0], [0.0, 1.0]]]).round(3)
    array([[0.707, 0.707],
           [0.   , 1.   ]])
    """
    prompts = check_real("prompt_embeddings", prompt_embeddings)
    if prompts.ndim != 3 or not prompts.size:
        raise ValueError(
            "Expected prompt_embeddings of shape (classes, templates, dim), none of "
            f"them 0; received: shape={prompts.shape}"
        )
    flat = check_embeddings("prompt_embeddings", prompts.reshape(-1, prompts.shape[2]))
    flat = flat.astype("float64")
    units = flat / norms(flat)[:, None]
    means = units.reshape(prompts.shape).mean(axis=1)
    lengths = norms(means)
    if not lengths.all():
        raise ValueError(
            "Expected prompts whose average has a direction; received: embeddings that "
            f"cancel, of class {int(np.flatnonzero(lengths == 0)[0])}"
        )
    return means / lengths[:, None]


def zero_shot(
    image_embeddings: Any,
    labels: Any,
    classes: Any,
    ks: Sequence[int] | None = None,
) -> ZeroShotResult:
    """Accuracy of taking the class whose embedding is nearest to an image's.

    Among equal cosine similarities the class with the lower number is nearer.

    Args:
        image_embeddings: (N, P), of any length other than 0.
        labels: (N,) integers in [0, C).
        classes: (C, P), as of `class_embeddings`.
        ks: values of k, none above C. None takes 1, and 5 where there are as many
            classes.

    Returns:
        A `ZeroShotResult`.

    Raises:
        ValueError: if embeddings have the wrong shape, are not finite or 0, if a label
            is out of range, or a k is above C.

    Example:

    >>> from keras_moe.evaluation import zero_shot
    >>> images = [[1.0, 0.1], [0.2, 1.0], [0.9, 0.0]]
    >>> result = zero_shot(images, [0, 1, 1], [[1.0, 0.0], [0.0, 1.0]], ks=(1, 2))
    >>> result.accuracy.round(2).tolist(), result.per_class.tolist()
    ([0.67, 1.0], [1.0, 0.5])
    """
    images = check_embeddings("image_embeddings", image_embeddings)
    classes = check_embeddings("classes", classes, images.shape[1])
    labels = check_labels("labels", labels, len(images), len(classes))
    if ks is None:
        ks = [k for k in KS if k <= len(classes)]
    ks = check_ks(ks, len(classes), "classes")
    units, ranks = unit_vectors(classes), np.ones(len(images), "int64")
    for start in range(0, len(images), CHUNK_SIZE):
        part = slice(start, start + CHUNK_SIZE)
        similarities = unit_vectors(images[part]) @ units.T
        own = np.take_along_axis(similarities, labels[part, None], axis=1)[:, 0]
        ranks[part] += count_before(similarities, own, labels[part])
    hits = np.bincount(labels, weights=ranks == 1, minlength=len(classes))
    with np.errstate(invalid="ignore"):
        per_class = hits / np.bincount(labels, minlength=len(classes))
    accuracy = np.array([np.mean(ranks <= k) for k in ks])
    return ZeroShotResult(ks, accuracy, per_class, ranks)
