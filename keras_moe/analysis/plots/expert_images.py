"""Pictures of the images and patches that use an expert."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.patches import of_patches
from keras_moe.analysis.plots.figure import (
    checked_images,
    in_colour,
    name_row,
    new_figure,
    save_figure,
)
from keras_moe.checks import check_integer


def plot_expert_images(
    images: Any,
    routing: Any,
    path: str | os.PathLike,
    labels: Any = None,
    experts: Any = None,
    images_per_expert: int = 8,
    threshold: float | None = 0.5,
    seed: int | None = 0,
    title: str = "Images of each expert",
) -> None:
    """Draws images that use an expert, and saves the picture.

    Each expert has a row, with the coefficient above each image and the label below.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        routing: `Routing` of a muMoE head, with arrays (B, 1, E).
        path: path of the picture; its suffix is the format.
        labels: names or numbers of the images' classes (B,), or None.
        experts: experts to draw; None takes the first ten that have an image.
        images_per_expert: number of images in a row.
        threshold: lowest coefficient of an image that is shown.
        seed: seed of a random choice of images, as in Figure 2; None takes those with
            the largest coefficients, as in Figure 17.
        title: title above the picture.

    Raises:
        ValueError: if the arrays do not fit, or no expert has an image.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figures 2, 16 and 17.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import plots
    >>> from keras_moe.ops import Routing
    >>> routing = Routing(*[np.eye(3)[:, None]] * 6)
    >>> path = os.path.join(tempfile.mkdtemp(), "images.png")
    >>> plots.plot_expert_images(np.zeros((3, 8, 8, 1)), routing, path)
    >>> os.path.exists(path)
    True
    """
    images, gates = checked_images(images), np.asarray(routing.gates)
    if gates.ndim != 3 or gates.shape[1] != 1 or len(gates) != len(images):
        raise ValueError(
            f"Expected gates ({len(images)}, 1, experts), one for each image; "
            f"received: shape={gates.shape}"
        )
    check_integer("images_per_expert", images_per_expert)
    gates, generator, rows = gates[:, 0], np.random.default_rng(seed), {}
    for expert in range(gates.shape[1]) if experts is None else experts:
        _check_expert(expert, gates.shape[1])
        order = np.argsort(-gates[:, expert], kind="stable")
        order = order[gates[order, expert] >= (threshold or 0.0)]
        if seed is not None:
            order = generator.permutation(order)
        if len(order):
            rows[expert] = order[:images_per_expert]
        if experts is None and len(rows) == 10:
            break
    if not rows:
        raise ValueError(
            "Expected an expert with an image at least; received: none with a "
            f"coefficient of {threshold}"
        )
    height = 0.35 + 0.95 * images.shape[1] / images.shape[2]
    size = (0.9 + 0.95 * images_per_expert, 0.7 + height * len(rows))
    figure = new_figure(figsize=size, dpi=110)
    axes = figure.subplots(len(rows), images_per_expert, squeeze=False)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_frame_on(False)
    for row, (expert, chosen) in zip(axes, rows.items()):
        name_row(row[0], f"expert {expert}")
        for axis, index in zip(row, chosen):
            axis.imshow(in_colour(images[index]))
            axis.set_title(f"{gates[index, expert]:.2f}", fontsize=7, pad=2)
            if labels is not None:
                axis.set_xlabel(str(labels[index]), fontsize=7, labelpad=1)
    # The room for the title is in inches.
    save_figure(figure, path, title, pad=0.4, rect=(0, 0, 1, 1 - 0.25 / size[1]))


def plot_expert_patches(
    images: Any,
    routing: Any,
    grid: tuple[int, int],
    path: str | os.PathLike,
    experts: Any = None,
    patches_per_expert: int = 8,
    title: str = "Patches that use an expert most",
) -> None:
    """Draws the patches that use an expert most, and their images; saves the picture.

    Each expert has two rows: the patches, each from another image, and below each its
    image with the patch framed.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        routing: `Routing` of a block, with arrays (B, N, E). N is the number of patches
            in the grid, and one more with a class token before them.
        grid: numbers of patches down and across.
        path: path of the picture; its suffix is the format.
        experts: experts to draw; None takes the first three.
        patches_per_expert: number of patches in a row.
        title: title above the picture.

    Raises:
        ValueError: if the arrays do not fit.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figures 4 and 12.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import plots
    >>> from keras_moe.ops import Routing
    >>> routing = Routing(*[np.ones((2, 4, 2))] * 6)
    >>> path = os.path.join(tempfile.mkdtemp(), "patches.png")
    >>> plots.plot_expert_patches(np.zeros((2, 8, 8, 1)), routing, (2, 2), path)
    >>> os.path.exists(path)
    True
    """
    images, gates = checked_images(images), of_patches(routing.gates, grid)
    if gates.ndim != 3 or len(gates) != len(images):
        raise ValueError(
            f"Expected gates ({len(images)}, tokens, experts), those of each image; "
            f"received: shape={gates.shape}"
        )
    if experts is None:
        experts = range(min(gates.shape[2], 3))
    columns = min(check_integer("patches_per_expert", patches_per_expert), len(images))
    height, width = images.shape[1] // grid[0], images.shape[2] // grid[1]
    size = (0.9 + 0.95 * columns, 0.6 + 2.1 * len(experts))
    figure = new_figure(figsize=size, dpi=110)
    axes = figure.subplots(2 * len(experts), columns, squeeze=False)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    for number, expert in enumerate(experts):
        _check_expert(expert, gates.shape[2])
        best = gates[:, :, expert].max(axis=1)
        for column, index in enumerate(np.argsort(-best, kind="stable")[:columns]):
            row, across = divmod(int(gates[index, :, expert].argmax()), grid[1])
            top, left = row * height, across * width
            image = in_colour(images[index])
            patch, whole = axes[2 * number : 2 * number + 2, column]
            patch.imshow(image[top : top + height, left : left + width], vmin=0, vmax=1)
            patch.set_title(f"{best[index]:.2f}", fontsize=7, pad=2)
            whole.imshow(image)
            frame_x = np.array([left, left + width, left + width, left, left]) - 0.5
            frame_y = np.array([top, top, top + height, top + height, top]) - 0.5
            whole.plot(frame_x, frame_y, color="tab:red", linewidth=1.5)
        name_row(axes[2 * number, 0], f"expert {expert}")
    # The room for the title is in inches.
    save_figure(figure, path, title, pad=0.4, rect=(0, 0, 1, 1 - 0.25 / size[1]))


def _check_expert(expert, count):
    if not 0 <= expert < count:
        raise ValueError(f"Expected experts below {count}; received: {expert}")
