"""The patches that each expert works on.

Axes: B batch, N tokens, E experts.
"""

from typing import Any, NamedTuple

import numpy as np

from keras_moe.analysis.patches import of_patches


class ExpertView(NamedTuple):
    """The patches of one expert.

    Attributes:
        position_shares: (rows, columns), for each place of the grid the fraction of
            images whose patch there went to this expert.
        images: indices of the images in which the expert works most.
        patches: boolean (len(images), rows, columns), its patches in these images.
    """

    position_shares: np.ndarray
    images: np.ndarray
    patches: np.ndarray


def expert_views(
    routing: Any, grid: tuple[int, int], images_per_expert: int = 8
) -> list[ExpertView]:
    """The places and the images in which each expert works.

    Images are ranked by the sum of the expert's combine weights over their patches.

    Args:
        routing: `Routing` of arrays (B, N, E). N is the number of patches in the grid,
            and one more with a class token before them.
        grid: numbers of patches down and across.
        images_per_expert: number of images to choose for each expert.

    Returns:
        A list with an `ExpertView` for each expert.

    Raises:
        ValueError: if the tokens do not fit the grid.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import expert_views
    >>> from keras_moe.ops import Routing
    >>> weights = np.array([[[0.9, 0.0], [0.0, 0.6]], [[0.0, 0.7], [0.0, 0.8]]])
    >>> routing = Routing(*[weights] * 4, dispatched=weights > 0, combined=weights)
    >>> view = expert_views(routing, grid=(1, 2), images_per_expert=1)[1]
    >>> view.images.tolist(), view.position_shares.tolist()
    ([1], [[0.5, 1.0]])
    """
    dispatched = of_patches(routing.dispatched, grid) > 0
    weight = of_patches(routing.combined, grid).sum(axis=1)
    views = []
    for expert in range(weight.shape[-1]):
        order = np.argsort(-weight[:, expert], kind="stable")[:images_per_expert]
        patches = dispatched[..., expert].reshape(-1, *grid)
        views.append(ExpertView(patches.mean(axis=0), order, patches[order]))
    return views
