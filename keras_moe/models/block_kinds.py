"""Which blocks of saved weights are mixtures of experts.

Keras saves blocks by class and order, so that a dense and an MoE block could change
places on loading: the file says which is which.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

_NAME = "moe_blocks"


def store_block_kinds(is_moe: list[bool], store: MutableMapping[str, Any]) -> None:
    """Stores which blocks are mixtures of experts.

    Args:
        is_moe: whether each block is one.
        store: store of `save_own_variables`.
    """
    store[_NAME] = np.array(is_moe)


def check_block_kinds(is_moe: list[bool], store: Mapping[str, Any]) -> None:
    """Checks that stored weights are those of a model with the same blocks.

    Args:
        is_moe: whether each block is a mixture of experts.
        store: store of `load_own_variables`.

    Raises:
        ValueError: if the stored blocks are others.
    """
    if _NAME not in store.keys():  # noqa: SIM118
        return
    stored = np.array(store[_NAME])
    if not np.array_equal(stored, is_moe):
        raise ValueError(
            "Expected weights of a model with the same blocks: "
            f"num_layers={len(is_moe)}, "
            f"moe_layers={np.flatnonzero(is_moe).tolist()}; received: "
            f"num_layers={len(stored)}, "
            f"moe_layers={np.flatnonzero(stored).tolist()}"
        )
