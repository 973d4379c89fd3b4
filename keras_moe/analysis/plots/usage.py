"""Plots of how much each expert is used, and for which tokens."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.plots._figure import COLOURS, GREY, new_figure, save_figure
from keras_moe.analysis.usage import ExpertUsage

# Yellow is visible here, since the background is white.
_COLOURS = (*COLOURS, "#F0E442")
# Up to this many lines of a panel are all labelled.
_NUM_NAMES = 6


def plot_coverage(
    curves: dict[str, dict[str, Any]],
    path: str | os.PathLike | None = None,
    title: str = "Coverage by the experts that are kept",
) -> Any:
    """Plots the coverage against the number of pruned experts.

    Each group has a panel, with a line per MoE block; the bold line is their mean.

    Args:
        curves: dict of results of `keras_moe.analysis.coverage_curves` by group.
        path: see `keras_moe.analysis.plots`, as for `title`.

    Reference: *Multimodal Contrastive Learning with LIMoE*, Figure 13.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import CoverageCurve, plots
    >>> curve = CoverageCurve(np.array([1, 0]), np.array([0.75, 1.0]))
    >>> figure = plots.plot_coverage({"text": {"block_1": curve}}, "coverage.png")
    """
    figure = new_figure(figsize=(0.4 + 3.1 * len(curves), 2.9), dpi=110)
    axes = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
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
    return save_figure(figure, path, title, pad=0.5)


def _points(curve):
    """Numbers of pruned experts, and the percentages still covered."""
    kept = np.arange(len(curve.covered), -1, -1)
    percent = 100 * np.concatenate([[0.0], np.asarray(curve.covered)])
    return len(curve.covered) - kept, percent[kept]


def plot_expert_usage(
    usage: ExpertUsage,
    path: str | os.PathLike | None = None,
    title: str = "Tokens that each expert serves",
) -> Any:
    """Plots the share of each group's tokens that each expert serves.

    Each MoE block has a panel, with experts ordered by their share of the first group.
    The dashed line is an equal share.

    Args:
        usage: usage by group, the result of `keras_moe.analysis.expert_usage`.
        path: see `keras_moe.analysis.plots`, as for `title`.

    Reference: *Multimodal Contrastive Learning with LIMoE*, Figures 17 and 39.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, plots
    >>> tokens = np.array([[8.0, 1.0], [0.0, 4.0]])
    >>> usage = ExpertUsage(["image", "text"], {"block_1": BlockUsage(tokens, tokens)})
    >>> figure = plots.plot_expert_usage(usage, "usage.png")
    """
    if len(usage.groups) > len(_COLOURS):
        raise ValueError(
            f"Expected up to {len(_COLOURS)} groups; received: {list(usage.groups)}"
        )
    columns = min(3, len(usage.blocks))
    rows = -(-len(usage.blocks) // columns)
    figure = new_figure(figsize=(0.6 + 3.4 * columns, 0.9 + 2.1 * rows), dpi=110)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for axis, (name, block) in zip(grid, usage.blocks.items()):
        totals = block.tokens.sum(axis=1, keepdims=True)
        shares = 100 * block.tokens / np.where(totals > 0, totals, 1.0)
        order = np.argsort(-shares[0], kind="stable")
        positions = np.arange(len(order))
        width = 0.8 / len(shares)
        for number, (group, row) in enumerate(zip(usage.groups, shares)):
            left = positions + (number - (len(shares) - 1) / 2) * width
            axis.bar(left, row[order], width, color=_COLOURS[number], label=group)
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
) -> Any:
    """Plots which groups the tokens of each expert belong to.

    There is a panel per MoE block, with a row per expert that serves tokens, most used
    first: its share of all tokens, and their percentages by group.

    Args:
        usage: usage by group, such as by tag (see `keras_moe.analysis.tag_tokens`).
        path: see `keras_moe.analysis.plots`, as for `title`.

    Reference: *Multimodal Contrastive Learning with LIMoE*, Figure 40.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, plots
    >>> tokens = np.array([[8.0, 1.0], [0.0, 4.0]])
    >>> usage = ExpertUsage(["NOUN", "DET"], {"block_1": BlockUsage(tokens, tokens)})
    >>> figure = plots.plot_expert_groups(usage, "words.png")
    """
    tables = {name: group_table(block.tokens) for name, block in usage.blocks.items()}
    rows = max(len(experts) for experts, *_ in tables.values())
    columns = min(3, len(tables))
    size = (1.0 + 0.5 * len(usage.groups), 1.2 + 0.26 * rows)
    lines = -(-len(tables) // columns)
    figure = new_figure(figsize=(columns * size[0], 0.4 + lines * size[1]), dpi=110)
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
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


def group_table(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Experts that serve tokens, their shares, and the split of these by group."""
    totals = tokens.sum(axis=0)
    order = np.argsort(-totals, kind="stable")
    order = order[totals[order] > 0]
    return order, totals[order] / totals.sum(), (tokens[:, order] / totals[order]).T
