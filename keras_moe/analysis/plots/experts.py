"""Plots of what experts specialise in, and of their loads and scores."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.plots._figure import (
    EXPERT_COLOURS,
    TYPE_COLOURS,
    new_figure,
    save_figure,
)

# Hatches distinguish them without colours.
_TYPES = {
    "ffn": ("FFN", ""),
    "constant": ("constant", "///"),
    "copy": ("copy", "..."),
    "zero": ("zero", "xxx"),
}


def plot_ablation(
    ablations: dict[str, Any],
    path: str | os.PathLike | None = None,
    class_names: list[str] | None = None,
    experts_per_model: int = 4,
    least_change: float = 0.5,
    title: str = "Accuracy lost without an expert",
) -> Any:
    """Plots the fraction of accuracy that classes lose without an expert.

    Each model has a row. Bars below zero are classes that gain; the axis ends at -100%.

    Args:
        ablations: dict of results of `keras_moe.analysis.ablate_experts` by model name.
        path: see `keras_moe.analysis.plots`, as for `title`.
        class_names: names of the classes; None for numbers.
        experts_per_model: number of columns.
        least_change: show experts that change the accuracy of a class by this much; if
            there are too few, those with the largest change.

    Reference: *Multilinear Mixture of Experts*, Figures 18 and 19.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import ExpertAblation, plots
    >>> ablation = ExpertAblation(np.arange(2), np.ones(2), np.ones(2), np.eye(2))
    >>> figure = plots.plot_ablation({"2 experts": ablation}, "ablation.png")
    """
    size = (2.3 * experts_per_model + 1, 1.6 * len(ablations) + 0.6)
    figure = new_figure(figsize=size, dpi=110)
    axes = figure.subplots(
        len(ablations), experts_per_model, sharey=True, squeeze=False
    )
    for row, (name, ablation) in zip(axes, ablations.items()):
        changes = ablation.changes
        largest = np.abs(changes).max(axis=1)
        chosen = np.flatnonzero(largest >= least_change)[:experts_per_model]
        if len(chosen) < experts_per_model:
            most = np.argsort(-largest, kind="stable")[:experts_per_model]
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
            if class_names is not None:
                axis.set_xticks(positions, class_names)
    if class_names is None:
        axes[-1, 0].set_xlabel("class", fontsize=8)
    # A class of low accuracy may gain a multiple of it.
    axes[0, 0].set_ylim(max(-105, min(-5, axes[0, 0].get_ylim()[0])), 105)
    return save_figure(figure, path, title)


def plot_expert_load(
    loads: dict[str, Any],
    path: str | os.PathLike | None = None,
    threshold: float = 0.5,
    title: str = "Expert load",
    width: float = 7.0,
) -> Any:
    """Plots the number of tokens for which each expert has a large coefficient.

    Args:
        loads: dict of results of `keras_moe.analysis.expert_load` by model name.
        path: see `keras_moe.analysis.plots`, as for `title`.
        threshold: smallest coefficient that was counted, for the label.
        width: width of the figure in inches.

    Reference: *Multilinear Mixture of Experts*, Figure 22.

    Example:

    >>> from keras_moe.analysis import plots
    >>> figure = plots.plot_expert_load({"3 experts": [5, 0, 2]}, "load.png")
    """
    figure = new_figure(figsize=(width, 0.7 + 1.5 * len(loads)), dpi=110)
    axes = figure.subplots(len(loads), 1, squeeze=False)[:, 0]
    colours = EXPERT_COLOURS
    for axis, (name, load) in zip(axes, loads.items()):
        load = np.asarray(load)
        experts = np.arange(len(load))
        axis.bar(experts, load, color=[colours[e % len(colours)] for e in experts])
        # Without any load, the axis would include negative numbers.
        axis.set_ylim(0, 1.05 * max(load.max(), 1))
        label = f"{name}; {int((load == 0).sum())} without a token"
        axis.set_title(label, fontsize=8, pad=3, parse_math=False)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.tick_params(labelsize=7)
        axis.set_ylabel(f"tokens, a >= {threshold:g}", fontsize=7)
    axes[-1].set_xlabel("expert", fontsize=8)
    return save_figure(figure, path, title)


def plot_load_by_type(
    loads: dict[str, Any],
    path: str | os.PathLike | None = None,
    title: str = "Load of each type of expert",
    width: float = 6.5,
) -> Any:
    """Plots the load of each expert type in each MoE block.

    Args:
        loads: result of `keras_moe.analysis.load_by_type`.
        path: see `keras_moe.analysis.plots`, as for `title`.
        width: width of the figure in inches.

    Reference: *MoE++*, Figure 4.

    Example:

    >>> from keras_moe.analysis import TypeLoads, plots
    >>> shares = {"ffn": 0.6, "zero": 0.2, "copy": 0.1, "constant": 0.1}
    >>> loads = {"block_0": TypeLoads(shares, {**shares, "ffn": 1.2}, 0.0)}
    >>> figure = plots.plot_load_by_type(loads, "loads.png")
    """
    height = 1.1 + 0.42 * len(loads) + (0.3 if title else 0)
    figure = new_figure(figsize=(width, height), dpi=110)
    axis = figure.subplots()
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
    scores: dict[str, Any],
    path: str | os.PathLike | None = None,
    title: str = "Routing scores",
) -> Any:
    """Plots histograms of the tokens' two largest gates.

    Args:
        scores: dict of results of `keras_moe.analysis.routing_scores` by model name.
        path: see `keras_moe.analysis.plots`, as for `title`.

    Reference: *MoE++*, Figure 6.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import RoutingScores, plots
    >>> scores = RoutingScores(np.linspace(0.4, 1, 50), np.linspace(0, 0.4, 50))
    >>> figure = plots.plot_routing_scores({"with gating residuals": scores}, "s.png")
    """
    columns = len(scores)
    size = (4.2 * columns if columns > 1 else 3.6, 3.4 + (0.3 if title else 0))
    figure = new_figure(figsize=size, dpi=110)
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
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
