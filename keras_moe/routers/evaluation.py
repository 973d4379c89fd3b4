"""Capacity at inference, and whether an image's result depends on its batch.

Axes: S group_size, E experts, C capacity.
"""

import warnings
from typing import Any

from keras_moe.checks import check_bool, check_integer, check_positive


def check_evaluation(
    eval_capacity_factor: Any, eval_capacity: Any, batch_invariant: Any
) -> bool:
    """Whether each image is a group at inference, from a router's arguments.

    Args:
        eval_capacity_factor: c at inference, or None.
        eval_capacity: C itself at inference, or None.
        batch_invariant: whether each image is a group at inference (True), or groups
            are those of training (False). None is True, unless there is a capacity of
            inference: then it is False, as in the papers' evaluation, with a warning.

    Returns:
        `batch_invariant`, which is no longer None.

    Raises:
        ValueError: if an argument is out of range, or there are both capacities.

    Example:

    >>> from keras_moe.routers.evaluation import check_evaluation
    >>> check_evaluation(None, None, None), check_evaluation(4.0, None, False)
    (True, False)
    """
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
