"""Pictures of what the experts do. The only module that needs matplotlib."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.expert_views import expert_views


def _figure(**kwargs):
    """A figure for files: it needs no display, and leaves the caller's alone."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib: pip install 'keras-moe[plots]'"
        ) from error
    figure = Figure(**kwargs)
    FigureCanvasAgg(figure)
    return figure


def plot_expert_views(
    images: Any,
    routing: Any,
    grid: tuple[int, int],
    path: str | os.PathLike,
    images_per_expert: int = 8,
    title: str = "What each expert looks at",
) -> None:
    """Draws what each expert of a layer looks at, and saves the picture.

    One row for each expert: a map of where in the image it works, then the images in
    which it works most, with the patches of other experts faded.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        routing: the layer's `Routing` of arrays (B, N, E).
        grid: patches down and across.
        path: where to save the picture; its suffix says the format.
        images_per_expert: images in a row.
        title: above the picture.

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
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise ValueError(
            "Expected images (batch, height, width, 1 or 3); "
            f"received: shape={images.shape}"
        )
    if len(images) != len(routing.combined):
        raise ValueError(
            "Expected a routing record for each image; received: "
            f"{len(images)} images and {len(routing.combined)} records"
        )
    views = expert_views(routing, grid, images_per_expert)
    columns = 1 + min(images_per_expert, len(images))
    figure = _figure(figsize=(1.0 + columns, 0.9 + 1.05 * len(views)), dpi=110)
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
        expert_axes[0].set_ylabel(
            f"expert {row}", rotation=0, ha="right", va="center", fontsize=9
        )
        for axis, index, patches in zip(expert_axes[1:], view.images, view.patches):
            axis.imshow(
                _faded(images[index], np.kron(patches, np.ones((height, width))))
            )
    axes[0, 0].set_title("where", fontsize=9)
    if columns > 1:
        axes[0, 1].set_title("images where it works most", fontsize=9, loc="left")
    figure.suptitle(title, fontsize=11)
    figure.subplots_adjust(left=0.09, right=0.93, top=0.91, bottom=0.02, hspace=0.06)
    bar = figure.colorbar(heat, cax=figure.add_axes((0.945, 0.3, 0.012, 0.4)))
    bar.set_label("share of images", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path)


def _faded(image, chosen):
    """The image in colour, with what is not chosen faded to blue."""
    image = np.clip((image + 1.0) / 2.0, 0.0, 1.0)
    image = np.broadcast_to(image, (*image.shape[:2], 3))
    blue = np.array([0.16, 0.24, 0.42])
    return np.where(chosen[..., None] > 0, image, 0.25 * image + 0.75 * blue)


# Label, marker and colour of each router; the markers are near those of Figure 1 of
# *Routers in Vision Mixture of Experts*.
_ROUTERS = {
    "softmax_token_choice": ("Softmax Token Choice", "x", "tab:red"),
    "sinkhorn_token_choice": ("Sinkhorn Token Choice", "P", "tab:orange"),
    "sparsity_constrained_token_choice": (
        "Sparsity-constrained Token Choice",
        "v",
        "tab:brown",
    ),
    "softmax_expert_choice": ("Softmax Expert Choice", "s", "tab:blue"),
    "sinkhorn_expert_choice": ("Sinkhorn Expert Choice", "o", "tab:cyan"),
    "sparsity_constrained_expert_choice": (
        "Sparsity-constrained Expert Choice",
        "^",
        "tab:green",
    ),
    "soft": ("Soft", "*", "tab:purple"),
}


def plot_router_study(
    rows: list[dict],
    path: str | os.PathLike,
    title: str = "Accuracy and cost of the routers",
    accuracy: str = "test_accuracy",
) -> None:
    """Draws the accuracy of routers against their cost, and saves the picture.

    As in Figure 1 of *Routers in Vision Mixture of Experts*: the marker's shape is
    the router, and its size k or c. Bars are one standard deviation over the seeds.

    Args:
        rows: a dict for each configuration, with "router" (a name of
            `keras_moe.routers.get`), "selected" (k or c), "relative_step_time", and
            the accuracy, a dict of "mean" and "std" in [0, 1]; other keys are left
            alone.
        path: where to save the picture; its suffix says the format.
        title: above the picture.
        accuracy: the key of the accuracy.

    Raises:
        ValueError: if there are no rows, or a row has an unknown router.
        ImportError: if matplotlib is not installed.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> row = {
    ...     "router": "soft",
    ...     "selected": 1,
    ...     "relative_step_time": 0.9,
    ...     "test_accuracy": {"mean": 0.97, "std": 0.01},
    ... }
    >>> path = os.path.join(tempfile.mkdtemp(), "routers.png")
    >>> plots.plot_router_study([row], path)
    >>> os.path.exists(path)
    True
    """
    if not rows:
        raise ValueError("Expected at least one row; received: rows=[]")
    unknown = sorted({str(row["router"]) for row in rows} - set(_ROUTERS))
    if unknown:
        raise ValueError(
            f"Expected routers of {sorted(_ROUTERS)}; received: {', '.join(unknown)}"
        )
    figure = _figure(figsize=(9.5, 5.0), dpi=110)
    axis = figure.subplots()
    sizes = {}
    for row in rows:
        _, marker, colour = _ROUTERS[row["router"]]
        sizes[row["selected"]] = 6.0 * row["selected"] ** 0.75
        axis.errorbar(
            row["relative_step_time"],
            100 * row[accuracy]["mean"],
            # One seed has no spread.
            yerr=100 * row[accuracy]["std"] or None,
            elinewidth=1.0,
            capsize=3.0,
            alpha=0.85,
            **_marker(marker, colour, sizes[row["selected"]]),
        )
    axis.set_xlabel("time of a training step, relative")
    axis.set_ylabel("test accuracy (%)")
    axis.set_title(title, fontsize=11)
    axis.margins(0.1)
    axis.grid(alpha=0.25)

    # Beside the picture, where it hides no point.
    used = {row["router"] for row in rows}
    entries = [
        axis.plot([], [], label=label, linestyle="", **_marker(marker, colour, 7.0))[0]
        for name, (label, marker, colour) in _ROUTERS.items()
        if name in used
    ]
    entries += [
        axis.plot(
            [],
            [],
            label=f"k or c = {selected:g}",
            linestyle="",
            **_marker("o", "lightgray", size),
        )[0]
        for selected, size in sorted(sizes.items())
    ]
    axis.legend(
        handles=entries, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path)


def _marker(marker, colour, size):
    """Arguments that draw a marker; a cross has no area, and shows by its edge."""
    # Marks of one size look unequal: a star is mostly points, a cross two lines.
    size = size * {"*": 1.5, "x": 1.1}.get(marker, 1.0)
    edge = (
        {"markeredgewidth": 2.2}
        if marker == "x"
        else {"markeredgewidth": 0.7, "markeredgecolor": "black"}
    )
    return {"marker": marker, "color": colour, "markersize": size, **edge}
