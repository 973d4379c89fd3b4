"""Weights of pairs, which Keras knows for labels alone.

Axes: B pairs.
"""

from typing import Any

import numpy as np


def weighable_labels(inputs: Any, labels: Any, sample_weight: Any) -> Any:
    """Labels with which Keras hands on weights of arrays: without any it drops them.

    Args:
        inputs: dict of arrays (B, ...), or a dataset.
        labels: None, or a dict of ids.
        sample_weight: None, or weights (B,).

    Raises:
        ValueError: if there are more or fewer weights than pairs.

    Example:

    >>> import numpy as np
    >>> from keras_moe.models.pair_weights import weighable_labels
    >>> weighable_labels({"images": np.zeros((2, 8, 8, 3))}, None, np.ones(2))
    {'image_ids': array([0, 1])}
    """
    if sample_weight is None or not isinstance(inputs, dict):
        return labels
    number = len(next(iter(inputs.values())))
    if len(sample_weight) != number:
        raise ValueError(
            f"Expected a sample_weight for each of {number} pairs; received: "
            f"{len(sample_weight)}"
        )
    # Each pair has an image of its own.
    return {"image_ids": np.arange(number)} if labels is None else labels


def one_weight(sample_weight: Any) -> Any:
    """The weights of pairs, of which Keras makes equal ones for each kind of ids.

    Args:
        sample_weight: None, or float (B,), or a dict of such.
    """
    if isinstance(sample_weight, dict):
        return next(iter(sample_weight.values()))
    return sample_weight
