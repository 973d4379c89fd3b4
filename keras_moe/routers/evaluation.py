"""Capacity at inference, and whether an image's result depends on its batch.

Axes: S group_size, E experts, C capacity.
"""

import warnings
from typing import Any

from keras_moe.checks import check_bool, check_integer, check_positive


def check_evaluation(
    eval_capacity_factor: Any, eval_capacity: Any, batch_invariant: Any
) -> bool:
    """Whether each image is a group at inference, from a router's arguments."""
    if eval_capacity_factor is not None:
        check_positive("eval_capacity_factor", eval_capacity_factor)
    if eval_capacity is not None:
        check_integer("eval_capacity", eval_capacity)
        if eval_capacity_factor is not None:
            raise ValueError(
                "Expected eval_capacity or eval_capacity_factor, not both; received: "
                f"eval_capacity={eval_capacity}, "
                f"eval_capacity_factor={eval_capacity_factor}"
            )
    if batch_invariant is not None:
        return check_bool("batch_invariant", batch_invariant)
    if eval_capacity is None and eval_capacity_factor is None:
        return True
    warnings.warn(
        f"eval_capacity_factor={eval_capacity_factor}, eval_capacity={eval_capacity} "
        "make the result of an image depend on the other images of its group at "
        "inference. Say so by batch_invariant=False of a router or "
        "evaluation='official' of a backbone; batch_invariant=True or "
        "evaluation='batch_invariant' limit the capacity within each image.",
        stacklevel=4,
    )
    return False
