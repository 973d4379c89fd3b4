"""Pictures of the specialisation of experts."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.plots.figure import new_figure, save_figure, write_figure
from keras_moe.analysis.specialisation import expert_load


def plot_ablation(
    ablations: dict[str, Any],
    path: str | os.PathLike,
    class_names: list[str] | None = None,
    experts_per_model: int = 4,
    least_change: float = 0.5,
    title: str = "Accuracy lost without an expert",
) -> None:
    """Draws the fraction of accuracy that classes lose without an expert; saves it.

    Each model has a row, with its first experts that matter. Bars below zero are
    classes that gain; the axis ends at -100%.

    Args:
        ablations: dict from the name of a model to its `ExpertAblation`; see
            `keras_moe.analysis.ablate_experts`.
        path: path of the picture; its suffix is the format.
        class_names: names of the classes; None numbers them.
        experts_per_model: number of columns.
        least_change: least change of the accuracy of some class by an expert that is
            shown; where there are fewer such experts, those with the largest change
            are shown, too.
        title: title above the picture.

    Raises:
        ValueError: if there is no model.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figures 18 and 19.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import ExpertAblation, plots
    >>> ablation = ExpertAblation(np.arange(2), np.ones(2), np.ones(2), np.eye(2))
    >>> path = os.path.join(tempfile.mkdtemp(), "ablation.png")
    >>> plots.plot_ablation({"2 experts": ablation}, path)
    >>> os.path.exists(path)
    True
    """
    if not ablations:
        raise ValueError("Expected at least one model; received: ablations={}")
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
        places = np.arange(changes.shape[1])
        for axis, index in zip(row, chosen):
            axis.bar(places, 100 * changes[index], width=1.0, color="tab:blue")
            axis.axhline(0, color="black", linewidth=0.5)
            score = ablation.polysemanticity[index]
            axis.set_title(
                f"expert {ablation.experts[index]}, p = {score:.2f}", fontsize=8, pad=3
            )
            axis.tick_params(labelsize=6)
            if class_names is not None:
                axis.set_xticks(places, class_names)
    if class_names is None:
        axes[-1, 0].set_xlabel("class", fontsize=8)
    # A class of low accuracy may gain several times of it.
    axes[0, 0].set_ylim(max(-105, min(-5, axes[0, 0].get_ylim()[0])), 105)
    save_figure(figure, path, title)


def plot_polysemanticity(
    scores: dict[str, dict[int, list[float]]],
    path: str | os.PathLike,
    title: str = "More experts, each with less to do",
) -> None:
    """Draws the experts' mean polysemanticity against their number; saves the picture.

    Args:
        scores: dict from the name of a model to a dict from the number of experts to
            the mean polysemanticities of the runs.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there is nothing to draw.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figure 3.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> path = os.path.join(tempfile.mkdtemp(), "polysemanticity.png")
    >>> plots.plot_polysemanticity({"final": {2: [2.0, 2.2], 4: [1.1, 1.0]}}, path)
    >>> os.path.exists(path)
    True
    """
    if not scores or not all(scores.values()):
        raise ValueError(f"Expected scores of models; received: scores={scores}")
    figure = new_figure(figsize=(5.2, 3.7), dpi=110)
    axis = figure.subplots()
    counts = sorted({count for rows in scores.values() for count in rows})
    for name, rows in scores.items():
        own = sorted(rows)
        axis.errorbar(
            own,
            [np.mean(rows[count]) for count in own],
            yerr=[np.std(rows[count], ddof=len(rows[count]) > 1) for count in own],
            marker="o",
            capsize=3.0,
            label=name,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("experts")
    axis.set_ylabel("mean class-level polysemanticity")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    axis.set_title(title, fontsize=11)
    figure.tight_layout()
    write_figure(figure, path)


def plot_expert_load(
    routings: dict[str, Any],
    path: str | os.PathLike,
    threshold: float = 0.5,
    title: str = "Expert load",
) -> None:
    """Draws the number of tokens that each expert serves, and saves the picture.

    Args:
        routings: dict from the name of a model to a `Routing` of arrays (B, N, E).
        path: path of the picture; its suffix is the format.
        threshold: lowest coefficient that counts.
        title: title above the picture.

    Raises:
        ValueError: if there is no model, or an array does not fit.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figure 22.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import plots
    >>> from keras_moe.ops import Routing
    >>> path = os.path.join(tempfile.mkdtemp(), "load.png")
    >>> plots.plot_expert_load({"2 experts": Routing(*[np.ones((3, 1, 2))] * 6)}, path)
    >>> os.path.exists(path)
    True
    """
    if not routings:
        raise ValueError("Expected at least one model; received: routings={}")
    loads = {name: expert_load(record, threshold) for name, record in routings.items()}
    write_figure(draw_expert_loads(loads, threshold, title), path)


def draw_expert_loads(
    loads: dict[str, Any], threshold: float = 0.5, title: str = "", width: float = 7.0
) -> Any:
    """The figure of `plot_expert_load`."""
    height = 0.7 + 1.5 * len(loads)
    figure = new_figure(figsize=(width, height), dpi=110)
    axes = figure.subplots(len(loads), 1, squeeze=False)[:, 0]
    colours = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7")
    for axis, (name, load) in zip(axes, loads.items()):
        load = np.asarray(load)
        experts = np.arange(len(load))
        axis.bar(experts, load, color=[colours[e % len(colours)] for e in experts])
        # An axis of no load at all would have negative numbers.
        axis.set_ylim(0, 1.05 * max(load.max(), 1))
        unused = int((load == 0).sum())
        axis.set_title(
            f"{name}; {unused} without a token", fontsize=8, pad=3, parse_math=False
        )
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.tick_params(labelsize=7)
        axis.set_ylabel(f"tokens, a >= {threshold:g}", fontsize=7)
    axes[-1].set_xlabel("expert", fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    return figure
