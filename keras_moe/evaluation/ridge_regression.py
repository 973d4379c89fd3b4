"""Linear classifiers by ridge regression in closed form, for many penalties at once.

Axes: N examples, F feature dim, C classes, L values of l2, R rank.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_moe.checks import check_integer
from keras_moe.evaluation.feature_checks import check_features, check_labels

# The feature appended to the standardised ones is so large that the penalty, which
# falls on its weight too, hardly shrinks the bias.
BIAS_CONSTANT = 100.0
STD_EPSILON = 1e-5
# The grid of the V-MoE configurations.
L2S = tuple(float(l2) for l2 in 2.0 ** np.arange(-10, 20))
# The number of test examples whose scores are held at once.
_CHUNK = 8192


class RidgeClassifier(NamedTuple):
    """A linear classifier on standardised features.

    Fields:
        mean: (F,), mean of the training features.
        std: (F,), population standard deviation of the training features + 1e-5.
        weights: (F + 1, C), or (L, F + 1, C) for several l2. The last row belongs to
            the constant feature 100.
    """

    mean: np.ndarray
    std: np.ndarray
    weights: np.ndarray

    def scores(self, features: Any) -> np.ndarray:
        """The classifier's outputs for features (N, F): (N, C), or (L, N, C)."""
        features = check_features("features", features, self.mean.size)
        return _standardise(features, self.mean, self.std) @ self.weights


def ridge_regression(
    train_features: Any,
    train_labels: Any,
    num_classes: int,
    l2: float | Sequence[float],
) -> RidgeClassifier:
    """Fits the linear classifier, in float64 and in closed form.

    Features become X = [(features - mean) / (std + 1e-5), 100], with the training
    set's mean and population standard deviation; targets Y are 1 for the label's
    class and -1 elsewhere. The weights are (X^T X + l2 I)^-1 X^T Y: the weight of the
    constant feature is penalised like the others. One decomposition, of the smaller of
    X^T X and X X^T, serves several values of l2. SciPy's is used where SciPy is
    installed, since it takes less time than NumPy's.

    Args:
        train_features: (N, F).
        train_labels: (N,) integers in [0, num_classes).
        num_classes: C.
        l2: positive penalty, or L of them.

    Returns:
        A `RidgeClassifier` with weights (F + 1, C), or (L, F + 1, C) if `l2` is a
        sequence.

    Raises:
        ValueError: if an array has the wrong shape or is not finite, if a label is
            out of range, or if an l2 is not positive.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import ridge_regression
    >>> features = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> ridge = ridge_regression(features, [0, 0, 1, 1], num_classes=2, l2=1.0)
    >>> ridge.weights.shape
    (2, 2)
    >>> ridge.scores([[0.5], [2.5]]).argmax(-1)
    array([0, 1])
    """
    l2s = check_l2s(np.atleast_1d(l2))
    data = _standardised(train_features, train_labels, num_classes)
    left, eigs, right = _decompose(data)
    weights = np.stack([left @ (right / (eigs + l2)) for l2 in l2s])
    return RidgeClassifier(data.mean, data.std, weights if np.ndim(l2) else weights[0])


def few_shot_accuracies(
    train_features: Any,
    train_labels: Any,
    test_features: Any,
    test_labels: Any,
    num_classes: int,
    l2s: Sequence[float] = L2S,
) -> np.ndarray:
    """Test accuracy of ridge regression on all training examples.

    Args:
        train_features: (N, F).
        train_labels: (N,) integers in [0, num_classes).
        test_features: (M, F).
        test_labels: (M,) integers in [0, num_classes).
        num_classes: C.
        l2s: L positive penalties.

    Returns:
        (L,) accuracies in [0, 1]. The first class with the highest score is predicted.

    Raises:
        ValueError: if an array has the wrong shape or is not finite, if a label is
            out of range, or if an l2 is not positive.

    Example:

    >>> from keras_moe.evaluation import few_shot_accuracies
    >>> few_shot_accuracies([[0.0], [1.0]], [0, 1], [[-1.0], [2.0]], [0, 1], 2, [0.1])
    array([1.])
    """
    l2s = check_l2s(l2s)
    data = _standardised(train_features, train_labels, num_classes)
    test_features = check_features("test_features", test_features, data.mean.size)
    test_labels = check_labels(
        "test_labels", test_labels, len(test_features), data.num_classes
    )
    if len(l2s) == 1:
        weights = _solve(data, l2s[0])
    else:
        left, eigs, right = _decompose(data)
    correct = np.zeros(len(l2s))
    for start in range(0, len(test_features), _CHUNK):
        labels = test_labels[start : start + _CHUNK]
        x = _standardise(test_features[start : start + _CHUNK], data.mean, data.std)
        # Either (M, F)(F, R) once and (M, R)(R, C) for each l2, or the weights
        # (F, R)(R, C) and (M, F)(F, C) for each: many l2 share the first.
        if len(l2s) == 1:
            correct += count_correct(x, weights, labels)
        elif len(x) < len(l2s) * data.num_classes:
            correct += _counts_of_sweep(x @ left, eigs, right, l2s, labels)
        else:
            correct += [
                count_correct(x, left @ (right / (eigs + l2)), labels) for l2 in l2s
            ]
    return correct / len(test_features)


def count_correct(left: np.ndarray, right: np.ndarray, labels: np.ndarray) -> int:
    """The number of rows of `left @ right` with the first maximum at the label."""
    return int(_decide(left, right, labels)[0].sum())


def _decide(
    left: np.ndarray, right: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Whether rows of `left @ right` have their first maximum at the label.

    The product is computed in float32, which takes half the time, and the rows that its
    rounding might decide are computed again in float64: the answer is that of float64.
    """
    if right.shape[1] == 1:
        return np.ones(len(left), bool), np.full(len(left), np.inf)
    # Infinite numbers and NaN are computed again, below.
    with np.errstate(over="ignore", invalid="ignore"):
        scores = left.astype("float32") @ right.astype("float32")
    places = np.arange(len(left)), labels
    own = scores[places]
    scores[places] = -np.inf
    with np.errstate(invalid="ignore"):
        lead = own - scores.max(axis=1)
    # A dot product of R terms in float32, of rounded factors and summed in any order,
    # is wrong by at most (R + 2) u |left| |right|, and two are compared. A tenth more
    # covers the terms of second order, and the last term numbers below the least.
    unit, tiny = np.finfo("float32").eps / 2, np.finfo("float32").tiny
    sizes = np.linalg.norm(left, axis=1)
    bound = unit * sizes * np.linalg.norm(right, axis=0).max() + tiny * (sizes + 1)
    margin = np.abs(lead) - 2.2 * (len(right) + 2) * bound
    is_open = ~((margin > 0) & np.isfinite(lead))
    is_correct = lead > 0
    is_correct[is_open] = (left[is_open] @ right).argmax(axis=1) == labels[is_open]
    return is_correct, np.where(is_open, 0.0, margin)


def _counts_of_sweep(
    left: np.ndarray,
    eigs: np.ndarray,
    right: np.ndarray,
    l2s: np.ndarray,
    labels: np.ndarray,
) -> np.ndarray:
    """`count_correct(left, right / (eigs + l2), labels)` for each l2: (L,).

    Most rows keep their answer from one l2 to the next: only those are computed again
    whose margin is smaller than a bound of the change of their scores.
    """
    # A positive factor for all scores does not matter: with this one they hardly change
    # where l2 is far from the eigenvalues. Nor does a number for all classes.
    typical = np.median(eigs)
    deviations = (right - right.mean(axis=1, keepdims=True)) ** 2
    with np.errstate(over="ignore"):
        squares = left**2
    counts, before = np.zeros(len(l2s)), None
    is_correct, margin = np.zeros(len(left), bool), np.zeros(len(left))
    for i in np.argsort(l2s):
        factor = (typical + l2s[i]) / (eigs + l2s[i])
        if before is not None:
            # The inequality of Cauchy and Schwarz, for both scores of a difference.
            change = np.abs(factor - before)
            largest = np.sqrt((deviations * change).sum(axis=0).max())
            margin -= 2.001 * np.sqrt(squares @ change)[:, 0] * largest
        before = factor
        # Infinite numbers and NaN have no margin.
        is_open = ~(margin > 0)
        is_correct[is_open], margin[is_open] = _decide(
            left[is_open], right * factor, labels[is_open]
        )
        counts[i] = is_correct.sum()
    return counts


class _Data(NamedTuple):
    """A training set, standardised."""

    mean: np.ndarray  # (F,)
    std: np.ndarray  # (F,)
    x: np.ndarray  # (N, F + 1)
    labels: np.ndarray  # (N,)
    num_classes: int


def _standardised(features: Any, labels: Any, num_classes: int) -> _Data:
    features = check_features("train_features", features)
    num_classes = check_integer("num_classes", num_classes)
    labels = check_labels("train_labels", labels, len(features), num_classes)
    mean, std = features.mean(axis=0), features.std(axis=0) + STD_EPSILON
    x = _standardise(features, mean, std)
    return _Data(mean, std, x, labels, num_classes)


def _solve(data: _Data, l2: float) -> np.ndarray:
    """The weights (F + 1, C) for one l2, which needs no decomposition."""
    x, penalty = data.x, l2 * np.eye(min(data.x.shape))
    if len(x) >= x.shape[1]:
        product = _targets_product(x, data.labels, data.num_classes)
        return np.linalg.solve(x.T @ x + penalty, product)
    targets = np.full((len(x), data.num_classes), -1.0)
    targets[np.arange(len(x)), data.labels] = 1.0
    return x.T @ np.linalg.solve(x @ x.T + penalty, targets)


def _decompose(data: _Data) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A solution for every l2: the weights are `left @ (right / (eigs + l2))`."""
    x = data.x
    if len(x) >= x.shape[1]:
        # X^T X = V diag(eigs) V^T: the weights are V (eigs + l2)^-1 V^T X^T Y.
        eigs, left = _eigh(x.T @ x)
        right = left.T @ _targets_product(x, data.labels, data.num_classes)
    else:
        # X X^T = U diag(eigs) U^T: the same weights are X^T U (eigs + l2)^-1 U^T Y.
        eigs, vectors = _eigh(x @ x.T)
        left = x.T @ vectors
        right = _targets_product(vectors, data.labels, data.num_classes)
    # Rounding may leave a zero eigenvalue negative and eigs + l2 near nothing.
    return left, np.maximum(eigs, 0.0)[:, None], right


def _eigh(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues and eigenvectors of a symmetric matrix."""
    # NumPy has one of LAPACK's drivers, which takes three times as long at 768.
    try:
        from scipy.linalg import eigh

        return eigh(matrix, driver="evr", check_finite=False)
    except (ImportError, np.linalg.LinAlgError):
        return np.linalg.eigh(matrix)


def _targets_product(
    rows: np.ndarray, labels: np.ndarray, num_classes: int
) -> np.ndarray:
    """rows^T Y, (columns, C), for the targets Y of +-1.

    Y is twice the one-hot labels less one: sums of the rows of each class, in the place
    of a matrix product.
    """
    order = np.argsort(labels, kind="stable")
    classes, starts = np.unique(labels[order], return_index=True)
    product = np.tile(-rows.sum(axis=0)[:, None], num_classes)
    product[:, classes] += 2 * np.add.reduceat(rows[order], starts, axis=0).T
    return product


def _standardise(features: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    x = np.empty((len(features), features.shape[1] + 1))
    np.subtract(features, mean, out=x[:, :-1])
    x[:, :-1] /= std
    x[:, -1] = BIAS_CONSTANT
    return x


def check_l2s(l2s: Any) -> np.ndarray:
    """Penalties as a float64 array, if they are positive and finite."""
    array = np.asarray(l2s, "float64")
    if array.ndim != 1 or not array.size or not np.all((array > 0) & (array < np.inf)):
        raise ValueError(f"Expected positive finite penalties; received: l2s={l2s}")
    return array
