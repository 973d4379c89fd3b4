"""Weights of pairs, which Keras knows for labels alone.

Axes: B pairs.
"""

from typing import Any

import numpy as np


def weighable_labels(inputs: Any, labels: Any, sample_weight: Any) -> Any:
    """Labels with which Keras hands on weights of arrays: without any it drops them."""
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
    """The weights of pairs, of which Keras makes equal ones for each kind of ids."""
    if isinstance(sample_weight, dict):
        return next(iter(sample_weight.values()))
    return sample_weight
