"""A few of many, evenly spaced."""


def evenly_spaced(count: int, most: int) -> list[int]:
    """Up to some of the numbers from 0 on, evenly spaced, both ends among them.

    Args:
        count: number of the numbers.
        most: largest number of those that are taken.

    Returns:
        Integers, ascending; all where there are no more.

    Example:

    >>> from keras_moe.analysis.evenly_spaced import evenly_spaced
    >>> evenly_spaced(24, most=4), evenly_spaced(3, most=4)
    ([0, 8, 15, 23], [0, 1, 2])
    """
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / max(most - 1, 1)) for place in range(most)]
