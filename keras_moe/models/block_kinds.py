"""Which blocks of saved weights are mixtures of experts.

Keras saves blocks by class and order, so that a dense and an MoE block could change
places on loading: the file says which is which.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

_NAME = "moe_blocks"


def store_block_kinds(backbone: Any, store: MutableMapping[str, Any]) -> None:
    """Stores which blocks are mixtures of experts."""
    store[_NAME] = _block_kinds(backbone)


def check_block_kinds(backbone: Any, store: Mapping[str, Any]) -> None:
    """Checks that stored weights are those of a backbone with the same blocks."""
    if _NAME not in store.keys():  # noqa: SIM118
        return
    stored, expected = np.array(store[_NAME]), _block_kinds(backbone)
    if not np.array_equal(stored, expected):
        raise ValueError(
            "Expected weights of a model with the same blocks: "
            f"num_layers={len(expected)}, "
            f"moe_layers={np.flatnonzero(expected).tolist()}; received: "
            f"num_layers={len(stored)}, "
            f"moe_layers={np.flatnonzero(stored).tolist()}"
        )


def _block_kinds(backbone):
    """Whether each block is a mixture of experts."""
    return np.array([name in backbone.routing for name in backbone.block_names])
