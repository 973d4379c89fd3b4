"""Figures. Axes: L layers, E experts, U groups of tokens, Q queue positions."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from keras_moe.analysis.plots._figure import (
    COLOURS,
    EXPERT_COLOURS,
    GREY,
    TYPE_COLOURS,
    new_axes,
    new_figure,
    plain_axis,
)
from keras_moe.report.model import shortened
from keras_moe.report.section import evenly_spaced

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Arrays: TypeAlias = Sequence[np.ndarray]
# Largest number of layers with a panel.
MAX_PANELS = 8
_WIDTH = 3.6
_STYLES = ("-", "--", ":", "-.")
_LEGEND = {"ncols": 3, "fontsize": 7, "frameon": False, "borderpad": 0.1}
_TYPES = {**TYPE_COLOURS, "pruned": GREY}
# Largest number of tick labels that fit on an axis.
_NUM_TICKS = 16
# Rasterised, since thousands of paths would make a large page.
_MAP = {"cmap": "cividis", "rasterized": True, "vmin": 0, "vmax": 3}


def draw_loads(
    shares: dict[str, np.ndarray],
    title: str,
    types: tuple[str, ...],
    dropped: np.ndarray | None = None,
    capacity: float | None = None,
) -> "Figure":
    """Plots each expert's share of a layer's work, by modality."""
    figure, ((axis,),) = new_axes(3.5, 2.3)
    positions, width = np.arange(len(types)), 0.84 / len(shares)
    for number, (group, row) in enumerate(shares.items()):
        left = positions + (number - (len(shares) - 1) / 2) * width
        colours = COLOURS[number]
        if len(shares) == 1:
            colours = [_TYPES[x] for x in types]
            if len({*types} - {"pruned"}) == 1:
                colours = np.resize(EXPERT_COLOURS, len(types))
        axis.bar(left, 100 * np.asarray(row), width, color=colours)
        if len(shares) > 1:
            axis.plot([], [], "s", color=COLOURS[number], label=group)
    if dropped is not None and np.any(dropped):
        bottom = 100 * np.asarray(next(iter(shares.values())))
        style: dict[str, str | float] = {"edgecolor": COLOURS[5], "hatch": "////"}
        height = 100 * np.asarray(dropped)
        style |= {"color": "none", "linewidth": 0.6, "label": "dropped"}
        axis.bar(positions, height, width, bottom=bottom, **style)
    if len(shares) == 1 and len({*types}) > 1:
        for name in dict.fromkeys(types):
            axis.plot([], [], "s", color=_TYPES[name], label=name)
    present = len(types) - types.count("pruned")
    axis.axhline(100 / present, color=GREY, lw=1.2, ls="--", label="equal share")
    if capacity is not None:
        axis.axhline(100 * capacity, color="black", lw=1.2, label="capacity")
    axis.set_xticks(_expert_ticks(len(types)))
    axis.set_xlabel("expert", fontsize=8)
    axis.set_ylabel("% of the work", fontsize=8)
    plain_axis(axis, title)
    # Room for the legend above the bars.
    axis.set_ylim(0, 1.28 * axis.get_ylim()[1])
    axis.legend(loc="upper left", handlelength=1.2, columnspacing=1.0, **_LEGEND)
    return figure


def draw_load_map(shares: Arrays, names: list[str], title: str) -> "Figure":
    """Plots the experts' shares in all layers, relative to an equal share."""
    num_experts = max(len(row) for row in shares)
    values = np.full((len(shares), num_experts), np.nan)
    for line, row in zip(values, shares):
        line[: len(row)] = row * np.isfinite(row).sum()
    # The label of the scale needs an inch.
    height = 0.75 + max(0.17 * len(shares), 1.0)
    ticks = _expert_ticks(num_experts)
    return _draw_map(values, names, height, ticks, ticks, "times equal share", title)


def draw_class_map(work: np.ndarray, names: list[str], title: str) -> "Figure":
    """Plots the experts' work by class, relative to the average class."""
    known = np.where(np.isnan(work), -1.0, work)
    favourite = np.where(known.max(axis=0) < 0, len(work), known.argmax(axis=0))
    order = np.lexsort((-known.max(axis=0), favourite))
    experts, label = order, "expert"
    if len(order) > _NUM_TICKS:
        experts, label = order[:0], "experts, by the class that uses them most"
    unit = "times the average class"
    return _draw_classes(work[:, order], names, experts, unit, title, label)


def draw_class_heat(
    values: np.ndarray,
    experts: np.ndarray,
    names: list[str],
    unit: str,
    diverging: bool = False,
) -> "Figure":
    top = max(float(np.nanmax(np.abs(values), initial=0.0)), 1e-9)
    limits = {"cmap": "viridis", "vmin": 0, "vmax": top}
    if diverging:
        limits = {"cmap": "PuOr_r", "vmin": -top, "vmax": top}
    return _draw_classes(values, names, experts, unit, **limits)


def _draw_classes(values, names, experts, unit, title="", label="expert", **limits):
    """Plots a heat map of classes and experts."""
    height = 0.95 + max(0.16 * len(names), 0.6)
    names = [shortened(name, 18) for name in names]
    ticks = np.arange(len(experts))
    figure = _draw_map(
        values, names, height, ticks, experts, unit, title, label, **limits
    )
    figure.axes[0].set_ylabel("class", fontsize=8)
    return figure


def _draw_map(
    values, names, height, ticks, labels, unit, title, label="expert", **limits
):
    """Plots a heat map of experts, with a scale from 0 to 3 unless limits are given."""
    figure, ((axis,),) = new_axes(3.5, height)
    image = axis.pcolormesh(values, **{**_MAP, **limits})
    axis.invert_yaxis()
    axis.set_xticks(ticks + 0.5, labels)
    axis.set_yticks(np.arange(len(names)) + 0.5, names, parse_math=False)
    axis.set_xlabel(label, fontsize=8)
    bar = figure.colorbar(image, ax=axis, extend="neither" if limits else "max")
    bar.set_label(unit, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    plain_axis(axis, title)
    return figure


def _expert_ticks(num_experts):
    step = 2 ** max(math.ceil(math.log2(num_experts / 12)), 0)
    return np.arange(num_experts)[::step]


class Line(NamedTuple):
    """A line of `draw_depth`: values by layer, with an optional band."""

    layers: list[int]
    values: Any
    band: Any = None
    colour: int = 0
    style: int = 0


def draw_depth(lines: dict[str, Line], names: list[str], label: str) -> "Figure":
    """Plots values in [0, 1] against depth."""
    figure, ((axis,),) = new_axes(3.5, 2.6)
    for name, line in lines.items():
        style = {"marker": "o", "ms": 3.5, "lw": 1.4, "color": COLOURS[line.colour]}
        style |= {"linestyle": _STYLES[line.style], "label": name}
        axis.plot(line.layers, line.values, **style)
        if line.band is not None:
            colour = COLOURS[line.colour]
            axis.fill_between(line.layers, *line.band, color=colour, alpha=0.2, lw=0)
    numbers = [name.removeprefix("block_") for name in names]
    is_short = all(number.isdigit() for number in numbers)
    step = -(-len(names) // 14)
    texts = (numbers if is_short else names)[::step]
    turned: dict[str, int] = {} if is_short or len(texts) < 3 else {"rotation": 90}
    axis.set_xticks(np.arange(len(names))[::step], texts, parse_math=False, **turned)
    axis.set_xlim(-0.4, len(names) - 0.6)
    axis.set_xlabel("block" if is_short else "layer", fontsize=8)
    axis.set_ylabel(label, fontsize=8)
    axis.set_ylim(0, 1.04)
    plain_axis(axis)
    axis.grid(axis="y", color=GREY, alpha=0.25, lw=0.6)
    if len(lines) > 1:
        style = {**_LEGEND, "ncols": 2, "borderaxespad": 0.2, "handlelength": 2.6}
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), **style)
    return figure


def draw_queues(
    counts: Arrays, edges: np.ndarray, names: list[str], types: list[str]
) -> "Figure":
    """Plots histograms of queue positions (L, types, Q), one panel per layer."""
    figure, panels = _layer_panels(names)
    for axis, layer in panels:
        share = counts[layer] / max(counts[layer].sum(), 1.0)
        top = max(share.sum(axis=0).max(), 1e-9)
        axis.axvspan(1.0, edges[-1], color=GREY, alpha=0.18, linewidth=0)
        below = np.zeros(len(edges) - 1)
        for colour, row in zip(COLOURS, share):
            above = below + row
            # A single path for all positions.
            style = {"baseline": below, "fill": True, "linewidth": 0}
            axis.stairs(above, edges, color=colour, **style)
            below = above
        axis.axvline(1.0, color="black", linewidth=1.0, linestyle="--")
        axis.set_xlim(edges[0], edges[-1])
        axis.set_ylim(0, 1.08 * top)
        axis.set_xticks(np.arange(edges[0], edges[-1] + 1e-6))
        _style(axis, names[layer])
    words = "position in the queue, in capacities (line: the capacity)"
    _legend(figure, [*zip(types, COLOURS)], words)
    return figure


def draw_modalities(
    counts: list[dict[str, np.ndarray]], capacities: Arrays, names: list[str]
) -> "Figure":
    """Plots experts' choices and dropped choices, (2, E) by modality, per layer."""
    figure, axes = _panels(len(counts))
    for axis, own, room, name in zip(axes, counts, capacities, names):
        experts = np.arange(len(room))
        served = [(choices - dropped, 1.0) for choices, dropped in own.values()]
        parts = [*served, *((dropped, 0.35) for _, dropped in own.values())]
        total = sum(part.sum() for part, _ in parts) or 1.0
        below = np.zeros(len(room))
        for (part, alpha), colour in zip(parts, COLOURS[: len(own)] * 2):
            style = {"color": colour, "alpha": alpha, "linewidth": 0}
            axis.bar(experts, part / total, 0.85, below, **style)
            below = below + part / total
        ends, style = (experts - 0.5, experts + 0.5), {"linewidth": 1.0}
        room = np.asarray(room) / total
        axis.hlines(room, *ends, color="black", linestyle="--", **style)
        _style(axis, name)
        axis.set_xticks(experts[:: max(len(experts) // 8, 1)])
    modalities = list(dict.fromkeys(name for own in counts for name in own))
    words = "expert (pale: dropped; line: capacity; all choices are 100%)"
    _legend(figure, [*zip(modalities, COLOURS)], words)
    return figure


def draw_priorities(
    served: Arrays, dropped: Arrays, edges: np.ndarray, names: list[str]
) -> "Figure":
    """Plots histograms of the largest gates of served and dropped tokens."""
    figure, panels = _layer_panels(names)
    types = [("served", COLOURS[0]), ("dropped by all its experts", COLOURS[5])]
    for axis, layer in panels:
        for counts, (_, colour) in zip((served[layer], dropped[layer]), types):
            if counts.sum():
                share = counts / counts.sum()
                axis.stairs(share, edges, fill=True, color=colour, alpha=0.3)
                axis.stairs(share, edges, color=colour, linewidth=1.2)
        axis.set_xlim(edges[0], edges[-1])
        axis.set_ylim(bottom=0)
        axis.set_xticks(np.linspace(edges[0], edges[-1], 3))
        _style(axis, names[layer])
    _legend(figure, types, "largest gate of the token (each group is 100%)")
    return figure


def draw_positions(shares: Arrays, names: list[str]) -> "Figure":
    """Plots how often the patch at each position is dropped, per layer."""
    layers = evenly_spaced(range(len(shares)), MAX_PANELS)
    columns = min(len(layers), 4)
    figure, axes = _panels(len(layers), min(_WIDTH / columns, 1.3), columns, 0.15)
    top = max(float(np.max(shares)), 0.01)
    for axis, layer in zip(axes, layers):
        image = axis.imshow(shares[layer], cmap="viridis", vmin=0.0, vmax=top)
        axis.set_axis_off()
        name = shortened(names[layer], 18)
        axis.set_title(name, fontsize=7, pad=4, parse_math=False)
    place = {"location": "bottom", "shrink": 0.6, "aspect": 30, "pad": 0.04}
    bar = figure.colorbar(image, ax=axes, format=_percent(".3g"), **place)
    bar.outline.set_visible(False)
    bar.locator = _ticks()
    bar.ax.tick_params(labelsize=7, length=2)
    return figure


def draw_drops(
    factors: list[float],
    shares: np.ndarray,
    names: list[str],
    marked: Sequence[float] = (),
) -> "Figure":
    """Plots the share of dropped tokens against the capacity factor, per layer."""
    layers = evenly_spaced(range(len(shares)), len(COLOURS))
    figure, ((axis,),) = new_axes(_WIDTH, 2.5)
    for colour, layer in zip(COLOURS, layers):
        style = {"marker": ".", "markersize": 4, "linewidth": 1.3, "color": colour}
        label = shortened(names[layer], 18)
        axis.plot(factors, shares[layer], label=label, **style)
    for factor in marked:
        axis.axvline(factor, color="black", linewidth=0.8, linestyle="--")
    axis.set_xlim(0, max(factors))
    axis.set_ylim(0, max(1.05 * shares.max(), 0.01))
    axis.set_xlabel("capacity factor", fontsize=8)
    _style(axis, None)
    axis.yaxis.set_major_formatter(_percent(".3g"))
    style = {**_LEGEND, "ncols": 2}
    _without_math(axis.legend(loc="lower left", bbox_to_anchor=(0, 1), **style))
    return figure


def draw_patches(sheet: np.ndarray, names: list[str], title: str) -> "Figure":
    """Plots a sheet of patches with a row for each expert."""
    side = sheet.shape[0] / len(names)
    # Two pixels of a PNG file for each of the sheet, and room for names and title.
    height, width = (2 * length / 160 for length in sheet.shape[:2])
    left, top = 0.1 * max(map(len, names)) + 0.1, 0.35
    size = left + width + 0.1, height + top + 0.1
    figure = new_figure("none", figsize=size)
    area = (left / size[0], 0.1 / size[1], width / size[0], height / size[1])
    axis = figure.add_axes(area)
    axis.imshow(sheet, interpolation="nearest", aspect="auto")
    axis.set_xticks([])
    rows = side * (np.arange(len(names)) + 0.5) - 0.5
    axis.set_yticks(rows, names, parse_math=False)
    axis.tick_params(length=0, labelsize=10)
    axis.spines[:].set_visible(False)
    axis.set_title(title, fontsize=11, loc="left", parse_math=False)
    return figure


def _layer_panels(names):
    """Makes a figure, and pairs of a panel and the number of its layer."""
    layers = evenly_spaced(range(len(names)), MAX_PANELS)
    figure, axes = _panels(len(layers))
    return figure, list(zip(axes, layers))


def _panels(count, height=1.15, columns=2, legend=0.42):
    """Makes a figure with panels, and room in inches for a legend below."""
    columns = max(min(count, columns), 1)
    rows = max(math.ceil(count / columns), 1)
    height = rows * (height + 0.35) + legend
    figure, grid = new_axes(_WIDTH, height, rows, columns)
    axes = grid.ravel()
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def _style(axis, title):
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=7, length=2)
    axis.yaxis.set_major_locator(_ticks())
    axis.yaxis.set_major_formatter(_percent(".0f"))
    if title is not None:
        title = shortened(title, 18)
        axis.set_title(title, fontsize=7, pad=3, parse_math=False)


def _percent(digits):
    return lambda value, _: f"{100 * value:{digits}}%"


def _ticks():
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


def _legend(figure, types, words):
    """Adds a legend below the panels, under a label."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in types]
    style = {**_LEGEND, "handlelength": 1.0, "title": words, "title_fontsize": 7}
    _without_math(figure.legend(handles=handles, loc="outside lower center", **style))


def _without_math(legend):
    """Shows dollar signs in names literally."""
    for text in legend.get_texts():
        text.set_parse_math(False)
