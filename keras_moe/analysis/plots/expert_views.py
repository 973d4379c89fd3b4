"""Pictures of the patches that each expert works on."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.expert_views import expert_views
from keras_moe.analysis.plots.figure import (
    checked_images,
    faded,
    name_row,
    new_figure,
    write_figure,
)


def plot_expert_views(
    images: Any,
    routing: Any,
    grid: tuple[int, int],
    path: str | os.PathLike,
    images_per_expert: int = 8,
    title: str = "What each expert looks at",
) -> None:
    """Draws the patches that each expert of a layer works on, and saves the picture.

    Each expert has a row: a map of the places in the image where it works, then the
    images in which it works most, with the patches of other experts faded.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        routing: `Routing` of the layer, with arrays (B, N, E).
        grid: numbers of patches down and across.
        path: path of the picture; its suffix is the format.
        images_per_expert: number of images in a row.
        title: title above the picture.

    Raises:
        ValueError: if images and routing do not fit.
        ImportError: if matplotlib is not installed.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import plots
    >>> from keras_moe.ops import Routing
    >>> routing = Routing(*[np.ones((2, 4, 2))] * 6)
    >>> path = os.path.join(tempfile.mkdtemp(), "experts.png")
    >>> plots.plot_expert_views(np.zeros((2, 8, 8, 1)), routing, (2, 2), path)
    >>> os.path.exists(path)
    True
    """
    images = checked_images(images)
    if len(images) != len(routing.combined):
        raise ValueError(
            "Expected a routing record for each image; received: "
            f"{len(images)} images and {len(routing.combined)} records"
        )
    views = expert_views(routing, grid, images_per_expert)
    columns = 1 + min(images_per_expert, len(images))
    # Wide enough for the two lines below the images.
    width_inches = max(1.0 + columns, 6.6)
    height_inches = 1.2 + 1.05 * len(views)
    figure = new_figure(figsize=(width_inches, height_inches), dpi=110)
    axes = figure.subplots(len(views), columns, squeeze=False)
    top = max(view.position_shares.max() for view in views)
    height, width = images.shape[1] // grid[0], images.shape[2] // grid[1]
    for row, (expert_axes, view) in enumerate(zip(axes, views)):
        for axis in expert_axes:
            axis.set_xticks([])
            axis.set_yticks([])
        heat = expert_axes[0].imshow(
            view.position_shares, vmin=0, vmax=top or 1, cmap="viridis"
        )
        name_row(expert_axes[0], f"expert {row}")
        for axis, index, patches in zip(expert_axes[1:], view.images, view.patches):
            axis.imshow(
                faded(images[index], np.kron(patches, np.ones((height, width))))
            )
    axes[0, 0].set_title("where", fontsize=9)
    if columns > 1:
        axes[0, 1].set_title("images where it works most", fontsize=9, loc="left")
    figure.suptitle(title, fontsize=11, y=1 - 0.18 / height_inches)
    legend = (
        "First column: how often the expert works at each place (yellow: in most "
        "images, violet: in none).\nOther columns: patches in their own colours are "
        "the expert's; bluish ones are others'."
    )
    left, bottom = 0.9 / width_inches, 0.08 / height_inches
    figure.text(left, bottom, legend, fontsize=8, va="bottom")
    figure.subplots_adjust(
        left=left,
        right=1 - 0.7 / width_inches,
        top=1 - 0.6 / height_inches,
        bottom=0.5 / height_inches,
        hspace=0.06,
    )
    at = (1 - 0.55 / width_inches, 0.3, 0.12 / width_inches, 0.4)
    bar = figure.colorbar(heat, cax=figure.add_axes(at))
    bar.set_label("share of images", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    write_figure(figure, path)
