"""Specialisation and fairness. Axes: E experts, C classes, B batch, N tokens."""

from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table


def accuracy_changes(accuracy: Any, ablated: Any) -> np.ndarray:
    """Lost fractions `(y_c - y_c without the expert) / y_c`, (E, C); 0 if y_c is 0."""
    accuracy, ablated = np.asarray(accuracy, float), np.asarray(ablated, float)
    is_finite = np.isfinite(accuracy).all() and np.isfinite(ablated).all()
    if accuracy.ndim != 1 or ablated.shape[1:] != accuracy.shape or not is_finite:
        raise ValueError(
            "Expected finite accuracies (classes,) and (experts, classes); "
            f"received: {accuracy} and {ablated}"
        )
    known = accuracy > 0
    return np.where(known, accuracy - ablated, 0.0) / np.where(known, accuracy, 1.0)


def class_polysemanticity(changes: Any) -> np.ndarray:
    """Measures how far each expert is from mattering for just one class, float64 (E,).

    `p = |d - 1|_2`, with the one-hot vector of the class that loses most: 0 if one
    class loses all its accuracy and no other class changes.

    Args:
        changes: (E, C), `ExpertAblation.changes`.

    Reference: *Multilinear Mixture of Experts*, equation 4.

    Example:

    >>> from keras_moe.analysis import class_polysemanticity
    >>> class_polysemanticity([[0.0, 1.0], [0.4, 0.2], [1.0, 1.0]]).round(3).tolist()
    [0.0, 0.632, 1.0]
    """
    changes = np.asarray(changes, float)
    if changes.ndim != 2 or not changes.shape[1] or not np.isfinite(changes).all():
        raise ValueError(
            f"Expected finite changes (experts, classes); received: {changes}"
        )
    only = np.eye(changes.shape[1])[changes.argmax(axis=1)]
    return np.linalg.norm(changes - only, axis=1)


def mean_polysemanticity(changes: Any) -> float | None:
    """Mean `class_polysemanticity` of the experts that change any accuracy, or None.

    Args:
        changes: (E, C), `ExpertAblation.changes`.

    Reference: *Multilinear Mixture of Experts*, Figure 3.

    Example:

    >>> from keras_moe.analysis import mean_polysemanticity
    >>> mean_polysemanticity([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    0.5
    """
    scores = class_polysemanticity(changes)
    matters = np.any(np.asarray(changes) != 0, axis=1)
    return float(scores[matters].mean()) if matters.any() else None


def expert_load(routing: Any, threshold: float = 0.5) -> np.ndarray:
    """Counts the tokens for which each expert has a large coefficient, int (E,).

    Args:
        routing: muMoE `Routing` of arrays (B, N, E); the gates are the coefficients.
        threshold: smallest coefficient that counts, in (0, 1].

    Reference: *Multilinear Mixture of Experts*, Figure 22.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import expert_load
    >>> from keras_moe.ops import Routing
    >>> gates = np.array([[[0.9, 0.1, 0.0]], [[0.5, 0.5, 0.0]]])
    >>> expert_load(Routing(*[gates] * 6)).tolist()
    [2, 1, 0]
    """
    gates = np.asarray(routing.gates)
    return (gates >= threshold).sum(axis=(0, 1))


class FairnessMetrics(NamedTuple):
    """Accuracies of subpopulations and fairness metrics.

    Attributes:
        counts: (Y target values, A attribute values), images per subpopulation.
        accuracies: (Y, A), accuracy per subpopulation.
        accuracy: accuracy over all images.
        equality_of_opportunity: largest difference in true positive rate between
            attribute values; 0 is fair.
        std_bias: standard deviation of the subpopulations' accuracies.
        max_min: lowest accuracy of a subpopulation.
    """

    counts: np.ndarray
    accuracies: np.ndarray
    accuracy: float
    equality_of_opportunity: float
    std_bias: float
    max_min: float

    def to_dict(self) -> dict:
        """Returns a JSON-serialisable dict."""
        arrays = {
            "counts": self.counts.tolist(),
            "accuracies": self.accuracies.tolist(),
        }
        return {**self._asdict(), **arrays}


def fairness_metrics(
    predictions: Any, targets: Any, attributes: Any, positive: int = 1
) -> FairnessMetrics:
    """Computes equality of opportunity, and spread and minimum of accuracies.

    A subpopulation is a pair of target and attribute value; each needs an image.

    Args:
        predictions: integers or booleans (B,), predicted values of the target.
        targets: (B,), true values of the target.
        attributes: (B,), values of the sensitive attribute, such as 0 and 1.
        positive: target value whose true positive rate is compared.

    Reference: *Multilinear Mixture of Experts*, appendix J; *Equality of Opportunity in
    Supervised Learning*.

    Example:

    >>> from keras_moe.analysis import fairness_metrics
    >>> targets, attributes = [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1]
    >>> metrics = fairness_metrics([1, 1, 1, 0, 0, 0], targets, attributes)
    >>> metrics.accuracies.tolist(), metrics.equality_of_opportunity, metrics.max_min
    ([[1.0, 1.0], [1.0, 0.5]], 0.5, 0.5)
    """
    arrays = [_integers(x) for x in (predictions, targets, attributes)]
    predictions, targets, attributes = arrays
    shapes = {x.shape for x in arrays}
    if len(shapes) > 1 or targets.ndim != 1 or not targets.size:
        raise ValueError(
            "Expected predictions, targets and attributes of one shape (batch,); "
            f"received: shapes {[x.shape for x in arrays]}"
        )
    if min(targets.min(), attributes.min()) < 0 or positive not in targets:
        raise ValueError(
            "Expected targets and attributes of at least 0, and the positive value "
            f"among the targets; received: targets {sorted(set(targets.tolist()))}, "
            f"attributes {sorted(set(attributes.tolist()))}, positive={positive}"
        )
    shape = (targets.max() + 1, attributes.max() + 1)
    counts, right = np.zeros(shape, int), np.zeros(shape, int)
    np.add.at(counts, (targets, attributes), 1)
    np.add.at(right, (targets, attributes), predictions == targets)
    if not counts.all():
        raise ValueError(
            "Expected images of every subpopulation; received: none of (target, "
            f"attribute) {tuple(np.argwhere(counts == 0)[0].tolist())}"
        )
    accuracies = right / counts
    rates = accuracies[int(positive)]
    return FairnessMetrics(
        counts,
        accuracies,
        float(right.sum() / counts.sum()),
        float(rates.max() - rates.min()),
        float(accuracies.std()),
        float(accuracies.min()),
    )


def _integers(values):
    values = np.asarray(values)
    if not np.issubdtype(values.dtype, np.integer) and values.dtype != bool:
        raise ValueError(
            f"Expected integers or booleans; received: dtype={values.dtype}"
        )
    return values.astype(int)


def print_fairness(
    metrics: dict[str, FairnessMetrics],
    target: tuple[int, int],
    console: Console | None = None,
) -> None:
    """Prints a table with one row per model, like Table 2 of the paper.

    Args:
        metrics: dict from model name to `FairnessMetrics`.
        target: subpopulation that was edited: its target and attribute values.
        console: rich console; None for the terminal.

    Example:

    >>> from keras_moe.analysis import print_fairness
    >>> from rich.console import Console
    >>> print_fairness({}, (1, 1), Console(quiet=True))
    """
    table = Table("model", title="Fairness")
    titles = (
        "target subpopulation",
        "equality of opportunity",
        "STD bias",
        "max-min",
        "accuracy",
    )
    for title in titles:
        table.add_column(title, justify="right")
    for name, row in metrics.items():
        numbers = (row.accuracies[tuple(target)], *row[3:], row.accuracy)
        table.add_row(name, *(f"{number:.3f}" for number in numbers))
    (console or Console()).print(table)
