"""Tokens and outputs are checked against the shapes of their plan."""

from typing import Any

from keras import ops


def checked_tokens(tokens: Any, groups_and_tokens: Any) -> Any:
    """The tokens as a tensor."""
    return _checked("tokens", tokens, ("groups", "tokens"), groups_and_tokens)


def checked_slots(outputs: Any, slots: Any) -> Any:
    """The outputs of experts with slots as a tensor."""
    return _checked("outputs", outputs, ("groups", "experts", "capacity"), slots)


def checked_rows(outputs: Any, rows: Any) -> Any:
    """The outputs of experts with rows as a tensor."""
    return _checked("outputs", outputs, ("rows",), rows)


def _checked(name, value, axes, sizes):
    """A tensor of the plan's sizes along the named axes, and of any size behind."""
    value = ops.convert_to_tensor(value)
    shape, expected = tuple(value.shape), tuple(sizes)
    # Sizes that TensorFlow does not know while it traces fit any other.
    if len(shape) != len(axes) + 1 or any(
        a != b and None not in (a, b) for a, b in zip(shape, expected)
    ):
        raise ValueError(
            f"Expected {name} of shape ({', '.join(axes)}, dim) with {expected} first, "
            f"as in the plan; received: {name}.shape={shape}"
        )
    return value
