"""Images of any shape in one batch, as patches. Axes: B batch, L patches."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_moe._checks import check_integer, check_pair, unfit


def budget(config: object) -> dict[str, Any]:
    """`max_patches` and `patch_size` of an image config or a pair's, or {}."""
    values = config if isinstance(config, dict) else vars(config)
    values = values.get("image", values)
    values = values if isinstance(values, dict) else vars(values)
    if values.get("max_patches") is None:
        return {}
    size = check_pair("patch_size", values["patch_size"])
    return {"max_patches": values["max_patches"], "patch_size": size}


def patch_grid(
    size: tuple[int, int],
    patch_size: tuple[int, int],
    max_patches: int,
    min_patches: int | None = None,
) -> tuple[int, int]:
    """Patches down and across of an image (height, width), for a budget of them."""
    if min_patches is None:
        return _largest_grid(size, patch_size, max_patches)
    grid = [round(n / side) for n, side in zip(size, patch_size)]
    count, pixels = math.prod(grid), math.prod(patch_size)
    if count > max_patches:
        shrink = math.sqrt(math.prod(size) / (max_patches * pixels))
        grid = [math.floor(n / shrink / side) for n, side in zip(size, patch_size)]
    elif count < min_patches:
        enlarge = math.sqrt(min_patches * pixels / math.prod(size))
        grid = [math.ceil(n * enlarge / side) for n, side in zip(size, patch_size)]
        if math.prod(grid) > max_patches:
            # Rounding up leaves a budget that is as narrow as this.
            return _largest_grid(size, patch_size, max_patches)
    if not 0 < math.prod(grid) <= max_patches:
        expected = f"an image whose aspect ratio fits into max_patches={max_patches}"
        raise unfit(expected, size=tuple(size))
    return grid[0], grid[1]


def _largest_grid(size, patch_size, max_patches):
    """The grid of the largest scale whose patches, rounded up, fit the budget."""

    def grid_at(scale):
        down, across = (
            max(1, math.ceil(n * scale / side)) for n, side in zip(size, patch_size)
        )
        return down, across

    # A bisection as precise as SigLIP 2's, which finds the same grids.
    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        scale = (low + high) / 2
        if math.prod(grid_at(scale)) <= max_patches:
            low = scale
        else:
            high = scale
    return grid_at(low)


def pad_patches(
    images: Sequence[np.ndarray],
    patch_size: int | Sequence[int],
    max_patches: int | None = None,
) -> dict[str, np.ndarray]:
    """Cuts images of any shape into patches, padded to one length.

    Args:
        images: preprocessed images (height, width, channels), each of whole patches.
        patch_size: an int or (height, width).
        max_patches: L, the length to pad to; None for the longest image's.

    Returns: dict of `"patches"`, float32 (B, L, patch height x patch width x channels),
    and `"grids"`, int32 (B, 2), patches down and across: the inputs of a `ViTBackbone`
    with `max_patches`.

    Raises:
        ValueError: if the patch size does not divide an image, or one has more than
            `max_patches`.

    Example:

    >>> from keras_moe.models import pad_patches
    >>> inputs = pad_patches([np.ones((8, 4, 3)), np.ones((4, 4, 3))], patch_size=4)
    >>> inputs["patches"].shape, inputs["grids"].tolist()
    ((2, 2, 48), [[2, 1], [1, 1]])
    """
    height, width = check_pair("patch_size", patch_size)
    check_integer("max_patches", max_patches, optional=True)
    if not len(images):
        raise unfit("at least one image", images=images)
    cut, grids = [], []
    for image in map(np.asarray, images):
        fits = image.ndim == 3 and image.shape[2] == images[0].shape[2]
        if (
            not fits
            or 0 in image.shape
            or image.shape[0] % height
            or (image.shape[1] % width)
        ):
            raise ValueError(
                "Expected images (height, width, channels) of one number of channels, "
                f"which patch_size={height, width} divides; received: "
                f"shape={image.shape}"
            )
        rows, columns = image.shape[0] // height, image.shape[1] // width
        patches = image.reshape(rows, height, columns, width, image.shape[2])
        cut.append(patches.swapaxes(1, 2).reshape(rows * columns, -1))
        grids.append((rows, columns))
    longest = max(map(len, cut))
    if max_patches is not None and longest > max_patches:
        raise unfit(f"images of at most max_patches={max_patches}", patches=longest)
    patches = np.zeros((len(cut), max_patches or longest, cut[0].shape[1]), "float32")
    for row, own in zip(patches, cut):
        row[: len(own)] = own
    return {"patches": patches, "grids": np.array(grids, "int32")}
