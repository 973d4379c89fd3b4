"""Pictures of muMoE heads beside linear, dense and sparse ones."""

import os

import numpy as np

from keras_moe.analysis.plots.figure import new_figure, save_figure


def plot_matched_heads(
    losses: dict[str, dict[int, list[float]]],
    ranks: dict[str, dict[int, int]],
    linear: list[float],
    path: str | os.PathLike,
    title: str = "Heads with the parameters of a linear one",
) -> None:
    """Draws validation loss and expert matrix rank by the number of experts.

    Args:
        losses: dict from the name of a factorisation to a dict from the number of
            experts to the losses of the runs.
        ranks: dict of the same keys to the largest rank of an expert's matrix.
        linear: losses of the runs with a linear head.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there is nothing to draw.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figure 23.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> path = os.path.join(tempfile.mkdtemp(), "matched.png")
    >>> losses = {"CP": {2: [0.4, 0.5], 4: [0.3, 0.4]}}
    >>> plots.plot_matched_heads(losses, {"CP": {2: 38, 4: 36}}, [0.5], path)
    >>> os.path.exists(path)
    True
    """
    if not losses or not linear or not all(losses.values()):
        raise ValueError(
            f"Expected losses of heads; received: losses={losses}, linear={linear}"
        )
    figure = new_figure(figsize=(9.0, 3.6), dpi=110)
    left, right = figure.subplots(1, 2)
    for name, rows in losses.items():
        _with_spread(left, rows, name)
        own = sorted(ranks[name])
        right.plot(own, [ranks[name][count] for count in own], marker="o", label=name)
    line = left.axhline(np.mean(linear), linestyle="--", color="gray", label="linear")
    # The other names are those of the right panel.
    left.legend(handles=[line], fontsize=8)
    right.legend(fontsize=8)
    left.set_ylabel("validation loss")
    right.set_ylabel("largest rank of an expert's matrix")
    right.set_ylim(bottom=0)
    counts = sorted({count for rows in losses.values() for count in rows})
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.set_xlabel("experts")
        axis.grid(alpha=0.25)
    save_figure(figure, path, title)


def plot_head_capacity(
    accuracies: dict[str, dict[int, list[float]]],
    path: str | os.PathLike,
    title: str = "Heads by their parameters",
) -> None:
    """Draws heads' accuracy against their parameters, and saves the picture.

    Args:
        accuracies: dict from the name of a kind of heads to a dict from the number of
            parameters to the accuracies of the runs.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there is nothing to draw.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figure 24.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> path = os.path.join(tempfile.mkdtemp(), "capacity.png")
    >>> plots.plot_head_capacity({"CP": {4000: [0.8, 0.9], 9000: [0.9]}}, path)
    >>> os.path.exists(path)
    True
    """
    if not accuracies or not all(accuracies.values()):
        raise ValueError(
            f"Expected accuracies of heads; received: accuracies={accuracies}"
        )
    figure = new_figure(figsize=(5.8, 3.9), dpi=110)
    axis = figure.subplots()
    for name, rows in accuracies.items():
        shares = {
            count: [100 * value for value in values] for count, values in rows.items()
        }
        _with_spread(axis, shares, name)
    axis.set_xscale("log", subs=())
    low, high = axis.get_xlim()
    ticks = [digit * 10**power for power in range(12) for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_xlabel("parameters of the head")
    axis.set_ylabel("validation accuracy (%)")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    save_figure(figure, path, title)


def _with_spread(axis, rows, name):
    """Means over runs by number, with their standard deviations."""
    own = sorted(rows)
    axis.errorbar(
        own,
        [np.mean(rows[count]) for count in own],
        yerr=[np.std(rows[count], ddof=len(rows[count]) > 1) for count in own],
        marker="o",
        capsize=3.0,
        label=name,
    )
