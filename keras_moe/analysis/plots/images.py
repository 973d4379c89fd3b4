"""Plots of the images and patches that experts work on."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from keras_moe.analysis.plots import _figure
from keras_moe.analysis.routing import of_patches
from keras_moe.analysis.tokens import expert_views
from keras_moe.ops import Routing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_IN_A_ROW = 8


def plot_expert_images(
    images: ArrayLike,
    routing: Routing,
    path: str | os.PathLike | None = None,
    labels: Sequence[object] | np.ndarray | None = None,
    *,
    experts: Sequence[int] | None = None,
    threshold: float | None = 0.5,
    seed: int | None = 0,
    title: str = "Images of each expert",
) -> "Figure":
    """Plots images that use an expert, with their coefficients and labels.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        routing: `Routing` of a muMoE head, with arrays (B, 1, E).
        labels: names or numbers of the images' classes (B,), or None.
        experts: experts to show, one per row; None for the first ten with an image.
        threshold: smallest coefficient of an image to show.
        seed: seed of a random choice of images; None for the largest coefficients.

    Reference: *Multilinear Mixture of Experts*, Figures 2, 16 and 17.

    Example:

    >>> from keras_moe.analysis import plots
    >>> from keras_moe.ops import Routing
    >>> routing = Routing(*[np.eye(3)[:, None]] * 6)
    >>> figure = plots.plot_expert_images(np.zeros((3, 8, 8, 1)), routing, "images.png")
    """
    images, gates = np.asarray(images), np.asarray(routing.gates)
    gates, generator, rows = gates[:, 0], np.random.default_rng(seed), {}
    for expert in range(gates.shape[1]) if experts is None else experts:
        order = np.argsort(-gates[:, expert], kind="stable")
        order = order[gates[order, expert] >= (threshold or 0.0)]
        if seed is not None:
            order = generator.permutation(order)
        if len(order):
            rows[expert] = order[:_IN_A_ROW]
        if experts is None and len(rows) == 10:
            break
    height = 0.35 + 0.95 * images.shape[1] / images.shape[2]
    size = (0.9 + 0.95 * _IN_A_ROW, 0.7 + height * len(rows))
    figure, axes = _figure.picture_axes(*size, len(rows), _IN_A_ROW)
    for axis in axes.flat:
        axis.set_frame_on(False)
    for row, (expert, chosen) in zip(axes, rows.items()):
        _figure.name_row(row[0], f"expert {expert}")
        for axis, index in zip(row, chosen):
            axis.imshow(_figure.in_colour(images[index]))
            axis.set_title(f"{gates[index, expert]:.2f}", fontsize=7, pad=2)
            if labels is not None:
                axis.set_xlabel(str(labels[index]), fontsize=7, labelpad=1)
    return _figure.save_figure(figure, path, title)


def plot_expert_patches(
    images: ArrayLike,
    routing: Routing,
    grid: tuple[int, int],
    path: str | os.PathLike | None = None,
    *,
    experts: Sequence[int] | None = None,
    title: str = "Patches that use an expert most",
) -> "Figure":
    """Plots the patches that use an expert most, and their images.

    Each expert has two rows: patches of different images with their coefficients, and
    the images with these patches framed.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        routing: `Routing` (B, N, E) of N patches, plus one for a class token in front.
        grid: number of patches down and across.
        experts: experts to show; None for the first three.

    Reference: *Multilinear Mixture of Experts*, Figures 4 and 12.

    Example:

    >>> from keras_moe.analysis import plots
    >>> from keras_moe.ops import Routing
    >>> routing = Routing(*[np.ones((2, 4, 2))] * 6)
    >>> figure = plots.plot_expert_patches(np.zeros((2, 8, 8, 1)), routing, (2, 2))
    """
    images, gates = np.asarray(images), of_patches(routing.gates, grid)
    if experts is None:
        experts = range(min(gates.shape[2], 3))
    columns = min(_IN_A_ROW, len(images))
    height, width = images.shape[1] // grid[0], images.shape[2] // grid[1]
    size = (0.9 + 0.95 * columns, 0.6 + 2.1 * len(experts))
    figure, axes = _figure.picture_axes(*size, 2 * len(experts), columns)
    for number, expert in enumerate(experts):
        best = gates[:, :, expert].max(axis=1)
        for column, index in enumerate(np.argsort(-best, kind="stable")[:columns]):
            row, across = divmod(int(gates[index, :, expert].argmax()), grid[1])
            top, left = row * height, across * width
            image = _figure.in_colour(images[index])
            patch, whole = axes[2 * number : 2 * number + 2, column]
            patch.imshow(image[top : top + height, left : left + width], vmin=0, vmax=1)
            patch.set_title(f"{best[index]:.2f}", fontsize=7, pad=2)
            whole.imshow(image)
            frame_x = np.array([left, left + width, left + width, left, left]) - 0.5
            frame_y = np.array([top, top, top + height, top + height, top]) - 0.5
            whole.plot(frame_x, frame_y, color="tab:red", linewidth=1.5)
        _figure.name_row(axes[2 * number, 0], f"expert {expert}")
    return _figure.save_figure(figure, path, title)


def plot_expert_views(
    images: ArrayLike,
    routing: Routing,
    grid: tuple[int, int],
    path: str | os.PathLike | None = None,
    *,
    images_per_expert: int = 8,
    title: str = "What each expert looks at",
) -> "Figure":
    """Plots the patches that each expert of a layer works on.

    Each expert has a row: a map of the positions where it works, then the images that
    use it most, with the patches of other experts faded.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        routing: `Routing` of the layer, with arrays (B, N, E).
        grid: number of patches down and across.
        images_per_expert: number of images in a row.

    Example:

    >>> from keras_moe.analysis import plots
    >>> from keras_moe.ops import Routing
    >>> routing = Routing(*[np.ones((2, 4, 2))] * 6)
    >>> figure = plots.plot_expert_views(np.zeros((2, 8, 8, 1)), routing, (2, 2))
    """
    images = np.asarray(images)
    views = expert_views(routing, grid, images_per_expert)
    columns = 1 + min(images_per_expert, len(images))
    # Wide enough for the two lines below the images.
    size = (max(1.0 + columns, 6.6), 1.2 + 1.05 * len(views))
    figure, axes = _figure.picture_axes(*size, len(views), columns)
    top = max(view.position_shares.max() for view in views) or 1
    patch = np.ones((images.shape[1] // grid[0], images.shape[2] // grid[1]))
    for row, (expert_axes, view) in enumerate(zip(axes, views)):
        heat = expert_axes[0].imshow(view.position_shares, vmin=0, vmax=top)
        _figure.name_row(expert_axes[0], f"expert {row}")
        for axis, index, patches in zip(expert_axes[1:], view.images, view.patches):
            axis.imshow(_figure.faded(images[index], np.kron(patches, patch)))
    axes[0, 0].set_title("where", fontsize=9)
    if columns > 1:
        axes[0, 1].set_title("images where it works most", fontsize=9, loc="left")
    legend = (
        "First column: how often the expert works at each position (yellow: in most "
        "images, violet: in none).\nOther columns: patches in their own colours are "
        "the expert's; bluish ones go to other experts."
    )
    figure.supxlabel(legend, fontsize=8, multialignment="left")
    _scale(figure, heat, axes, "share of images")
    return _figure.save_figure(figure, path, title)


def plot_compute_maps(
    images: ArrayLike,
    maps: ArrayLike,
    path: str | os.PathLike | None = None,
    num_selected_experts: int = 2,
    *,
    title: str = "Where the model spends compute",
    columns: int = 4,
) -> "Figure":
    """Plots each image next to a map of its patches' number of FFN experts.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        maps: (B, rows, columns), the result of `keras_moe.analysis.compute_map`.
        num_selected_experts: K, the largest number of FFN experts per token.
        columns: number of images in a row.

    Reference: *MoE++*, Figure 5, for images.

    Example:

    >>> from keras_moe.analysis import plots
    >>> images, maps = np.zeros((2, 8, 8, 1)), np.ones((2, 2, 2))
    >>> figure = plots.plot_compute_maps(images, maps, "compute.png")
    """
    images, maps = np.asarray(images), np.asarray(maps)
    columns = min(len(images), columns)
    rows = -(-len(images) // columns)
    size = (2.3 * columns + 1.0, 1.35 * rows + 0.5)
    figure, axes = _figure.picture_axes(*size, rows, 2 * columns)
    for axis in axes.flat:
        axis.axis("off")
    extent = (0, images.shape[2], images.shape[1], 0)
    limits = {"vmin": 0, "vmax": num_selected_experts, "cmap": "magma", "alpha": 0.7}
    for plain, overlaid, image, counts in zip(
        axes[:, ::2].flat, axes[:, 1::2].flat, images, maps
    ):
        for axis in (plain, overlaid):
            axis.imshow(_figure.in_colour(image), extent=extent)
        heat = overlaid.imshow(counts, extent=extent, **limits)
        overlaid.set_title(f"{counts.mean():.2f}", fontsize=8, pad=2)
    _scale(figure, heat, axes, "FFN experts per token")
    return _figure.save_figure(figure, path, title)


def plot_type_maps(
    images: ArrayLike,
    maps: Mapping[str, ArrayLike],
    path: str | os.PathLike | None = None,
    title: str = "Experts of each type per token",
) -> "Figure":
    """Plots each patch's number of experts of each type.

    Images are columns; below each is one map per type, with a scale per type.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        maps: dict of results of `keras_moe.analysis.compute_map` by expert type.

    Reference: *MoE++*, Figure A, for images.

    Example:

    >>> from keras_moe.analysis import plots
    >>> maps = {"zero": np.ones((2, 2, 2)), "copy": np.zeros((2, 2, 2))}
    >>> figure = plots.plot_type_maps(np.zeros((2, 8, 8, 1)), maps, "types.png")
    """
    images = np.asarray(images)
    maps = {name: np.asarray(values) for name, values in maps.items()}
    extent = (0, images.shape[2], images.shape[1], 0)
    size = (0.95 * len(images) + 1.9, 1.0 * (len(maps) + 1) + 0.5)
    figure, axes = _figure.picture_axes(*size, len(maps) + 1, len(images))
    for axis, image in zip(axes[0], images):
        axis.imshow(_figure.in_colour(image))
    _figure.name_row(axes[0, 0], "image")
    for row, (name, values) in zip(axes[1:], maps.items()):
        _figure.name_row(row[0], f"{name}\n{values.mean():.2f}")
        limits = {"vmin": 0, "vmax": max(float(values.max()), 1e-6), "cmap": "magma"}
        for axis, counts in zip(row, values):
            heat = axis.imshow(counts, extent=extent, **limits)
        # Within the last column, so that all rows have its margin.
        bar = figure.colorbar(heat, cax=row[-1].inset_axes((1.06, 0.0, 0.1, 1.0)))
        bar.ax.tick_params(labelsize=7)
    return _figure.save_figure(figure, path, title)


def _scale(figure, heat, axes, label):
    """Adds a colour bar to the right of axes."""
    bar = figure.colorbar(heat, ax=axes, aspect=30, pad=0.02)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=7)
