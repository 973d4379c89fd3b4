"""Few-shot linear evaluation of frozen features by ridge regression.

The protocol of V-MoE and ViT: draw k training examples per class, fit a linear map from
standardised features to targets of +-1, and report its accuracy on the test set.

Axes: N examples, F feature dim, C classes, L values of l2, k shots per class, R rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike
from rich.table import Table

from keras_moe._batches import progress_bar, read_batches
from keras_moe._checks import check_integer, unfit
from keras_moe._processes import predict_batch
from keras_moe._tables import numbers_table
from keras_moe._types import Config, KerasModel
from keras_moe.evaluation._features import check_features, check_labels, to_numpy

SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
# Value of the constant feature. It is so large that the penalty, which includes its
# weight, hardly shrinks the bias.
BIAS_CONSTANT = 100.0
STD_EPSILON = 1e-5
# The grid of V-MoE's configurations.
L2S = tuple(float(l2) for l2 in 2.0 ** np.arange(-10, 20))
# Number of test examples scored at a time.
_CHUNK = 2048


class FewShotResult(NamedTuple):
    """Accuracies of a few-shot evaluation, and their summary.

    Attributes:
        accuracies: (shots, seeds, l2s), test accuracies in [0, 1].
        shots: numbers of training examples per class.
        seeds: seeds of the draws.
        l2s: penalties.
        best_l2: (shots,), penalty chosen for each k.
        mean: (shots,), accuracy at the best l2, averaged over seeds.
        std: (shots,), its sample standard deviation over seeds; 0 for one seed.
    """

    accuracies: np.ndarray
    shots: tuple[int, ...]
    seeds: tuple[int, ...]
    l2s: tuple[float, ...]
    best_l2: np.ndarray
    mean: np.ndarray
    std: np.ndarray

    def table(self, title: str | None = None) -> Table:
        """A table for `rich.print`, with one row per k."""
        columns = zip(self.shots, self.mean, self.std, self.best_l2)
        rows = [
            (k, f"{mean:.2%}", f"{std:.2%}", f"{l2:g}") for k, mean, std, l2 in columns
        ]
        head = ("shots", "accuracy", "std", "best l2")
        return numbers_table(title, head, rows, texts=())

    def to_dict(self) -> Config:
        """Returns a JSON-serialisable dict."""
        return {name: np.asarray(x).tolist() for name, x in self._asdict().items()}


def sample_shots(
    labels: ArrayLike, shots: int, num_classes: int, seed: int = 0
) -> np.ndarray:
    """Returns indices (C * k,) of k examples of every class, ordered by class."""
    labels = check_labels("labels", labels, None, num_classes)
    shots = check_integer("shots", shots)
    counts = np.bincount(labels, minlength=num_classes)
    if counts.min() < shots:
        expected = f"at least shots={shots} examples of every class"
        raise unfit(expected, f"{counts.min()} of class {counts.argmin()}")
    rng = np.random.default_rng(seed)
    # All examples are permuted, whatever k is, so that draws of one seed are nested (1
    # shot within 5), as in V-MoE's evaluator.
    permuted = [
        rng.permutation(np.flatnonzero(labels == c)) for c in range(num_classes)
    ]
    return np.concatenate([indices[:shots] for indices in permuted])


def best_l2(accuracies: ArrayLike, l2s: ArrayLike) -> np.ndarray:
    """Returns the l2 of highest mean rank for each k, from (datasets, shots, L)."""
    accuracies, l2s = np.asarray(accuracies, "float64"), np.asarray(l2s, "float64")
    # As in V-MoE's evaluator, test accuracies choose; one fixed l2 avoids the optimism.
    # With the axis reversed and stable sorts, the earlier of two equal accuracies comes
    # last and ranks higher.
    order = accuracies[..., ::-1].argsort(axis=-1, kind="stable")
    ranks = order.argsort(axis=-1, kind="stable")[..., ::-1]
    return l2s[ranks.mean(axis=0).argmax(axis=-1)]


def few_shot(
    train_features: ArrayLike,
    train_labels: ArrayLike,
    test_features: ArrayLike,
    test_labels: ArrayLike,
    shots: Sequence[int] = SHOTS,
    *,
    l2s: ArrayLike = L2S,
    seeds: Sequence[int] = SEEDS,
    num_classes: int | None = None,
) -> FewShotResult:
    """Few-shot accuracy of frozen features, with l2 chosen by `best_l2` over the seeds.

    Args:
        train_features: (N, F), pool from which the shots are drawn.
        train_labels: (N,) integers in [0, num_classes).
        test_features: (M, F).
        test_labels: (M,) integers in [0, num_classes).
        shots: numbers k of training examples per class.
        l2s: positive penalties; by default V-MoE's 2^-10, ..., 2^19.
        seeds: seeds of the draws.
        num_classes: C; by default the highest label + 1.

    Example:

    >>> from keras_moe.evaluation import few_shot
    >>> labels = np.arange(40) % 2
    >>> features = np.random.default_rng(0).normal(size=(40, 3)) + 9 * labels[:, None]
    >>> few_shot(features, labels, features, labels, shots=(1, 5)).mean
    array([1., 1.])
    """
    shots = tuple(check_integer("shots", k) for k in shots)
    seeds = tuple(check_integer("seeds", seed, minimum=0) for seed in seeds)
    if not (shots and seeds):
        raise ValueError(f"Expected shots and seeds; received: {shots=}, {seeds=}")
    l2s = check_l2s(l2s)
    train_features = check_features("train_features", train_features)
    train_labels = check_labels("train_labels", train_labels, len(train_features))
    if num_classes is None:
        num_classes = int(max(train_labels.max(), to_numpy(test_labels).max())) + 1
    # Fails before the long sweep if k is too large.
    sample_shots(train_labels, max(shots), num_classes)
    accuracies = np.empty((len(shots), len(seeds), len(l2s)))
    for i, k in enumerate(shots):
        for j, seed in enumerate(seeds):
            drawn = sample_shots(train_labels, k, num_classes, seed)
            few = train_features[drawn], train_labels[drawn]
            accuracies[i, j] = few_shot_accuracies(
                *few, test_features, test_labels, num_classes, l2s
            )
    # Seeds play the part of data sets, as in V-MoE's evaluator.
    chosen = best_l2(accuracies.transpose(1, 0, 2), l2s)
    at_best = np.stack([a[:, l2s == l2][:, 0] for a, l2 in zip(accuracies, chosen)])
    std = at_best.std(axis=1, ddof=1) if len(seeds) > 1 else np.zeros(len(shots))
    mean = at_best.mean(axis=1)
    penalties = tuple(l2s.tolist())
    return FewShotResult(accuracies, shots, seeds, penalties, chosen, mean, std)


def extract_features(
    model: KerasModel | Callable,
    data: object,
    batch_size: int = 32,
    verbose: str | int = "auto",
) -> tuple[np.ndarray, np.ndarray]:
    """Features of images by a model, and the labels, for `few_shot` and its like.

    Args:
        model: `keras.Model` or callable, from images to features (batch, ...).
        data: arrays (images, labels), or an iterable of such batches, which is read
            once.
        batch_size: images per batch of arrays.
        verbose: 0 for nothing, 1 or `"auto"` for a progress bar, 2 for one line at its
            end.

    Returns: features (N, ...) and labels of all images, equal in all processes.

    Example:

    >>> from keras_moe.evaluation import extract_features, few_shot
    >>> labels = np.arange(20) % 2
    >>> images = np.ones((20, 4, 4, 1)) * (labels * 2 - 1)[:, None, None, None]
    >>> brightness = lambda images: images.mean(axis=(1, 2))
    >>> data = extract_features(brightness, (images, labels), verbose=0)
    >>> few_shot(*data, *data, shots=(1,)).mean
    array([1.])
    """
    batch_size = check_integer("batch_size", batch_size)
    batches, num_batches = read_batches(data, batch_size, "data")
    progress = progress_bar(num_batches, verbose, "batch")
    features, labels, size = [], [], 0
    for images, batch_labels in batches:
        # The tensors of tf.data may belong to another backend.
        images: Any = keras.tree.map_structure(to_numpy, images)
        # A model's prediction step is compiled; calling the model is not.
        if isinstance(model, keras.Model):
            size = max(size, len(keras.tree.flatten(images)[0]))
            output = predict_batch(model, images, size)
        else:
            output = model(images)
        features.append(keras.tree.map_structure(to_numpy, output))
        labels.append(to_numpy(batch_labels))
        progress.update(len(labels))
    if not labels:
        raise ValueError("Expected at least one image; received: none")
    if num_batches is None:
        progress.update(len(labels), finalize=True)
    whole: Any = keras.tree.map_structure(lambda *x: np.concatenate(x), *features)
    return whole, np.concatenate(labels)


def linear_probe(
    train_features: ArrayLike,
    train_labels: ArrayLike,
    test_features: ArrayLike,
    test_labels: ArrayLike,
    *,
    l2s: ArrayLike = L2S,
    num_classes: int | None = None,
) -> float:
    """Test accuracy of a linear classifier on all training examples.

    The classifier is a ridge regression. Its l2 is chosen on a fifth of the training
    examples, so the test set plays no part in it.

    Args:
        train_features, train_labels, test_features, test_labels, num_classes: as in
            `few_shot`, with N >= 2.
        l2s: positive penalties to choose from.

    Example:

    >>> from keras_moe.evaluation import linear_probe
    >>> labels = np.arange(40) % 2
    >>> features = np.random.default_rng(0).normal(size=(40, 3)) + 9 * labels[:, None]
    >>> linear_probe(features, labels, features, labels)
    1.0
    """
    features, l2s = check_features("train_features", train_features), check_l2s(l2s)
    labels = check_labels("train_labels", train_labels, len(features))
    if len(labels) < 2:
        raise unfit("at least 2 training examples", len(labels))
    if num_classes is None:
        num_classes = int(max(labels.max(), to_numpy(test_labels).max())) + 1
    order = np.random.default_rng(0).permutation(len(labels))
    held, rest = np.split(order, [max(len(order) // 5, 1)])
    fitted, measured = ((features[x], labels[x]) for x in (rest, held))
    accuracies = few_shot_accuracies(*fitted, *measured, num_classes, l2s)
    # Of equally good penalties, one in the middle.
    best = l2s[accuracies == accuracies.max()]
    data = features, labels, test_features, test_labels
    return float(few_shot_accuracies(*data, num_classes, best[[len(best) // 2]])[0])


# Ridge regression


def few_shot_accuracies(
    train_features: ArrayLike,
    train_labels: ArrayLike,
    test_features: ArrayLike,
    test_labels: ArrayLike,
    num_classes: int,
    l2s: np.ndarray | Sequence[float] = L2S,
) -> np.ndarray:
    """Returns test accuracies (L,) of ridge regression on all training examples."""
    mean, std, left, eigs, right = _decompose(train_features, train_labels, num_classes)
    test_features = check_features("test_features", test_features, mean.size)
    test_labels = check_labels(
        "test_labels", test_labels, len(test_features), num_classes
    )
    correct = np.zeros(len(l2s))
    for start in range(0, len(test_features), _CHUNK):
        labels = test_labels[start : start + _CHUNK]
        chunk = test_features[start : start + _CHUNK]
        rows = _standardise(chunk, mean, std) @ left
        for i, l2 in enumerate(l2s):
            scores = rows @ (right / (eigs + l2))
            correct[i] += (scores.argmax(axis=1) == labels).sum()
    return correct / len(test_features)


def _decompose(features, labels, num_classes):
    """Mean, std (F,), left (F + 1, R), eigs (R, 1) and right (R, C), for all l2."""
    # With X = [(features - mean) / (std + 1e-5), 100] and targets Y, 1 for the label's
    # class and -1 elsewhere, the weights are (X^T X + l2 I)^-1 X^T Y, which is
    # left (right / (eigs + l2)).
    features = check_features("train_features", features)
    labels = check_labels("train_labels", labels, len(features), num_classes)
    mean, std = features.mean(axis=0), features.std(axis=0) + STD_EPSILON
    x = _standardise(features, mean, std)
    if len(x) >= x.shape[1]:
        # X^T X = V diag(eigs) V^T: the weights are V (eigs + l2)^-1 V^T X^T Y.
        eigs, left = np.linalg.eigh(x.T @ x)
        right = left.T @ _targets_product(x, labels, num_classes)
    else:
        # X X^T = U diag(eigs) U^T: the same weights are X^T U (eigs + l2)^-1 U^T Y.
        eigs, vectors = np.linalg.eigh(x @ x.T)
        left = x.T @ vectors
        right = _targets_product(vectors, labels, num_classes)
    # Rounding may make zero eigenvalues negative.
    return mean, std, left, np.maximum(eigs, 0.0)[:, None], right


def _targets_product(
    rows: np.ndarray, labels: np.ndarray, num_classes: int
) -> np.ndarray:
    """rows^T Y (columns, C) for targets Y = 2 one_hot - 1, from sums by class."""
    sums = [rows[labels == c].sum(axis=0) for c in range(num_classes)]
    return 2 * np.stack(sums, axis=1) - rows.sum(axis=0)[:, None]


def _standardise(features: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    x = np.empty((len(features), features.shape[1] + 1))
    np.subtract(features, mean, out=x[:, :-1])
    x[:, :-1] /= std
    x[:, -1] = BIAS_CONSTANT
    return x


def check_l2s(l2s: ArrayLike) -> np.ndarray:
    """Checks that penalties are positive and finite; returns float64."""
    array = np.asarray(l2s, "float64")
    if array.ndim != 1 or not array.size or not np.all((array > 0) & (array < np.inf)):
        raise ValueError(f"Expected positive finite penalties; received: l2s={l2s}")
    return array
