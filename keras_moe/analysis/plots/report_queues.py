"""Pictures of tokens before and behind the cut of a capacity.

Axes: L layers, T kinds of tokens, Q places of a queue, E experts.
"""

import math
from typing import Any

import numpy as np

from keras_moe.analysis.evenly_spaced import evenly_spaced
from keras_moe.analysis.plots.figure import COLOURS, GREY, new_figure

# Further layers have no panel.
MAX_PANELS = 8
_WIDTH = 3.6


def draw_queues(
    counts: Any, edges: Any, names: list[str], kinds: list[str], capacity: str
) -> Any:
    """Draws who stands where in the queues before the experts, a panel a layer."""
    counts, edges = np.asarray(counts, "float64"), np.asarray(edges, "float64")
    layers = evenly_spaced(len(counts), MAX_PANELS)
    figure, axes = _panels(len(layers), 1.15, min(len(layers), 2), 0.42)
    for axis, layer in zip(axes, layers):
        share = counts[layer] / max(counts[layer].sum(), 1.0)
        top = max(share.sum(axis=0).max(), 1e-9)
        axis.axvspan(1.0, edges[-1], color=GREY, alpha=0.18, linewidth=0)
        below = np.zeros(len(edges) - 1)
        for kind, row in enumerate(share):
            above = below + row
            # One path for all places.
            colour = COLOURS[kind % len(COLOURS)]
            axis.stairs(
                above, edges, baseline=below, fill=True, color=colour, linewidth=0
            )
            below = above
        axis.axvline(1.0, color="black", linewidth=1.0, linestyle="--")
        axis.set_xlim(edges[0], edges[-1])
        axis.set_ylim(0, 1.08 * top)
        axis.set_xticks(np.arange(edges[0], edges[-1] + 1e-6))
        _style(axis, names[layer])
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    _legend(
        figure,
        [*zip(kinds, COLOURS)],
        f"place in the queue, in capacities (line: {capacity})",
    )
    return figure


def draw_modalities(
    counts: list[dict[str, Any]], capacities: list[Any], names: list[str]
) -> Any:
    """Draws the tokens of each modality before the experts, a panel a layer."""
    figure, axes = _panels(len(counts), 1.15, min(len(counts), 2), 0.42)
    for axis, own, room, name in zip(axes, counts, capacities, names):
        experts = np.arange(len(room))
        parts = [
            (np.asarray(part, "float64"), colour, alpha)
            for row, alpha in ((0, 1.0), (1, 0.35))
            for (served, dropped), colour in zip(own.values(), COLOURS)
            for part in ((np.asarray(served) - dropped, dropped)[row],)
        ]
        total = sum(part.sum() for part, _, _ in parts) or 1.0
        below = np.zeros(len(room))
        for part, colour, alpha in parts:
            axis.bar(
                experts,
                part / total,
                0.85,
                below,
                color=colour,
                alpha=alpha,
                linewidth=0,
            )
            below = below + part / total
        axis.hlines(
            np.asarray(room) / total,
            experts - 0.5,
            experts + 0.5,
            color="black",
            linewidth=1.0,
            linestyle="--",
        )
        _style(axis, name)
        axis.set_xticks(experts[:: max(len(experts) // 8, 1)])
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    modalities = list(dict.fromkeys(name for own in counts for name in own))
    _legend(
        figure,
        [*zip(modalities, COLOURS)],
        "expert (pale: dropped; line: capacity; all choices are 100%)",
    )
    return figure


def draw_priorities(served: Any, dropped: Any, edges: Any, names: list[str]) -> Any:
    """Draws how sure the router is of served and of dropped tokens, a panel a layer."""
    served, dropped = (np.asarray(x, "float64") for x in (served, dropped))
    layers = evenly_spaced(len(served), MAX_PANELS)
    figure, axes = _panels(len(layers), 1.15, min(len(layers), 2), 0.42)
    kinds = [("served", COLOURS[0]), ("dropped by all its experts", COLOURS[5])]
    for axis, layer in zip(axes, layers):
        for counts, (_, colour) in zip((served[layer], dropped[layer]), kinds):
            if counts.sum():
                share = counts / counts.sum()
                axis.stairs(share, edges, fill=True, color=colour, alpha=0.3)
                axis.stairs(share, edges, color=colour, linewidth=1.2)
        axis.set_xlim(edges[0], edges[-1])
        axis.set_ylim(bottom=0)
        axis.set_xticks(np.linspace(edges[0], edges[-1], 3))
        _style(axis, names[layer])
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    _legend(figure, kinds, "largest gate of the token (each group is 100%)")
    return figure


def draw_places(shares: Any, names: list[str]) -> Any:
    """Draws how often the patch at each place of images is dropped, a panel a layer."""
    shares = np.asarray(shares, "float64")
    layers = evenly_spaced(len(shares), MAX_PANELS)
    columns = min(len(layers), 4)
    figure, axes = _panels(len(layers), min(_WIDTH / columns, 1.3), columns, 0.45)
    top = max(float(shares.max()), 0.01)
    for axis, layer in zip(axes, layers):
        image = axis.imshow(shares[layer], cmap="viridis", vmin=0.0, vmax=top)
        axis.set_axis_off()
        axis.set_title(_short(names[layer]), fontsize=7, pad=4, parse_math=False)
    figure.subplots_adjust(left=0.02, right=0.98, wspace=0.08)
    height = figure.get_size_inches()[1]
    bar = figure.colorbar(
        image,
        cax=figure.add_axes((0.2, 0.3 / height, 0.6, 0.08 / height)),
        orientation="horizontal",
        format=lambda value, _: f"{100 * value:.3g}%",
    )
    bar.outline.set_visible(False)
    bar.locator = _ticks()
    bar.ax.tick_params(labelsize=7, length=2)
    return figure


def draw_drops(factors: Any, shares: Any, names: list[str], marked: Any = ()) -> Any:
    """Draws the share of dropped tokens by capacity factor, a line a layer."""
    shares = np.asarray(shares, "float64")
    layers = evenly_spaced(len(shares), len(COLOURS))
    figure = new_figure(figsize=(_WIDTH, 2.5))
    axis = figure.subplots()
    rows = math.ceil(len(layers) / 3)
    figure.subplots_adjust(0.13, 0.17, 0.97, 1 - (0.06 + 0.19 * rows) / 2.5)
    for colour, layer in zip(COLOURS, layers):
        axis.plot(
            factors,
            shares[layer],
            color=colour,
            marker=".",
            markersize=4,
            linewidth=1.3,
            label=_short(names[layer]),
        )
    for factor in marked:
        axis.axvline(factor, color="black", linewidth=0.8, linestyle="--")
    axis.set_xlim(0, max(factors))
    axis.set_ylim(0, max(1.05 * shares.max(), 0.01))
    axis.set_xlabel("capacity factor", fontsize=8)
    _style(axis, None)
    axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    legend = figure.legend(
        loc="upper center", ncols=3, fontsize=7, frameon=False, borderpad=0.1
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _panels(count, height, columns, legend):
    """A figure with panels, and room in inches for a legend below them."""
    rows = max(math.ceil(count / columns), 1)
    total = rows * (height + 0.35) + legend
    figure = new_figure(figsize=(_WIDTH, total))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[count:]:
        axis.remove()
    figure.subplots_adjust(
        left=0.1,
        right=0.96,
        bottom=(legend + 0.2) / total,
        top=1 - 0.2 / total,
        wspace=0.28,
        hspace=0.36 / height,
    )
    return figure, axes[:count]


def _style(axis, title):
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=7, length=2)
    axis.yaxis.set_major_locator(_ticks())
    if title is not None:
        axis.set_title(_short(title), fontsize=7, pad=3, parse_math=False)


def _ticks():
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


def _legend(figure, kinds, words):
    """Words for the horizontal axis, and a legend below them."""
    from matplotlib.patches import Patch

    height = figure.get_size_inches()[1]
    figure.text(0.5, 0.24 / height, words, ha="center", va="bottom", fontsize=7)
    legend = figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in kinds],
        loc="lower center",
        ncols=3,
        fontsize=7,
        frameon=False,
        handlelength=1.0,
        borderpad=0.1,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _short(name):
    return name if len(name) <= 18 else f"{name[:17]}…"
