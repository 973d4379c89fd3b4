"""Specialisation and fairness. Axes: E experts, C classes, B batch, N tokens."""

from typing import Any

import numpy as np


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
