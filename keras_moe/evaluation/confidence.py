"""What a classifier's confidence is worth: calibration, and unknown inputs.

Axes: N examples, C classes, B bins.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_moe._checks import check_integer, unfit
from keras_moe._types import Config
from keras_moe.evaluation._features import check_features, check_labels, to_numpy

if TYPE_CHECKING:
    from rich.table import Table

# How far the sum of a row of probabilities, in bfloat16 at worst, may be from 1.
_ROUNDING = 0.02


class CalibrationResult(NamedTuple):
    """How well a classifier's probabilities fit what happens.

    Attributes:
        nll: mean negative log-likelihood of the labels.
        ece: expected calibration error.
        brier: Brier score, the mean squared distance to one-hot labels, in [0, 2].
        counts: int (B,), number of examples by confidence.
        confidences: (B,), their mean confidence; 0 without examples.
        accuracies: (B,), share of them that is right; 0 without examples.
    """

    nll: float
    ece: float
    brier: float
    counts: np.ndarray
    confidences: np.ndarray
    accuracies: np.ndarray

    def table(self, title: str | None = None) -> "Table":
        """A table for `rich.print`, with one row per bin that has examples."""
        from rich.table import Table

        caption = f"NLL {self.nll:.4f}, ECE {self.ece:.2%}, Brier {self.brier:.4f}"
        table = Table(title=title, caption=caption)
        for column in ("examples", "confidence", "accuracy"):
            table.add_column(column, justify="right")
        for count, confidence, accuracy in zip(*self[3:]):
            if count:
                table.add_row(str(count), f"{confidence:.2%}", f"{accuracy:.2%}")
        return table

    def to_dict(self) -> Config:
        """Returns a JSON-serialisable dict."""
        return {name: np.asarray(x).tolist() for name, x in self._asdict().items()}


def calibration(
    probabilities: ArrayLike, labels: ArrayLike, num_bins: int = 15
) -> CalibrationResult:
    """Negative log-likelihood, expected calibration error and Brier score.

    The confidence of an example is its highest probability. With bins b of equal width,
    the expected calibration error is the sum of n_b / N |accuracy_b - confidence_b|.

    Args:
        probabilities: (N, C), whose rows sum to 1: the softmax of logits. For the
            likelihood, zeros count as 2.2e-16, as in scikit-learn.
        labels: (N,) integers in [0, C).
        num_bins: number of bins.

    References: *On Calibration of Modern Neural Networks*, section 2; *Verification of
        Forecasts Expressed in Terms of Probability* (Brier), equation 2.

    Example:

    >>> from keras_moe.evaluation import calibration
    >>> probabilities = np.array([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6], [0.4, 0.6]])
    >>> result = calibration(probabilities, [0, 1, 1, 1], num_bins=10)
    >>> round(result.ece, 9)  # half of |0.5 - 0.8| and of |1 - 0.6|
    0.35
    """
    probabilities = _check_probabilities("probabilities", probabilities)
    count, num_classes = probabilities.shape
    labels = check_labels("labels", labels, count, num_classes)
    num_bins = check_integer("num_bins", num_bins)
    confidences = probabilities.max(axis=1)
    is_right = probabilities.argmax(axis=1) == labels
    # Bins without their lower ends, as in the paper.
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    bins = np.clip(np.searchsorted(edges, confidences) - 1, 0, num_bins - 1)
    counts = np.bincount(bins, minlength=num_bins)
    means = [
        np.bincount(bins, values, num_bins) / np.maximum(counts, 1)
        for values in (confidences, is_right)
    ]
    ece = float((counts / count) @ np.abs(means[0] - means[1]))
    own = probabilities[np.arange(count), labels]
    nll = -np.log(np.clip(own, np.finfo("float64").eps, 1.0)).mean()
    # sum (p - y)^2 = sum p^2 - 2 p_label + 1
    brier = (np.square(probabilities).sum(axis=1) - 2 * own + 1).mean()
    return CalibrationResult(float(nll), ece, float(brier), counts, *means)


class OutOfDistributionResult(NamedTuple):
    """How well a score separates known inputs from others.

    Attributes:
        auroc: share of pairs of a known and another input of which the known one has
            the higher score, with half of those whose scores are equal.
        fpr_at_95_tpr: share of other inputs that pass a threshold which 95% of the
            known ones pass.
        threshold: that threshold, the highest one.
    """

    auroc: float
    fpr_at_95_tpr: float
    threshold: float

    def to_dict(self) -> Config:
        """Returns a JSON-serialisable dict."""
        return dict(self._asdict())


def out_of_distribution(
    in_scores: ArrayLike, out_scores: ArrayLike
) -> OutOfDistributionResult:
    """Measures how well a score tells inputs of the known classes from others.

    Args:
        in_scores: (N,) scores of inputs of the known classes, higher for what looks
            more familiar; or (N, C) probabilities, whose maximum is then the score.
        out_scores: (M,) or (M, C), the same for inputs of none of the classes.

    Reference: *A Baseline for Detecting Misclassified and Out-of-Distribution Examples
        in Neural Networks*, sections 2 and 3.

    Example:

    >>> from keras_moe.evaluation import out_of_distribution
    >>> out_of_distribution([0.9, 0.8, 0.7], [0.75, 0.2]).auroc  # 5 of 6 pairs
    0.8333333333333334
    """
    known, others = _scores("in_scores", in_scores), _scores("out_scores", out_scores)
    others = np.sort(others)
    lower = np.searchsorted(others, known, "left").sum()
    lower_or_equal = np.searchsorted(others, known, "right").sum()
    auroc = (lower + lower_or_equal) / (2 * len(known) * len(others))
    # The highest threshold that at least 95% of the known inputs reach.
    needed = -(-95 * len(known) // 100)
    threshold = np.sort(known)[len(known) - needed]
    return OutOfDistributionResult(
        float(auroc), float((others >= threshold).mean()), float(threshold)
    )


def _scores(name: str, scores: ArrayLike) -> np.ndarray:
    array = to_numpy(scores)
    if array.ndim == 2:
        return _check_probabilities(name, array).max(axis=1)
    if array.ndim != 1:
        expected = f"{name}, scores (examples,) or probabilities (examples, classes)"
        raise unfit(expected, shape=array.shape)
    return check_features(name, array[:, None])[:, 0]


def _check_probabilities(name: str, probabilities: ArrayLike) -> np.ndarray:
    """Checks that rows are probabilities; returns float64."""
    probabilities = check_features(name, probabilities)
    sums = probabilities.sum(axis=1)
    is_bad = (np.abs(sums - 1) > _ROUNDING) | (probabilities < 0).any(axis=1)
    if is_bad.any():
        row = int(is_bad.argmax())
        raise ValueError(
            f"Expected {name} of at least 0 whose rows sum to 1; received: "
            f"{is_bad.sum()} others, such as row {row} with sum={sums[row]:g} and "
            f"min={probabilities[row].min():g}"
        )
    return probabilities
