"""Pairs of a batch that share their image or their caption with another pair."""

from typing import Any

from keras import ops


def count_duplicate_pairs(
    image_ids: Any = None, text_ids: Any = None, sample_weight: Any = None
) -> Any:
    """The number of pairs whose image or caption another pair of the batch has, too.

    A contrastive loss without `multi_positive` takes these others for negatives. The
    ids are sorted, and not compared with each other: memory is linear in the batch.

    Args:
        image_ids: int (B,), equal where pairs have one image; None if not known.
        text_ids: int (B,), equal where pairs have one caption; None if not known.
        sample_weight: float (B,), 0 for padding, which does not count.

    Returns:
        int32 scalar.

    Raises:
        ValueError: if there are neither image nor text ids.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import count_duplicate_pairs
    >>> int(count_duplicate_pairs(np.array([4, 9, 4, 2]), np.array([0, 1, 1, 3])))
    3
    """
    ids = [ops.convert_to_tensor(x) for x in (image_ids, text_ids) if x is not None]
    if not ids:
        raise ValueError(
            "Expected image_ids, text_ids or both; received: image_ids=None, "
            "text_ids=None"
        )
    if sample_weight is None:
        counted = ops.ones_like(ids[0], dtype="int32")
    else:
        counted = ops.cast(ops.convert_to_tensor(sample_weight) > 0, "int32")
    several = [_number_of_equals(x, counted) > 1 for x in ids]
    duplicate = several[0] if len(several) == 1 else ops.logical_or(*several)
    return ops.sum(ops.cast(duplicate, "int32") * counted)


def _number_of_equals(ids, counted):
    """How many ids that count are equal to each, int32 (B,)."""
    order = ops.argsort(ids)
    ordered = ops.take(ids, order)
    before = ops.cumsum(ops.take(counted, order))
    before = ops.concatenate([ops.zeros((1,), "int32"), before])
    ends = [ops.searchsorted(ordered, ids, side=side) for side in ("right", "left")]
    last, first = (ops.take(before, end) for end in ends)
    return last - first
