"""Which blocks of an encoder are mixtures of experts."""

import re
from typing import Any

import numpy as np

from keras_moe.checks import check_integer

# The largest published models have a tenth of these; a description of ten times as
# many, or a mistyped number, would take minutes.
MAX_LAYERS = 1000


def check_num_layers(num_layers: Any) -> int:
    """`num_layers`, if it is an integer of at least 1 and at most `MAX_LAYERS`."""
    if check_integer("num_layers", num_layers) > MAX_LAYERS:
        raise ValueError(
            f"Expected num_layers to be at most {MAX_LAYERS}; "
            f"received: num_layers={num_layers}"
        )
    return int(num_layers)


def resolve_moe_layers(moe_layers: Any, num_layers: int) -> tuple[int, ...]:
    """The indices of the blocks whose feed-forward layer is a mixture of experts.

    Args:
        moe_layers: None or an empty sequence for a dense network; indices from 0;
            `"every_n"` for blocks n - 1, 2 n - 1, ... (`"every_2"` is 1, 3, 5, ...);
            or `"last_n"` for the last n of `"every_2"`.
        num_layers: the number of blocks.

    Returns:
        Sorted indices.

    Raises:
        ValueError: if an index is out of range or twice there, if more blocks are
            asked for than there are, or if the name is unknown.

    Reference:
        *Scaling Vision with Sparse Mixture of Experts*, section 3.1 ("Every 2",
        "Last 2").

    Example:

    >>> from keras_moe.layers import resolve_moe_layers
    >>> resolve_moe_layers("every_2", 6), resolve_moe_layers("last_2", 8)
    ((1, 3, 5), (5, 7))
    """
    if moe_layers is None:
        return ()
    if isinstance(moe_layers, str):
        match = re.fullmatch(r"(every|last)_([1-9]\d*)", moe_layers)
        if not match:
            raise ValueError(
                "Expected moe_layers to be indices, 'every_n' or 'last_n'; "
                f"received: moe_layers={moe_layers!r}"
            )
        count = int(match[2])
        if match[1] == "every":
            indices = tuple(range(count - 1, num_layers, count))
        else:
            indices = tuple(range(1, num_layers, 2))
            indices = indices[-count:] if count <= len(indices) else ()
        if not indices:
            raise ValueError(
                f"Expected moe_layers that fit num_layers={num_layers}; "
                f"received: moe_layers={moe_layers!r}"
            )
        return indices
    try:
        indices = [
            check_integer("moe_layers", index, -num_layers) for index in moe_layers
        ]
    except TypeError:
        raise ValueError(
            "Expected moe_layers to be None, indices, 'every_n' or 'last_n'; "
            f"received: moe_layers={moe_layers!r}"
        ) from None
    if not indices:
        raise ValueError(
            "Expected moe_layers=None for a model without MoE blocks; "
            f"received: moe_layers={list(moe_layers)}"
        )
    indices = tuple(sorted(indices))
    if len(set(indices)) < len(indices):
        raise ValueError(
            f"Expected each block once; received: moe_layers={list(moe_layers)}"
        )
    if indices and not 0 <= indices[0] <= indices[-1] < num_layers:
        raise ValueError(
            f"Expected moe_layers between 0 and num_layers - 1 = {num_layers - 1}; "
            f"received: moe_layers={list(moe_layers)}"
        )
    return indices


def plain_moe_layers(moe_layers: Any) -> Any:
    """`moe_layers` as a config keeps them: indices as a list."""
    if moe_layers is None or isinstance(moe_layers, str):
        return moe_layers
    try:
        indices = list(moe_layers)
    except TypeError:
        raise ValueError(
            "Expected moe_layers to be None, indices, 'every_n' or 'last_n'; "
            f"received: moe_layers={moe_layers!r}"
        ) from None
    # NumPy's integers are not JSON.
    return [int(i) if isinstance(i, np.integer) else i for i in indices]
