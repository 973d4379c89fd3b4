"""A few of many, evenly spaced."""


def evenly_spaced(count: int, most: int) -> list[int]:
    """Up to some of the numbers from 0 on, evenly spaced, both ends among them."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / max(most - 1, 1)) for place in range(most)]
