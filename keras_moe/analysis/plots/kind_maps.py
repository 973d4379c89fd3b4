"""A picture of the kinds of experts that served each patch."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.plots.figure import (
    checked_images,
    in_colour,
    name_row,
    new_figure,
    write_figure,
)


def plot_kind_maps(
    images: Any,
    maps: dict[str, Any],
    path: str | os.PathLike,
    title: str = "Experts of each kind per token",
) -> None:
    """Draws the number of experts of each kind for each patch, and saves the picture.

    Each image has a column, with a row below it for each kind, which has its own scale.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        maps: dict from a kind to a result (B, rows, columns) of
            `keras_moe.analysis.compute_map`.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there is no kind, or images and maps do not fit.
        ImportError: if matplotlib is not installed.

    Reference:
        *MoE++*, Figure A, for images.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import plots
    >>> path = os.path.join(tempfile.mkdtemp(), "kinds.png")
    >>> maps = {"zero": np.ones((2, 2, 2)), "copy": np.zeros((2, 2, 2))}
    >>> plots.plot_kind_maps(np.zeros((2, 8, 8, 1)), maps, path)
    >>> os.path.exists(path)
    True
    """
    write_figure(draw_kind_maps(images, maps, title), path)


def draw_kind_maps(images: Any, maps: dict[str, Any], title: str = "") -> Any:
    """The figure of `plot_kind_maps`."""
    images = checked_images(images)
    maps = {kind: np.asarray(values) for kind, values in maps.items()}
    shapes = {kind: values.shape for kind, values in maps.items()}
    fits = all(len(s) == 3 and s[0] == len(images) for s in shapes.values())
    if not maps or not len(images) or not fits:
        raise ValueError(
            f"Expected for each kind a map (rows, columns) of {len(images)} images, "
            f"one at least; received: shapes={shapes}"
        )
    count, size = len(images), images.shape[1:3]
    width, height = 0.95 * count + 1.9, 1.0 * (len(maps) + 1) + 0.5
    figure = new_figure(figsize=(width, height), dpi=110)
    axes = figure.subplots(len(maps) + 1, count, squeeze=False)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    for axis, image in zip(axes[0], images):
        axis.imshow(in_colour(image))
    name_row(axes[0, 0], "image")
    # The margins are in inches, whatever the number of images.
    figure.subplots_adjust(
        left=0.9 / width,
        right=1 - 0.9 / width,
        top=1 - 0.4 / height,
        bottom=0.1 / height,
        wspace=0.06,
        hspace=0.06,
    )
    for row, (kind, values) in zip(axes[1:], maps.items()):
        name_row(row[0], f"{kind}\n{values.mean():.2f}")
        most = max(float(values.max()), 1e-6)
        for axis, counts in zip(row, values):
            heat = axis.imshow(
                counts, vmin=0, vmax=most, cmap="magma", extent=(0, size[1], size[0], 0)
            )
        place = row[-1].get_position()
        beside = (1 - 0.75 / width, place.y0 + 0.05 / height)
        height_of_bar = place.height - 0.1 / height
        bar = figure.add_axes((*beside, 0.1 / width, height_of_bar))
        figure.colorbar(heat, cax=bar)
        bar.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=11)
    return figure
