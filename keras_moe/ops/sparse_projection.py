"""The projection on plans of a given mass with few nonzeros.

Axes: G groups, n the bound side (experts or tokens), m the other side.
"""

from typing import Any

from keras import ops

from keras_moe.ops.empty import max_along, min_along
from keras_moe.ops.top_values import top_values

# Utilities below are forbidden. Far enough that no potential makes up for it.
FORBIDDEN = -1e4


def project(
    values: Any, allowed: Any, mass: Any, max_nonzeros: Any, guess: tuple | None = None
) -> Any:
    """Projects on plans of the given mass along the last axis, with few nonzeros.

    The result is the projection on the simplex of the largest `max_nonzeros` allowed
    entries. It has the gradient of a projection whose nonzeros are constant.
    """
    constant = ops.stop_gradient(values)
    threshold, offset, width = guess if guess is not None else (None, None, None)
    kept = allowed
    if max_nonzeros is not None:
        constant = ops.where(allowed, constant, -float("inf"))
        threshold = nonzero_threshold(constant, max_nonzeros, threshold, width)
        kept = _above(constant, threshold, max_nonzeros) & allowed
    offset, active = _offset(constant, kept, mass, offset)
    number = ops.sum(ops.cast(active, "float32"), axis=-1, keepdims=True)
    excess = ops.where(active, values - offset, 0.0)
    over = (ops.sum(excess, axis=-1, keepdims=True) - mass) / ops.maximum(number, 1.0)
    return ops.where(active, ops.relu(excess - over), 0.0)


def nonzero_threshold(
    values: Any, number: Any, guess: Any = None, width: Any = None
) -> Any:
    """A threshold with at most `number` values of a row above it.

    There are fewer only if values equal to the threshold fill up the rest.
    """
    if guess is None and isinstance(number, int) and number <= 4:
        # The largest of the rest, `number` times: a search is slow for many rows.
        threshold = max_along(values, axis=-1, keepdims=True)
        for _ in range(number - 1):
            below = values < threshold
            rest = ops.where(below, values, -float("inf"))
            rest = max_along(rest, axis=-1, keepdims=True)
            threshold = ops.where(_count(~below) < number, rest, threshold)
        return threshold
    if guess is None:
        size = values.shape[-1]
        if isinstance(number, int) and size is not None:
            number = min(number, size)
        else:
            number = ops.minimum(number, ops.shape(values)[-1])
        # The minimum of these: on JAX, slicing costs many times the search.
        return min_along(
            top_values(values, number, stable=False)[0], axis=-1, keepdims=True
        )

    # Bisection from the guess, in growing steps: the guess is nearly right.
    finite = ops.where(values > -float("inf"), values, float("inf"))
    low = min_along(finite, axis=-1, keepdims=True) - 1.0
    high = max_along(values, axis=-1, keepdims=True)
    empty = high < low
    low, high = ops.where(empty, 0.0, low), ops.where(empty, 0.0, high)
    all_fit = _count(values > low) <= number
    high = ops.where(all_fit, low, high)

    def unfinished(low, high, middle, above, stride):
        return ops.any((above != number) & (low < middle) & (middle < high))

    def halve(low, high, middle, above, stride):
        count = _count(values > middle)
        fits = count <= number
        low, high = ops.where(fits, low, middle), ops.where(fits, middle, high)
        above = ops.where(fits, count, above)
        half = low + 0.5 * (high - low)
        middle = ops.minimum(ops.maximum(half, middle - stride), middle + stride)
        return low, high, middle, above, 8 * stride

    middle = ops.minimum(ops.maximum(guess + ops.zeros_like(low), low), high)
    middle = ops.where((low < middle) & (middle < high), middle, 0.5 * (low + high))
    state = low, high, middle, _count(values > high), width
    return ops.while_loop(unfinished, halve, state)[1]


def _above(values, threshold, number):
    """The values above the threshold, and the first at it that fill up the number."""
    above = values > threshold
    equal = values == threshold
    missing = number - _count(above)
    index = ops.arange(ops.shape(values)[-1], dtype="int32")
    size = ops.shape(values)[-1]

    def unfinished(low, high):
        return ops.any(high - low > 1)

    def halve(low, high):
        middle = (low + high) // 2
        enough = _count(equal & (index < middle)) >= missing
        return ops.where(enough, low, middle), ops.where(enough, middle, high)

    # Ties are rare: without any that must be split, there is nothing to loop over.
    split = (missing > 0) & (_count(equal) > missing)
    low = ops.zeros_like(missing)
    _, high = ops.while_loop(unfinished, halve, (low, ops.where(split, size, low)))
    all_equal = (missing > 0) & ~split
    return above | (equal & (all_equal | (index < high)))


def _offset(values, kept, mass, guess=None):
    """The offset below the kept values at which the rest has the given mass."""
    most = max_along(ops.where(kept, values, -float("inf")), axis=-1, keepdims=True)
    most = ops.where(most > -float("inf"), most, 0.0)
    number = ops.maximum(_count(kept), 1)
    lowest = most - mass
    highest = most - mass / ops.cast(number, "float32")
    if guess is None:
        guess = ops.sum(ops.where(kept, values - most, 0.0), axis=-1, keepdims=True)
        guess = most + (guess - mass) / ops.cast(number, "float32")
    offset = ops.minimum(ops.maximum(guess, lowest), highest)

    # Newton's method, exact once the active values no longer change.
    def unfinished(step, offset, number, before):
        return ops.any(number != before) & (step < 50)

    def improve(step, offset, number, before):
        active = kept & (values > offset)
        before, number = number, _count(active)
        over = ops.sum(ops.where(active, values - offset, 0.0), axis=-1, keepdims=True)
        over = (over - mass) / ops.maximum(ops.cast(number, "float32"), 1.0)
        return step + 1, offset + over, number, before

    number = number + ops.zeros_like(number)
    _, offset, _, _ = ops.while_loop(
        unfinished, improve, (0, offset, number, ops.zeros_like(number) - 1)
    )
    return offset, kept & (values > offset)


def _count(chosen):
    return ops.sum(ops.cast(chosen, "int32"), axis=-1, keepdims=True)
