"""Plots of what experts specialise in, how much they are used, and for what."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from keras_moe._checks import unfit
from keras_moe.analysis.plots._figure import (
    EXPERT_COLOURS,
    GREY,
    TYPE_COLOURS,
    new_axes,
    save_figure,
)
from keras_moe.analysis.routing import RoutingScores, TypeLoads
from keras_moe.analysis.usage import ExpertUsage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from keras_moe.analysis.ablation import ExpertAblation
    from keras_moe.analysis.interventions import CoverageCurve

# Experts of a model in `plot_ablation`.
_COLUMNS = 4
# Up to this many lines of a panel are all labelled.
_NUM_NAMES = 6
# Hatches distinguish them without colours.
_TYPES = {
    "ffn": ("FFN", ""),
    "constant": ("constant", "///"),
    "copy": ("copy", "..."),
    "zero": ("zero", "xxx"),
}


def plot_ablation(
    ablations: dict[str, "ExpertAblation"],
    path: str | os.PathLike | None = None,
    class_names: list[str] | None = None,
    title: str = "Accuracy lost without an expert",
) -> "Figure":
    """Plots the fraction of accuracy that classes lose without an expert.

    Each model has a row, with the first experts that change the accuracy of a class by
    half. Bars below zero are classes that gain; the axis ends at -100%.

    Args:
        ablations: dict of results of `keras_moe.analysis.ablate_experts` by model name.
        class_names: names of the classes; None for numbers.

    Reference: *Multilinear Mixture of Experts*, Figures 18 and 19.

    Example:

    >>> from keras_moe.analysis import ExpertAblation, plots
    >>> ablation = ExpertAblation(np.arange(2), np.ones(2), np.ones(2), np.eye(2))
    >>> figure = plots.plot_ablation({"2 experts": ablation}, "ablation.png")
    """
    size = (2.3 * _COLUMNS + 1, 1.6 * len(ablations) + 0.6)
    figure, axes = new_axes(*size, len(ablations), _COLUMNS, sharey=True)
    for row, (name, ablation) in zip(axes, ablations.items()):
        changes = ablation.changes
        largest = np.abs(changes).max(axis=1)
        chosen = np.flatnonzero(largest >= 0.5)[:_COLUMNS]
        if len(chosen) < _COLUMNS:
            most = np.argsort(-largest, kind="stable")[:_COLUMNS]
            chosen = np.sort(most)
        row[0].set_ylabel(f"{name}\n% lost", fontsize=8)
        for axis in row[len(chosen) :]:
            axis.axis("off")
        positions = np.arange(changes.shape[1])
        for axis, index in zip(row, chosen):
            axis.bar(positions, 100 * changes[index], width=1.0, color="tab:blue")
            axis.axhline(0, color="black", linewidth=0.5)
            score = ablation.polysemanticity[index]
            label = f"expert {ablation.experts[index]}, p = {score:.2f}"
            axis.set_title(label, fontsize=8, pad=3)
            axis.tick_params(labelsize=6)
            axis.xaxis.get_major_locator().set_params(integer=True)
            if class_names is not None:
                axis.set_xticks(positions, class_names)
    if class_names is None:
        axes[-1, 0].set_xlabel("class", fontsize=8)
    # A class of low accuracy may gain a multiple of it.
    axes[0, 0].set_ylim(max(-105, min(-5, axes[0, 0].get_ylim()[0])), 105)
    return save_figure(figure, path, title)


def plot_expert_load(
    loads: Mapping[str, ArrayLike],
    path: str | os.PathLike | None = None,
    threshold: float = 0.5,
    title: str = "Expert load",
    width: float = 7.0,
) -> "Figure":
    """Plots the number of tokens for which each expert has a large coefficient.

    Args:
        loads: dict of results of `keras_moe.analysis.expert_load` by model name.
        threshold: smallest coefficient that was counted, for the label.
        width: width of the figure in inches.

    Reference: *Multilinear Mixture of Experts*, Figure 22.

    Example:

    >>> from keras_moe.analysis import plots
    >>> figure = plots.plot_expert_load({"3 experts": [5, 0, 2]}, "load.png")
    """
    figure, axes = new_axes(width, 0.7 + 1.5 * len(loads), rows=len(loads))
    for axis, (name, load) in zip(axes[:, 0], loads.items()):
        load = np.asarray(load)
        experts = np.arange(len(load))
        colours = np.resize(EXPERT_COLOURS, len(load))
        axis.bar(experts, load, color=colours)
        # Without any load, the axis would include negative numbers.
        axis.set_ylim(0, 1.05 * max(load.max(), 1))
        label = f"{name}; {int((load == 0).sum())} without a token"
        axis.set_title(label, fontsize=8, pad=3, parse_math=False)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.tick_params(labelsize=7)
        axis.set_ylabel(f"tokens, a >= {threshold:g}", fontsize=7)
    axes[-1, 0].set_xlabel("expert", fontsize=8)
    return save_figure(figure, path, title)


def plot_load_by_type(
    loads: dict[str, TypeLoads],
    path: str | os.PathLike | None = None,
    title: str = "Load of each type of expert",
    width: float = 6.5,
) -> "Figure":
    """Plots the load of each expert type in each MoE block.

    Args:
        loads: result of `keras_moe.analysis.load_by_type`.
        width: width of the figure in inches.

    Reference: *MoE++*, Figure 4.

    Example:

    >>> from keras_moe.analysis import TypeLoads, plots
    >>> shares = {"ffn": 0.6, "zero": 0.2, "copy": 0.1, "constant": 0.1}
    >>> loads = {"block_0": TypeLoads(shares, {**shares, "ffn": 1.2}, 0.0)}
    >>> figure = plots.plot_load_by_type(loads, "loads.png")
    """
    height = 1.1 + 0.42 * len(loads) + (0.3 if title else 0)
    figure, ((axis,),) = new_axes(width, height)
    rows = np.arange(len(loads))
    left = np.zeros(len(loads))
    for expert_type, (label, hatch) in _TYPES.items():
        colour = TYPE_COLOURS[expert_type]
        shares = np.array([100 * row.shares[expert_type] for row in loads.values()])
        style = {"hatch": hatch, "edgecolor": "white", "linewidth": 0.3, "height": 0.7}
        axis.barh(rows, shares, left=left, color=colour, label=label, **style)
        left += shares
    axis.set_yticks(rows, list(loads), parse_math=False)
    for row, load in enumerate(loads.values()):
        number = f"{load.experts_per_token['ffn']:.2f}"
        axis.text(101, row, number, va="center", fontsize=8)
    axis.set_xlim(0, 117 if width < 5 else 112)
    axis.invert_yaxis()
    axis.set_xlabel("% of assignments; right: FFN experts per token", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(
        loc="lower center",
        bbox_to_anchor=(0.45, 1.0),
        fontsize=8,
        ncols=4,
        frameon=False,
        columnspacing=1.0,
        handlelength=1.2,
    )
    return save_figure(figure, path, title)


def plot_routing_scores(
    scores: dict[str, RoutingScores],
    path: str | os.PathLike | None = None,
    title: str = "Routing scores",
) -> "Figure":
    """Plots histograms of the tokens' two largest gates.

    Args:
        scores: dict of results of `keras_moe.analysis.routing_scores` by model name.

    Reference: *MoE++*, Figure 6.

    Example:

    >>> from keras_moe.analysis import RoutingScores, plots
    >>> scores = RoutingScores(np.linspace(0.4, 1, 50), np.linspace(0, 0.4, 50))
    >>> figure = plots.plot_routing_scores({"with gating residuals": scores}, "s.png")
    """
    columns = len(scores)
    size = (4.2 * columns if columns > 1 else 3.6, 3.4 + (0.3 if title else 0))
    figure, (axes,) = new_axes(*size, columns=columns, sharey=True)
    bins = np.linspace(0, 1, 41)
    for axis, (name, values) in zip(axes, scores.items()):
        for label, gates, colour in (
            ("highest", values.highest, "#0072B2"),
            ("second", values.second, "#E69F00"),
        ):
            label = f"{label}: mean {gates.mean():.3f}, variance {gates.var():.4f}"
            style = {"alpha": 0.6, "color": colour, "label": label}
            axis.hist(
                gates, bins, weights=np.full(len(gates), 100 / len(gates)), **style
            )
        axis.set_title(name, fontsize=9, parse_math=False)
        axis.set_xlabel("gate")
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    axes[0].set_ylabel("% of tokens")
    return save_figure(figure, path, title)


def plot_coverage(
    curves: dict[str, dict[str, "CoverageCurve"]],
    path: str | os.PathLike | None = None,
    title: str = "Coverage by the experts that are kept",
) -> "Figure":
    """Plots the coverage against the number of pruned experts.

    Each group has a panel, with a line per MoE block; the bold line is their mean.

    Args:
        curves: dict of results of `keras_moe.analysis.coverage_curves` by group.

    Reference: *Multimodal Contrastive Learning with LIMoE*, Figure 13.

    Example:

    >>> from keras_moe.analysis import CoverageCurve, plots
    >>> curve = CoverageCurve(np.array([1, 0]), np.array([0.75, 1.0]))
    >>> figure = plots.plot_coverage({"text": {"block_1": curve}}, "coverage.png")
    """
    width, columns = 0.4 + 3.1 * len(curves), len(curves)
    figure, (axes,) = new_axes(width, 2.9, columns=columns, sharey=True)
    for axis, (group, blocks) in zip(axes, curves.items()):
        shades = np.linspace(0.0, 1.0, len(blocks))
        for shade, (name, curve) in zip(shades, blocks.items()):
            pruned, percent = _points(curve)
            colour = (0.25, 0.42 + 0.38 * shade, 0.85 - 0.2 * shade)
            # With many lines only the first and last: shades order those in between.
            is_named = len(blocks) <= _NUM_NAMES or shade in (0.0, 1.0)
            label = name if is_named else None
            axis.plot(pruned, percent, color=colour, label=label, lw=1, zorder=2)
        lengths = {len(curve.experts) for curve in blocks.values()}
        if len(blocks) > 1 and len(lengths) == 1:
            percent = np.mean([_points(curve)[1] for curve in blocks.values()], axis=0)
            axis.plot(pruned, percent, color="black", label="mean", lw=2.2, zorder=3)
        axis.set_title(group, fontsize=10, parse_math=False)
        axis.set_xlabel("pruned experts of a block", fontsize=8)
        axis.set_ylim(0, 104)
        axis.set_xlim(0, max(lengths))
        axis.grid(color=GREY, alpha=0.25, zorder=0)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("% covered by the others", fontsize=8)
    axes[-1].legend(loc="lower left", fontsize=7, frameon=False)
    return save_figure(figure, path, title)


def _points(curve):
    """Numbers of pruned experts, and the percentages still covered."""
    kept = np.arange(len(curve.covered), -1, -1)
    percent = 100 * np.concatenate([[0.0], np.asarray(curve.covered)])
    return len(curve.covered) - kept, percent[kept]


def plot_expert_usage(
    usage: ExpertUsage,
    path: str | os.PathLike | None = None,
    title: str = "Tokens that each expert serves",
) -> "Figure":
    """Plots the share of each group's tokens that each expert serves.

    Each MoE block has a panel, with experts ordered by their share of the first group.
    The dashed line is an equal share.

    Args:
        usage: usage by group, the result of `keras_moe.analysis.expert_usage`.

    Reference: *Multimodal Contrastive Learning with LIMoE*, Figures 17 and 39.

    Example:

    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, plots
    >>> tokens = np.array([[8.0, 1.0], [0.0, 4.0]])
    >>> usage = ExpertUsage(["image", "text"], {"block_1": BlockUsage(tokens, tokens)})
    >>> figure = plots.plot_expert_usage(usage, "usage.png")
    """
    if len(usage.groups) > len(EXPERT_COLOURS):
        raise unfit(f"up to {len(EXPERT_COLOURS)} groups", groups=usage.groups)
    columns = min(3, len(usage.blocks))
    rows = -(-len(usage.blocks) // columns)
    size = (0.6 + 3.4 * columns, 0.9 + 2.1 * rows)
    figure, axes = new_axes(*size, rows, columns, sharey=True)
    grid = axes.ravel()
    for axis, (name, block) in zip(grid, usage.blocks.items()):
        totals = block.tokens.sum(axis=1, keepdims=True)
        shares = 100 * block.tokens / np.where(totals > 0, totals, 1.0)
        order = np.argsort(-shares[0], kind="stable")
        positions = np.arange(len(order))
        width = 0.8 / len(shares)
        for number, (group, row) in enumerate(zip(usage.groups, shares)):
            left = positions + (number - (len(shares) - 1) / 2) * width
            axis.bar(left, row[order], width, color=EXPERT_COLOURS[number], label=group)
        axis.axhline(100 / len(order), color="black", lw=0.8, ls="--")
        axis.set_title(name, fontsize=9, pad=3)
        axis.set_xticks(positions if len(order) <= 16 else [])
        if len(order) <= 16:
            axis.set_xticklabels(order)
        axis.tick_params(labelsize=7)
        axis.set_xlabel("expert", fontsize=8)
    _finish_grid(grid, len(usage.blocks), columns, "% of the group's tokens")
    grid[0].legend(fontsize=8)
    return save_figure(figure, path, title)


def _finish_grid(grid, count, columns, label):
    """Hides unused panels and labels the vertical axes."""
    for axis in grid[count:]:
        axis.set_axis_off()
    for axis in grid[::columns]:
        axis.set_ylabel(label, fontsize=8)


def plot_expert_groups(
    usage: ExpertUsage,
    path: str | os.PathLike | None = None,
    title: str = "What each expert serves",
) -> "Figure":
    """Plots which groups the tokens of each expert belong to.

    There is a panel per MoE block, with a row per expert that serves tokens, most used
    first: its share of all tokens, and their percentages by group.

    Args:
        usage: usage by group, such as by tag (see `keras_moe.analysis.tag_tokens`).

    Reference: *Multimodal Contrastive Learning with LIMoE*, Figure 40.

    Example:

    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, plots
    >>> tokens = np.array([[8.0, 1.0], [0.0, 4.0]])
    >>> usage = ExpertUsage(["NOUN", "DET"], {"block_1": BlockUsage(tokens, tokens)})
    >>> figure = plots.plot_expert_groups(usage, "words.png")
    """
    tables = {name: _group_table(block.tokens) for name, block in usage.blocks.items()}
    rows = max(len(experts) for experts, *_ in tables.values())
    columns = min(3, len(tables))
    size = (1.0 + 0.5 * len(usage.groups), 1.2 + 0.26 * rows)
    lines = -(-len(tables) // columns)
    size = (columns * size[0], 0.4 + lines * size[1])
    figure, axes = new_axes(*size, lines, columns)
    grid = axes.ravel()
    for axis, (name, (experts, loads, shares)) in zip(grid, tables.items()):
        axis.imshow(shares, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            style = {"ha": "center", "va": "center", "fontsize": 7}
            colour = "white" if share > 0.6 else "black"
            axis.text(column, row, f"{100 * share:.0f}", color=colour, **style)
        labels = [f"{e} ({load:.0%})" for e, load in zip(experts, loads)]
        axis.set_yticks(range(len(experts)), labels, fontsize=7)
        names = usage.groups
        axis.set_xticks(range(len(names)), names, fontsize=7, rotation=60, ha="right")
        for label in axis.get_xticklabels():
            label.set_parse_math(False)
        axis.set_title(name, fontsize=9, pad=3)
    _finish_grid(grid, len(tables), columns, "expert (share of all tokens)")
    return save_figure(figure, path, title)


def _group_table(tokens):
    """Experts that serve tokens, their shares, and the split of these by group."""
    totals = tokens.sum(axis=0)
    order = np.argsort(-totals, kind="stable")
    order = order[totals[order] > 0]
    return order, totals[order] / totals.sum(), (tokens[:, order] / totals[order]).T
