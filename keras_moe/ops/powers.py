"""Powers of tensors by roots and products, which take a part of a power's time."""

from typing import Any

from keras import ops

# The largest exponent for which multiplications take the place of a power.
_LARGEST_PRODUCT = 16
# The least number of float32 in full precision.
_TINY = 1.1754944e-38


def entmax_power(alpha: float) -> float:
    """q = 1 / (alpha - 1), an integer where only rounding parts it from one."""
    power = 1.0 / (alpha - 1.0)
    return float(round(power)) if abs(power - round(power)) < 1e-9 else power


def product_exponent(exponent: float) -> tuple[int, int] | None:
    """The whole part of an exponent and its quarters, if roots and products make it."""
    quarters = 4 * exponent
    if quarters != int(quarters) or exponent > _LARGEST_PRODUCT:
        return None
    return divmod(int(quarters), 4)


def real_power(x: Any, exponent: float) -> Any:
    """`x ** exponent` by a cheaper operation where there is one."""
    x = ops.convert_to_tensor(x)
    if exponent == 0:
        return ops.ones_like(x)
    if exponent == 0.5:
        return ops.sqrt(x)
    parts = product_exponent(exponent)
    if parts is not None and parts[1] == 0:
        return _product(x, parts[0])
    # Roots and logarithms have no slope at 0.
    positive = ops.maximum(x, _TINY)
    if parts is None:
        # XLA on a CPU takes five times as long for a power, taken one by one.
        power = ops.exp(exponent * ops.log(positive))
    else:
        whole, quarters = parts
        root = ops.sqrt(positive)
        power = {1: ops.sqrt(root), 2: root, 3: root * ops.sqrt(root)}[quarters]
        if whole:
            power = power * _product(positive, whole)
    return ops.where(x > 0, power, 0.0)


def _product(x, exponent):
    """x ** exponent for an integer of at least 1, by repeated squaring."""
    if exponent == 3:
        return x * x * x
    power = None
    while exponent:
        if exponent % 2:
            power = x if power is None else power * x
        exponent //= 2
        if exponent:
            x = x * x
    return power
