"""Specialisation of experts in classes, as functions of accuracies and records.

Axes: E experts, C classes, B batch, N tokens.
"""

from typing import Any

import numpy as np


def accuracy_changes(accuracy: Any, ablated: Any) -> np.ndarray:
    """The fraction of each class's accuracy that is lost without each expert.

    `d_c = (y_c - y_c without the expert) / y_c`: 1 where all is lost, below 0 where the
    class does better. A class without a right prediction has nothing to lose: 0.

    Args:
        accuracy: (C,), accuracies of the whole model.
        ablated: (E, C), accuracies without each expert.

    Returns:
        float64 (E, C).

    Raises:
        ValueError: if the shapes do not fit.

    Reference:
        *Multilinear Mixture of Experts*, section 4.1.2.

    Example:

    >>> from keras_moe.analysis import accuracy_changes
    >>> accuracy_changes([0.8, 0.5], [[0.4, 0.5], [0.8, 0.0]]).tolist()
    [[0.5, 0.0], [0.0, 1.0]]
    """
    accuracy, ablated = np.asarray(accuracy, float), np.asarray(ablated, float)
    if accuracy.ndim != 1 or ablated.ndim != 2 or ablated.shape[1] != len(accuracy):
        raise ValueError(
            "Expected accuracies (classes,) and (experts, classes); "
            f"received: {accuracy.shape} and {ablated.shape}"
        )
    if not (np.isfinite(accuracy).all() and np.isfinite(ablated).all()):
        raise ValueError("Expected finite accuracies; received: NaN or inf")
    known = accuracy > 0
    return np.where(known, accuracy - ablated, 0.0) / np.where(known, accuracy, 1.0)


def class_polysemanticity(changes: Any) -> np.ndarray:
    """The distance of each expert from one that matters for one class alone.

    `p = |d - 1|_2` with the one-hot vector at the class that loses most: 0 where a
    single class loses all its accuracy and no other changes.

    Args:
        changes: (E, C), result of `accuracy_changes`.

    Returns:
        float64 (E,).

    Raises:
        ValueError: if the array is not (E, C).

    Reference:
        *Multilinear Mixture of Experts*, equation 4.

    Example:

    >>> from keras_moe.analysis import class_polysemanticity
    >>> class_polysemanticity([[0.0, 1.0], [0.4, 0.2], [1.0, 1.0]]).round(3).tolist()
    [0.0, 0.632, 1.0]
    """
    changes = np.asarray(changes, float)
    if changes.ndim != 2 or not changes.shape[1] or not np.isfinite(changes).all():
        raise ValueError(
            "Expected finite changes (experts, classes); received: "
            f"shape={changes.shape}, values={changes}"
        )
    only = np.eye(changes.shape[1])[changes.argmax(axis=1)]
    return np.linalg.norm(changes - only, axis=1)


def mean_polysemanticity(changes: Any) -> float | None:
    """The mean `class_polysemanticity` of the experts that matter.

    These are the experts whose ablation changes the accuracy of some class.

    Args:
        changes: (E, C), result of `accuracy_changes`.

    Returns:
        The mean, or None if no expert matters.

    Raises:
        ValueError: if the array is not (E, C).

    Reference:
        *Multilinear Mixture of Experts*, Figure 3.

    Example:

    >>> from keras_moe.analysis import mean_polysemanticity
    >>> mean_polysemanticity([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    0.5
    """
    scores = class_polysemanticity(changes)
    matters = np.any(np.asarray(changes) != 0, axis=1)
    return float(scores[matters].mean()) if matters.any() else None


def expert_load(routing: Any, threshold: float = 0.5) -> np.ndarray:
    """The number of tokens that each expert serves with a large coefficient.

    Args:
        routing: `Routing` of arrays (B, N, E), whose gates are the coefficients.
        threshold: lowest coefficient that counts.

    Returns:
        int (E,).

    Raises:
        ValueError: if the arrays are not (B, N, E), or the threshold is not in (0, 1].

    Reference:
        *Multilinear Mixture of Experts*, Figure 22.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import expert_load
    >>> from keras_moe.ops import Routing
    >>> gates = np.array([[[0.9, 0.1, 0.0]], [[0.5, 0.5, 0.0]]])
    >>> expert_load(Routing(*[gates] * 6)).tolist()
    [2, 1, 0]
    """
    gates = np.asarray(routing.gates)
    if gates.ndim != 3:
        raise ValueError(
            "Expected routing arrays of shape (batch, tokens, experts); "
            f"received: shape={gates.shape}"
        )
    if not 0 < threshold <= 1:
        raise ValueError(f"Expected 0 < threshold <= 1; received: {threshold!r}")
    return (gates >= threshold).sum(axis=(0, 1))
