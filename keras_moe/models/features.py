"""Features of images from a backbone's tokens.

Axes: B batch, N tokens, D hidden.
"""

from typing import Any

from keras import ops


def image_features(
    tokens: Any, grid: tuple[int, int], class_token: bool
) -> dict[str, Any]:
    """The tokens themselves, pooled to one vector, and as a grid."""
    patches = tokens[:, 1:] if class_token else tokens
    pooled = tokens[:, 0] if class_token else ops.mean(tokens, axis=1)
    grid = ops.reshape(patches, (-1, *grid, tokens.shape[-1]))
    return {"tokens": tokens, "pooled": pooled, "grid": grid}
