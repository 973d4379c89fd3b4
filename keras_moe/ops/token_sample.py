"""A sample of the tokens, on which solvers of transport take their first steps.

Axes: G groups, S group_size.
"""

from typing import Any

from keras import ops

from keras_moe.ops.top_values import top_values

# Curvature is averaged over this many tokens: E or 2E numbers need no more.
SAMPLE = 1024


def sample_places(real: Any, num_tokens: Any, axis: int) -> Any:
    """The places of the sample's tokens, or None if all tokens are in it.

    Images lie in rows and columns, so a stride might see one column alone: multiples
    of the golden ratio fall evenly into every one. Padding comes last.
    """
    if isinstance(num_tokens, int) and num_tokens < 2 * SAMPLE:
        return None
    # 40503 / 2**16 is the golden ratio's fraction.
    score = ops.arange(num_tokens, dtype="int32") * 40503 % 65536
    score = ops.cast(score, "float32")
    score = ops.where(ops.squeeze(real, 3 - axis), score, score + 65536.0)
    size = SAMPLE if isinstance(num_tokens, int) else ops.minimum(SAMPLE, num_tokens)
    _, places = top_values(-score, size, stable=False)
    return ops.expand_dims(places, 3 - axis)


def sampled(values: Any, places: Any, axis: int) -> Any:
    """The sample's part of values."""
    if places is None:
        return values
    return ops.take_along_axis(values, places, axis=axis)
