"""Pictures of the compute of MoE++ by token and by kind of expert."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.plots.figure import (
    checked_images,
    in_colour,
    new_figure,
    write_figure,
)

# The hatches tell them apart without colours.
_KINDS = {
    "ffn": ("FFN", "#0072B2", ""),
    "constant": ("constant", "#009E73", "///"),
    "copy": ("copy", "#E69F00", "..."),
    "zero": ("zero", "#A0A0A0", "xxx"),
}


def plot_compute_maps(
    images: Any,
    maps: Any,
    path: str | os.PathLike,
    num_selected_experts: int = 2,
    title: str = "Where the model spends compute",
) -> None:
    """Draws the number of FFN experts of each patch over its image; saves the picture.

    Each image stands beside the same image with the map over it.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        maps: (B, rows, columns), result of `keras_moe.analysis.compute_map`.
        path: path of the picture; its suffix is the format.
        num_selected_experts: K, the largest number of FFN experts of a token.
        title: title above the picture.

    Raises:
        ValueError: if images and maps do not fit.
        ImportError: if matplotlib is not installed.

    Reference:
        *MoE++*, Figure 5, for images.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import plots
    >>> path = os.path.join(tempfile.mkdtemp(), "compute.png")
    >>> plots.plot_compute_maps(np.zeros((2, 8, 8, 1)), np.ones((2, 2, 2)), path)
    >>> os.path.exists(path)
    True
    """
    figure = draw_compute_maps(images, maps, num_selected_experts, title)
    write_figure(figure, path)


def draw_compute_maps(
    images: Any,
    maps: Any,
    num_selected_experts: int = 2,
    title: str = "",
    columns: int = 4,
) -> Any:
    """The figure of `plot_compute_maps`."""
    images, maps = checked_images(images), np.asarray(maps)
    if maps.ndim != 3 or len(maps) != len(images) or not len(maps):
        raise ValueError(
            f"Expected a map (rows, columns) for each of {len(images)} images; "
            f"received: shape={maps.shape}"
        )
    columns = min(len(images), columns)
    rows = -(-len(images) // columns)
    size = (2.3 * columns + 1.0, 1.35 * rows + 0.5)
    figure = new_figure(figsize=size, dpi=110)
    axes = figure.subplots(rows, 2 * columns, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    height, width = images.shape[1:3]
    for index, (image, counts) in enumerate(zip(images, maps)):
        row, column = divmod(index, columns)
        plain, overlaid = axes[row, 2 * column], axes[row, 2 * column + 1]
        image = in_colour(image)
        for axis in (plain, overlaid):
            axis.imshow(image, extent=(0, width, height, 0))
        heat = overlaid.imshow(
            counts,
            extent=(0, width, height, 0),
            vmin=0,
            vmax=num_selected_experts,
            cmap="magma",
            alpha=0.7,
        )
        overlaid.set_title(f"{counts.mean():.2f}", fontsize=8, pad=2)
    figure.suptitle(title, fontsize=11)
    # The margins are in inches, whatever the number of images.
    figure.subplots_adjust(
        left=0.05 / size[0],
        right=1 - 0.9 / size[0],
        top=1 - 0.5 / size[1],
        bottom=0.05 / size[1],
        wspace=0.06,
    )
    place = (1 - 0.75 / size[0], 0.1, 0.12 / size[0], 0.65)
    bar = figure.colorbar(heat, cax=figure.add_axes(place))
    bar.set_label("FFN experts per token", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def plot_load_by_kind(
    loads: dict[str, Any],
    path: str | os.PathLike,
    title: str = "Load of each kind of expert",
) -> None:
    """Draws the load of each kind of expert in each MoE block, and saves the picture.

    Args:
        loads: dict from a block to its `KindLoads`, result of
            `keras_moe.analysis.load_by_kind`.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there is no block.
        ImportError: if matplotlib is not installed.

    Reference:
        *MoE++*, Figure 4.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import KindLoads, plots
    >>> shares = {"ffn": 0.6, "zero": 0.2, "copy": 0.1, "constant": 0.1}
    >>> loads = {"block_0": KindLoads(shares, {**shares, "ffn": 1.2}, 0.0)}
    >>> path = os.path.join(tempfile.mkdtemp(), "loads.png")
    >>> plots.plot_load_by_kind(loads, path)
    >>> os.path.exists(path)
    True
    """
    write_figure(draw_load_by_kind(loads, title), path)


def draw_load_by_kind(
    loads: dict[str, Any], title: str = "", width: float = 6.5
) -> Any:
    """The figure of `plot_load_by_kind`."""
    if not loads:
        raise ValueError("Expected at least one MoE block; received: loads={}")
    height = 1.1 + 0.42 * len(loads) + (0.3 if title else 0)
    figure = new_figure(figsize=(width, height), dpi=110)
    axis = figure.subplots()
    names = list(loads)
    left = np.zeros(len(names))
    for kind, (label, colour, hatch) in _KINDS.items():
        shares = np.array([100 * loads[name].shares[kind] for name in names])
        axis.barh(
            range(len(names)), shares, left=left, color=colour, label=label, height=0.7,
            hatch=hatch, edgecolor="white", linewidth=0.3,
        )  # fmt: skip
        left += shares
    axis.set_yticks(range(len(names)), names, parse_math=False)
    for row, name in enumerate(names):
        axis.text(
            101, row, f"{loads[name].experts_per_token['ffn']:.2f}", va="center",
            fontsize=8,
        )  # fmt: skip
    axis.set_xlim(0, 117 if width < 5 else 112)
    axis.invert_yaxis()
    axis.set_xlabel("% of assignments; right: FFN experts per token", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(
        loc="lower center", bbox_to_anchor=(0.45, 1.0), fontsize=8, ncols=4,
        frameon=False, columnspacing=1.0, handlelength=1.2,
    )  # fmt: skip
    if title:
        figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    return figure


def plot_routing_scores(
    scores: dict[str, Any],
    path: str | os.PathLike,
    title: str = "Routing scores",
) -> None:
    """Draws the spread of the two highest gates of tokens, and saves the picture.

    Args:
        scores: dict from the name of a model, such as one with and one without gating
            residuals, to its `RoutingScores`; see `keras_moe.analysis.routing_scores`.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there are no scores.
        ImportError: if matplotlib is not installed.

    Reference:
        *MoE++*, Figure 6.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import RoutingScores, plots
    >>> scores = RoutingScores(np.linspace(0.4, 1, 50), np.linspace(0, 0.4, 50))
    >>> path = os.path.join(tempfile.mkdtemp(), "scores.png")
    >>> plots.plot_routing_scores({"with gating residuals": scores}, path)
    >>> os.path.exists(path)
    True
    """
    write_figure(draw_routing_scores(scores, title), path)


def draw_routing_scores(
    scores: dict[str, Any], title: str = "", columns: int | None = None
) -> Any:
    """The figure of `plot_routing_scores`."""
    if not scores:
        raise ValueError("Expected scores of at least one model; received: scores={}")
    columns = min(columns or len(scores), len(scores))
    rows = -(-len(scores) // columns)
    size = (4.2 * columns if columns > 1 else 3.6, 3.4 * rows + (0.3 if title else 0))
    figure = new_figure(figsize=size, dpi=110)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for axis in axes[len(scores) :]:
        axis.axis("off")
    bins = np.linspace(0, 1, 41)
    for axis, (name, values) in zip(axes, scores.items()):
        for label, gates, colour in (
            ("highest", values.highest, "#0072B2"),
            ("second", values.second, "#E69F00"),
        ):
            axis.hist(
                gates,
                bins,
                alpha=0.6,
                color=colour,
                weights=np.full(len(gates), 100 / len(gates)),
                label=f"{label}: mean {gates.mean():.3f}, variance {gates.var():.4f}",
            )
        axis.set_title(name, fontsize=9, parse_math=False)
        axis.set_xlabel("gate")
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    for axis in axes[::columns]:
        axis.set_ylabel("% of tokens")
    if title:
        figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    return figure
