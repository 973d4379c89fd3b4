"""What a classifier's confidence is worth.

Axes: N examples, C classes, B bins.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_moe._checks import check_integer
from keras_moe._types import Config
from keras_moe.evaluation._features import check_features, check_labels

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
    probabilities = _check_probabilities(probabilities)
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


def _check_probabilities(probabilities: ArrayLike) -> np.ndarray:
    probabilities = check_features("probabilities", probabilities)
    sums = probabilities.sum(axis=1)
    is_bad = (np.abs(sums - 1) > _ROUNDING) | (probabilities < 0).any(axis=1)
    if is_bad.any():
        row = int(is_bad.argmax())
        raise ValueError(
            "Expected probabilities of at least 0 whose rows sum to 1; received: "
            f"{is_bad.sum()} others, such as row {row} with sum={sums[row]:g} and "
            f"min={probabilities[row].min():g}"
        )
    return probabilities
