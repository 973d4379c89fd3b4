"""Tokens and outputs are checked against the shapes of their plan."""

from typing import Any

from keras import ops


def checked_tokens(tokens: Any, groups_and_tokens: Any) -> Any:
    """The tokens as a tensor.

    Args:
        tokens: (G, S, D).
        groups_and_tokens: (G, S) of the plan.

    Returns:
        `tokens` as a tensor.

    Raises:
        ValueError: if the shape is another one.
    """
    tokens = ops.convert_to_tensor(tokens)
    expected = tuple(groups_and_tokens)
    if len(tokens.shape) != 3 or not _fits(tokens.shape[:2], expected):
        raise ValueError(
            f"Expected tokens of shape (groups, tokens, dim) with {expected} first, as "
            f"in the plan; received: tokens.shape={tuple(tokens.shape)}"
        )
    return tokens


def checked_slots(outputs: Any, slots: Any) -> Any:
    """The outputs of experts with slots as a tensor.

    Args:
        outputs: (G, E, C, D).
        slots: (G, E, C) of the plan.

    Returns:
        `outputs` as a tensor.

    Raises:
        ValueError: if the shape is another one.
    """
    outputs = ops.convert_to_tensor(outputs)
    expected = tuple(slots)
    if len(outputs.shape) != 4 or not _fits(outputs.shape[:3], expected):
        raise ValueError(
            "Expected outputs of shape (groups, experts, capacity, dim) with "
            f"{expected} first, as in the plan; "
            f"received: outputs.shape={tuple(outputs.shape)}"
        )
    return outputs


def checked_rows(outputs: Any, rows: Any) -> Any:
    """The outputs of experts with rows as a tensor.

    Args:
        outputs: (R, D).
        rows: (R,) of the plan.

    Returns:
        `outputs` as a tensor.

    Raises:
        ValueError: if the shape is another one.
    """
    outputs = ops.convert_to_tensor(outputs)
    expected = tuple(rows)
    if len(outputs.shape) != 2 or not _fits(outputs.shape[:1], expected):
        raise ValueError(
            f"Expected outputs of shape (rows, dim) with {expected} first, as in "
            f"the plan; received: outputs.shape={tuple(outputs.shape)}"
        )
    return outputs


def _fits(shape, expected):
    # Sizes that TensorFlow does not know while it traces fit any other.
    return all(a == b or None in (a, b) for a, b in zip(shape, expected))
