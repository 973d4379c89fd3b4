"""Features of images from a backbone's tokens.

Axes: B batch, N tokens, D hidden.
"""

from typing import Any

from keras import ops


def image_features(
    tokens: Any, grid: tuple[int, int], class_token: bool
) -> dict[str, Any]:
    """The tokens themselves, pooled to one vector, and as a grid.

    Args:
        tokens: (B, N, D).
        grid: number of patches down and across.
        class_token: whether the first token is a class token.

    Returns:
        `"tokens"` (B, N, D), `"pooled"` (B, D), the class token or the average, and
        `"grid"` (B, rows, columns, D), the patches where they lie in the image.

    Example:

    >>> import numpy as np
    >>> from keras_moe.models.features import image_features
    >>> features = image_features(np.zeros((2, 7, 4)), (2, 3), class_token=True)
    >>> tuple(features["pooled"].shape), tuple(features["grid"].shape)
    ((2, 4), (2, 2, 3, 4))
    """
    patches = tokens[:, 1:] if class_token else tokens
    pooled = tokens[:, 0] if class_token else ops.mean(tokens, axis=1)
    grid = ops.reshape(patches, (-1, *grid, tokens.shape[-1]))
    return {"tokens": tokens, "pooled": pooled, "grid": grid}
