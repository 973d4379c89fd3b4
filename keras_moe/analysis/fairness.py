"""Fairness of a classifier: its accuracies for subpopulations.

Axes: B batch, Y values of the target, A values of the sensitive attribute.
"""

from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table


class FairnessMetrics(NamedTuple):
    """Accuracies by subpopulation, and the metrics made of them.

    Attributes:
        counts: (Y, A), numbers of images of the subpopulations.
        accuracies: (Y, A), accuracies of the subpopulations.
        accuracy: accuracy over all images.
        equality_of_opportunity: largest difference of the true positive rate between
            attributes; 0 is fair.
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
        """A JSON-serialisable dict."""
        arrays = {
            "counts": self.counts.tolist(),
            "accuracies": self.accuracies.tolist(),
        }
        return {**self._asdict(), **arrays}


def fairness_metrics(
    predictions: Any, targets: Any, attributes: Any, positive: int = 1
) -> FairnessMetrics:
    """Equality of opportunity, spread and worst case over subpopulations.

    A subpopulation has one value of the target and one of the attribute.

    Args:
        predictions: integers or booleans (B,), the predicted values of the target.
        targets: (B,), the true values of the target.
        attributes: (B,), the values of the sensitive attribute, such as 0 and 1.
        positive: value of the target whose rate equality of opportunity compares.

    Returns:
        `FairnessMetrics`.

    Raises:
        ValueError: if the arrays do not fit, or a subpopulation has no image.

    Reference:
        *Multilinear Mixture of Experts*, appendix J; *Equality of Opportunity in
        Supervised Learning*.

    Example:

    >>> from keras_moe.analysis import fairness_metrics
    >>> targets, attributes = [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1]
    >>> metrics = fairness_metrics([1, 1, 1, 0, 0, 0], targets, attributes)
    >>> metrics.accuracies.tolist(), metrics.equality_of_opportunity, metrics.max_min
    ([[1.0, 1.0], [1.0, 0.5]], 0.5, 0.5)
    """
    arrays = [_integers(x) for x in (predictions, targets, attributes)]
    shapes = [x.shape for x in arrays]
    if len(set(shapes)) > 1 or arrays[0].ndim != 1 or not arrays[0].size:
        raise ValueError(
            "Expected predictions, targets and attributes of one shape (batch,); "
            f"received: {shapes}"
        )
    predictions, targets, attributes = arrays
    positive = int(_integers(positive))
    if min(targets.min(), attributes.min()) < 0 or positive not in targets:
        raise ValueError(
            "Expected targets and attributes from 0 on, and the positive value among "
            f"the targets; received: targets {sorted(set(targets.tolist()))}, "
            f"attributes {sorted(set(attributes.tolist()))}, positive={positive}"
        )
    shape = (targets.max() + 1, attributes.max() + 1)
    if shape[0] * shape[1] > len(targets):
        raise ValueError(
            "Expected images of every subpopulation; received: "
            f"{len(targets)} images, targets up to {targets.max()} and attributes up "
            f"to {attributes.max()}"
        )
    counts, right = np.zeros(shape, int), np.zeros(shape, int)
    np.add.at(counts, (targets, attributes), 1)
    np.add.at(right, (targets, attributes), predictions == targets)
    if not counts.all():
        target, attribute = np.argwhere(counts == 0)[0]
        raise ValueError(
            "Expected images of every subpopulation; received: none with "
            f"target={target}, attribute={attribute}"
        )
    accuracies = right / counts
    rates = accuracies[positive]
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
    """Prints a table with a row for each model, like Table 2 of the paper.

    Args:
        metrics: dict from the name of a model to its `FairnessMetrics`.
        target: subpopulation that an edit was for: the values of the target and of the
            attribute.
        console: a rich console; None takes the terminal.

    Example:

    >>> from keras_moe.analysis import print_fairness
    >>> from rich.console import Console
    >>> print_fairness({}, (1, 1), console=Console(quiet=True))
    """
    table = Table(title="Fairness")
    table.add_column("model")
    for column in (
        "target subpopulation",
        "equality of opportunity",
        "STD bias",
        "max-min",
        "accuracy",
    ):
        table.add_column(column, justify="right")
    target = tuple(int(value) for value in target)
    for name, row in metrics.items():
        if any(not 0 <= i < size for i, size in zip(target, row.counts.shape)):
            raise ValueError(
                f"Expected a subpopulation of {row.counts.shape} values of target and "
                f"attribute; received: target={target}"
            )
        table.add_row(
            name,
            f"{row.accuracies[target]:.3f}",
            f"{row.equality_of_opportunity:.3f}",
            f"{row.std_bias:.3f}",
            f"{row.max_min:.3f}",
            f"{row.accuracy:.3f}",
        )
    (console or Console()).print(table)
