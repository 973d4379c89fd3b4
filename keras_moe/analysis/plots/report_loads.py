"""Pictures of the loads of experts for reports.

Axes: L layers, E experts, U groups of tokens (modalities or classes).
"""

from typing import Any

import numpy as np

from keras_moe.analysis.plots.figure import COLOURS, GREY, new_figure, plain_axis

# Colours of the kinds of experts.
_KINDS = {
    "ffn": "#0072B2",
    "zero": "#E69F00",
    "copy": "#009E73",
    "constant": "#CC79A7",
    "pruned": GREY,
}
# More numbers at an axis do not fit.
_NUM_TICKS = 16
# Cells as one small picture, since paths of thousands would be a large page.
_MAP = {"cmap": "cividis", "rasterized": True}


def draw_loads(
    shares: dict[str, Any],
    title: str,
    kinds: tuple[str, ...] | None = None,
    dropped: Any = None,
    capacity: float | None = None,
) -> Any:
    """Draws the share of the work that each expert of a layer does."""
    figure = new_figure(figsize=(3.5, 2.3))
    axis = figure.subplots()
    num_experts = len(next(iter(shares.values())))
    places, width = np.arange(num_experts), 0.84 / len(shares)
    for number, (group, row) in enumerate(shares.items()):
        offset = (number - (len(shares) - 1) / 2) * width
        colours = COLOURS[number]
        if len(shares) == 1 and kinds is not None:
            colours = [_KINDS[kind] for kind in kinds]
        label = group if len(shares) > 1 else None
        axis.bar(places + offset, 100 * np.asarray(row), width, color=colours)
        if label:
            axis.plot([], [], "s", color=COLOURS[number], label=label)
    if dropped is not None and np.any(dropped):
        bottom = 100 * np.asarray(next(iter(shares.values())))
        axis.bar(
            places,
            100 * np.asarray(dropped),
            width,
            bottom=bottom,
            color="none",
            edgecolor=COLOURS[5],
            hatch="////",
            linewidth=0.6,
            label="dropped",
        )
    if len(shares) == 1 and kinds is not None and len({*kinds}) > 1:
        for kind in dict.fromkeys(kinds):
            axis.plot([], [], "s", color=_KINDS[kind], label=kind)
    present = num_experts - (0 if kinds is None else kinds.count("pruned"))
    axis.axhline(100 / present, color=GREY, lw=1, ls="--", label="equal share")
    if capacity is not None:
        axis.axhline(100 * capacity, color=COLOURS[5], lw=1, label="capacity")
    axis.set_xticks(_ticks(num_experts))
    axis.set_xlabel("expert", fontsize=8)
    axis.set_ylabel("% of the work", fontsize=8)
    plain_axis(axis, title)
    _legend_above(axis)
    figure.tight_layout(pad=0.4)
    return figure


def draw_load_map(shares: Any, names: list[str], group: str = "") -> Any:
    """Draws the shares of the experts of all layers, in units of an equal share."""
    num_experts = max(len(row) for row in shares)
    values = np.full((len(shares), num_experts), np.nan)
    for line, row in zip(values, shares):
        line[: len(row)] = np.asarray(row) * np.isfinite(row).sum()
    # The words beside the scale take an inch.
    height = 0.75 + max(0.17 * len(shares), 1.0)
    figure = new_figure(figsize=(3.5, height))
    axis = figure.subplots()
    image = axis.pcolormesh(values, vmin=0, vmax=3, **_MAP)
    axis.invert_yaxis()
    places = _ticks(num_experts)
    axis.set_xticks(places + 0.5, places)
    axis.set_yticks(np.arange(len(names)) + 0.5, names, parse_math=False)
    axis.set_xlabel("expert", fontsize=8)
    _add_scale(figure, axis, image, "times equal share")
    plain_axis(axis, group)
    figure.tight_layout(pad=0.4)
    return figure


def draw_class_map(work: Any, names: list[str], title: str) -> Any:
    """Draws the work of experts by class, in units of the average class.

    Experts stand in the order of the classes that use them most, and those without
    work are last.
    """
    work = np.asarray(work)
    known = np.where(np.isnan(work), -1.0, work)
    favourite = np.where(known.max(axis=0) < 0, len(work), known.argmax(axis=0))
    order = np.lexsort((-known.max(axis=0), favourite))
    figure = new_figure(figsize=(3.5, 0.95 + max(0.16 * len(names), 0.6)))
    axis = figure.subplots()
    image = axis.pcolormesh(work[:, order], vmin=0, vmax=3, **_MAP)
    axis.invert_yaxis()
    if len(order) <= _NUM_TICKS:
        axis.set_xticks(np.arange(len(order)) + 0.5, order)
        axis.set_xlabel("expert", fontsize=8)
    else:
        axis.set_xticks([])
        axis.set_xlabel("experts, by the class that uses them most", fontsize=8)
    names = [name if len(name) <= 18 else f"{name[:17]}…" for name in names]
    axis.set_yticks(np.arange(len(names)) + 0.5, names, parse_math=False)
    axis.set_ylabel("class", fontsize=8)
    _add_scale(figure, axis, image, "times the average class")
    plain_axis(axis, title)
    figure.tight_layout(pad=0.4)
    return figure


def _add_scale(figure, axis, image, label):
    bar = figure.colorbar(image, ax=axis, extend="max", ticks=[0, 1, 2, 3])
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _ticks(num_experts):
    """The numbers of experts that have room at an axis."""
    step = next(
        step
        for step in (1, 2, 4, 5, 8, *range(10, num_experts + 10, 10))
        if num_experts <= step * (_NUM_TICKS if num_experts <= 10 else 9)
        or step >= num_experts
    )
    return np.arange(num_experts)[::step]


def _legend_above(axis):
    """Puts the legend where no bar is: above them."""
    top = axis.get_ylim()[1]
    axis.set_ylim(0, 1.28 * top)
    axis.legend(
        loc="upper left",
        ncols=3,
        fontsize=7,
        frameon=False,
        borderpad=0.1,
        columnspacing=1.0,
        handlelength=1.2,
        handletextpad=0.4,
    )
