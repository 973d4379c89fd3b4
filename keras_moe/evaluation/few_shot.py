"""k-shot linear evaluation of frozen features by closed-form ridge regression.

The protocol of V-MoE and of the vision transformers: draw k training examples per
class, fit a linear map from standardised features to targets of +-1, and report the
accuracy of its argmax on the whole test set.

Axes: N examples, F feature dim, C classes, L values of l2, k shots per class.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe.checks import check_integer
from keras_moe.evaluation.feature_checks import check_features, check_labels
from keras_moe.evaluation.feature_extraction import extract_features
from keras_moe.evaluation.ridge_regression import L2S, check_l2s, few_shot_accuracies

SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)


class FewShotResult(NamedTuple):
    """Accuracies of a few-shot evaluation, and their summary.

    Fields:
        accuracies: (shots, seeds, l2s), test accuracies in [0, 1].
        shots: numbers of training examples per class.
        seeds: seeds of the draws.
        l2s: penalties.
        best_l2: (shots,), penalty chosen for each k; see `best_l2`.
        mean: (shots,), accuracy at the best l2, averaged over the seeds.
        std: (shots,), its sample standard deviation over the seeds; 0 for one seed.
    """

    accuracies: np.ndarray
    shots: tuple[int, ...]
    seeds: tuple[int, ...]
    l2s: tuple[float, ...]
    best_l2: np.ndarray
    mean: np.ndarray
    std: np.ndarray

    def table(self, title: str | None = None) -> Any:
        """A table for `rich.print` with a row for each k."""
        from rich.table import Table

        table = Table(title=title)
        for column in ("shots", "accuracy", "std", "best l2"):
            table.add_column(column, justify="right")
        for k, mean, std, l2 in zip(self.shots, self.mean, self.std, self.best_l2):
            table.add_row(str(k), f"{mean:.2%}", f"{std:.2%}", f"{l2:g}")
        return table

    def to_dict(self) -> dict[str, Any]:
        """The fields as lists and numbers that `json` can write."""
        return {name: np.asarray(getattr(self, name)).tolist() for name in self._fields}


def sample_shots(
    labels: Any, shots: int, num_classes: int, seed: int = 0
) -> np.ndarray:
    """Draws the same number of examples of every class.

    The draws of one seed are nested: those of 1 shot are among those of 5. They are
    the draws of V-MoE's evaluator for the same seed.

    Args:
        labels: (N,) integers in [0, num_classes).
        shots: k, examples per class.
        num_classes: C.
        seed: seed of the draw.

    Returns:
        (C * k,) distinct indices into `labels`, class after class.

    Raises:
        ValueError: if a class has fewer examples than `shots`, or a label is out of
            range.

    Example:

    >>> from keras_moe.evaluation import sample_shots
    >>> labels = [0, 1, 0, 1, 1, 0]
    >>> [labels[i] for i in sample_shots(labels, shots=2, num_classes=2, seed=0)]
    [0, 0, 1, 1]
    """
    labels = check_labels("labels", labels, None, num_classes)
    shots = check_integer("shots", shots)
    counts = np.bincount(labels, minlength=num_classes)
    if counts.min() < shots:
        poorest = int(counts.argmin())
        raise ValueError(
            f"Expected at least shots={shots} examples of every class; received: "
            f"{counts[poorest]} of class {poorest}, and too few of "
            f"{np.sum(counts < shots)} of {num_classes} classes"
        )
    rng = np.random.default_rng(seed)
    # All examples of a class are permuted, whatever k is: this nests the draws.
    permuted = [
        rng.permutation(np.flatnonzero(labels == c)) for c in range(num_classes)
    ]
    return np.concatenate([indices[:shots] for indices in permuted])


def best_l2(accuracies: Any, l2s: Sequence[float]) -> np.ndarray:
    """Chooses one l2 for each k, over all data sets (or seeds) together.

    In each data set the l2s are ranked by accuracy, and the first l2 with the highest
    mean rank wins, as in V-MoE's evaluator. The evaluator leaves the ranks of equal
    accuracies to NumPy's sort, which differs between processors; here the earlier l2
    ranks higher. The choice reads test accuracies: one l2 for all data sets limits its
    optimism, and a single fixed l2 avoids it.

    Args:
        accuracies: (datasets, shots, L).
        l2s: (L,) penalties.

    Returns:
        (shots,) the chosen penalties.

    Raises:
        ValueError: if the shapes do not fit.

    Example:

    >>> from keras_moe.evaluation import best_l2
    >>> best_l2([[[0.5, 0.6, 0.7]], [[0.1, 0.2, 0.9]]], l2s=[1.0, 2.0, 4.0])
    array([4.])
    """
    accuracies, l2s = np.asarray(accuracies, "float64"), np.asarray(l2s, "float64")
    if accuracies.ndim != 3 or l2s.shape != accuracies.shape[2:] or not accuracies.size:
        raise ValueError(
            "Expected accuracies (datasets, shots, l2s) and one l2 for each of the "
            f"last axis; received: accuracies.shape={accuracies.shape}, "
            f"l2s.shape={l2s.shape}"
        )
    # The axis is reversed and sorts are stable, so that the earlier of two equal
    # accuracies comes last and has the higher rank.
    order = accuracies[..., ::-1].argsort(axis=-1, kind="stable")
    ranks = order.argsort(axis=-1, kind="stable")[..., ::-1]
    return l2s[ranks.mean(axis=0).argmax(axis=-1)]


def few_shot(
    train_features: Any,
    train_labels: Any,
    test_features: Any,
    test_labels: Any,
    shots: Sequence[int] = SHOTS,
    l2s: Sequence[float] = L2S,
    seeds: Sequence[int] = SEEDS,
    num_classes: int | None = None,
) -> FewShotResult:
    """Few-shot accuracy of frozen features, for several k, penalties and draws.

    Args:
        train_features: (N, F), pool from which the shots are drawn.
        train_labels: (N,) integers in [0, num_classes).
        test_features: (M, F).
        test_labels: (M,) integers in [0, num_classes).
        shots: numbers k of training examples per class.
        l2s: positive penalties; by default 2^-10, 2^-9, ..., 2^19, the grid of the
            V-MoE configurations.
        seeds: seeds of the draws, one draw of the shots for each.
        num_classes: C; by default the highest label + 1.

    Returns:
        A `FewShotResult`. The l2 of each k is chosen by `best_l2` over the seeds.

    Raises:
        ValueError: if an array has the wrong shape or is not finite, if a label is
            out of range, if a class has fewer examples than the largest k, or if
            `shots`, `l2s` or `seeds` is empty.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import few_shot
    >>> labels = np.arange(40) % 2
    >>> features = np.random.default_rng(0).normal(size=(40, 3)) + 9 * labels[:, None]
    >>> result = few_shot(features, labels, features, labels, shots=(1, 5))
    >>> result.accuracies.shape
    (2, 3, 30)
    >>> result.mean
    array([1., 1.])
    """
    shots = tuple(check_integer("shots", k) for k in shots)
    seeds = tuple(check_integer("seeds", seed, minimum=0) for seed in seeds)
    l2s = check_l2s(l2s)
    if not shots or not seeds:
        raise ValueError(
            "Expected at least one number of shots and one seed; received: "
            f"shots={shots}, seeds={seeds}"
        )
    train_features = check_features("train_features", train_features)
    test_features = check_features(
        "test_features", test_features, train_features.shape[1]
    )
    train_labels = check_labels("train_labels", train_labels, len(train_features))
    test_labels = check_labels("test_labels", test_labels, len(test_features))
    if num_classes is None:
        num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    num_classes = check_integer("num_classes", num_classes)
    # Bad labels and a k that is too large are refused before the sweep, which is long.
    check_labels("train_labels", train_labels, None, num_classes)
    check_labels("test_labels", test_labels, None, num_classes)
    sample_shots(train_labels, max(shots), num_classes)

    accuracies = np.empty((len(shots), len(seeds), len(l2s)))
    for i, k in enumerate(shots):
        for j, seed in enumerate(seeds):
            drawn = sample_shots(train_labels, k, num_classes, seed)
            accuracies[i, j] = few_shot_accuracies(
                train_features[drawn],
                train_labels[drawn],
                test_features,
                test_labels,
                num_classes,
                l2s,
            )
    return _summarise(accuracies, shots, seeds, l2s)


def few_shot_from_model(
    model: keras.Model | Callable,
    train_data: Any,
    test_data: Any,
    shots: Sequence[int] = SHOTS,
    l2s: Sequence[float] = L2S,
    seeds: Sequence[int] = SEEDS,
    num_classes: int | None = None,
    batch_size: int = 64,
    verbose: int = 1,
) -> FewShotResult:
    """Few-shot accuracy of the features that a model extracts; see `few_shot`.

    Args:
        model: `keras.Model`, or any callable, from a batch of images, a NumPy array, to
            features (batch, F).
        train_data: tuple of arrays (images, labels), or an iterable of batches of them,
            such as a `tf.data.Dataset`, which is read once. Labels are integers.
        test_data: test set of the same form.
        shots: numbers k of training examples per class.
        l2s: positive penalties; by default 2^-10, ..., 2^19.
        seeds: seeds of the draws, one draw of the shots for each.
        num_classes: C; by default the highest label + 1.
        batch_size: number of images in a batch of arrays.
        verbose: 1 for a progress bar for each set, 2 for one line at its end, 0 for
            nothing.

    Returns:
        A `FewShotResult`.

    Raises:
        ValueError: if images or features are not finite (with their number and the
            first indices), if features are not of rank 2, if data has no end or no
            batches, or if an argument of `few_shot` is out of range.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import few_shot_from_model
    >>> labels = np.arange(20) % 2
    >>> images = np.ones((20, 4, 4, 1)) * (labels * 2 - 1)[:, None, None, None]
    >>> data = (images.astype("float32"), labels)
    >>> brightness = lambda images: images.mean(axis=(1, 2))
    >>> few_shot_from_model(brightness, data, data, shots=(1,), verbose=0).mean
    array([1.])
    """
    batch_size = check_integer("batch_size", batch_size)
    train = extract_features("train_data", model, train_data, batch_size, verbose)
    test = extract_features("test_data", model, test_data, batch_size, verbose)
    return few_shot(
        *train, *test, shots=shots, l2s=l2s, seeds=seeds, num_classes=num_classes
    )


def _summarise(accuracies, shots, seeds, l2s) -> FewShotResult:
    # A seed counts as a data set in the choice of l2, as in V-MoE's evaluator.
    chosen = best_l2(accuracies.transpose(1, 0, 2), l2s)
    at_best = np.stack([a[:, l2s == l2][:, 0] for a, l2 in zip(accuracies, chosen)])
    std = at_best.std(axis=1, ddof=1) if len(seeds) > 1 else np.zeros(len(shots))
    return FewShotResult(
        accuracies=accuracies,
        shots=shots,
        seeds=seeds,
        l2s=tuple(float(l2) for l2 in l2s),
        best_l2=chosen,
        mean=at_best.mean(axis=1),
        std=std,
    )
