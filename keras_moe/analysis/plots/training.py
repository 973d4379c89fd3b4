"""Plots of training runs."""

import csv
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keras_moe._files import read_text
from keras_moe.analysis.plots import _figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEALTH = {
    "load_entropy": "entropy of the load",
    "dead_experts": "dead experts",
    "dropped_choices": "dropped choices",
    "mean_max_gate": "largest gate",
}


def plot_training_history(
    history: Mapping[str, Sequence[float]],
    path: str | os.PathLike | None = None,
    title: str = "Training",
) -> "Figure":
    """Plots loss and metrics over epochs, one panel per metric.

    Args:
        history: dict of lists with one value per epoch, such as `fit(...).history`:
            "loss", "accuracy" or other metrics, prefixed with `"val_"` for test data.

    Reference: *Multilinear Mixture of Experts*, Figure 10.

    Example:

    >>> from keras_moe.analysis import plots
    >>> history = {"loss": [2.0, 1.0], "val_loss": [2.1, 1.2], "accuracy": [0.3, 0.6]}
    >>> figure = plots.plot_training_history(history, "training.png")
    """
    names = list(dict.fromkeys(name.removeprefix("val_") for name in history))
    figure, (axes,) = _figure.new_axes(4.5 * len(names), 3.4, columns=len(names))
    for axis, name in zip(axes, names):
        lines = ((name, "training", "."), (f"val_{name}", "test", "o"))
        for key, label, marker in lines:
            values = history.get(key)
            if values is not None:
                epochs = np.arange(1, len(values) + 1)
                # Markers keep a single epoch visible.
                marker = marker if len(values) < 20 else ""
                axis.plot(epochs, values, marker=marker, label=label)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    return _figure.save_figure(figure, path, title)


def plot_errors_over_costs(
    errors: Mapping[str, Sequence[float]],
    costs: Mapping[str, Mapping[str, float]],
    path: str | os.PathLike | None = None,
    title: str = "Errors over costs",
) -> "Figure":
    """Plots the errors of models over each cost: a dot for each seed, bars for means.

    Args:
        errors: test errors of each model by seed, as shares.
        costs: the cost of each model, by the label of its axis.

    Example:

    >>> from keras_moe.analysis import plots
    >>> errors = {"experts": [0.10, 0.12], "dense": [0.13, 0.14]}
    >>> costs = {"MFLOPs": {"experts": 5.9, "dense": 5.9}}
    >>> figure = plots.plot_errors_over_costs(errors, costs, "errors.png")
    """
    figure, (axes,) = _figure.new_axes(
        4.2 * len(costs), 3.4, columns=len(costs), sharey=True
    )
    for axis, (label, values) in zip(axes, costs.items()):
        # Models of equal cost stand side by side.
        width = 0.015 * max(values.values())
        for number, (name, seeds) in enumerate(errors.items()):
            percent = 100 * np.asarray(seeds, "float64")
            x = values[name] + width * (number - (len(errors) - 1) / 2)
            colour = _figure.EXPERT_COLOURS[number % len(_figure.EXPERT_COLOURS)]
            axis.plot([x] * len(percent), percent, "o", color=colour, ms=4, alpha=0.6)
            style = {"color": colour, "ms": 16, "mew": 2.5, "label": name}
            axis.plot(x, percent.mean(), "_", **style)
        axis.margins(x=0.1, y=0.15)
        axis.set_xlim(left=0)
        axis.set_xlabel(label, fontsize=9)
        axis.grid(color=_figure.GREY, alpha=0.25)
        _figure.plain_axis(axis)
    axes[0].set_ylabel("test error, %", fontsize=9)
    axes[-1].legend(fontsize=8, markerscale=0.5)
    return _figure.save_figure(figure, path, title)


def plot_router_health(
    csv_path: str | os.PathLike,
    path: str | os.PathLike | None = None,
    title: str = "Router health",
) -> "Figure":
    """Draws each layer's load over the steps, and its entropy, drops and gates.

    Args:
        csv_path: path of a file that `keras_moe.training.RouterHealth` has written.

    Example:

    >>> from keras_moe.analysis import plots
    >>> with open("health.csv", "w") as file:
    ...     _ = file.write("step,layer,load_entropy,dead_experts,dropped_choices,")
    ...     _ = file.write("mean_max_gate,expert_shares\\n")
    ...     _ = file.write("10,block_1,0.9,0,,0.6,0.3 0.7\\n")
    >>> figure = plots.plot_router_health("health.csv", "health.png")
    """
    layers = {}
    for row in csv.DictReader(read_text(csv_path).splitlines()):
        layers.setdefault(row["layer"], []).append(row)
    height = 2.2 * len(layers) + 0.8
    figure, grid = _figure.new_axes(9, height, len(layers), 2, sharex=True)
    for (name, rows), (load, lines) in zip(layers.items(), grid):
        steps = np.array([int(row["step"]) for row in rows])
        shares = np.array([row["expert_shares"].split() for row in rows], "float64")
        _draw_load(figure, load, steps, shares)
        load.set_ylabel(f"{name}\nexpert", fontsize=9)
        for number, (column, label) in enumerate(_HEALTH.items()):
            values = [float(row[column] or "nan") for row in rows]
            if not np.isnan(values).all():
                # A layer may lack some lines; the others keep their colours.
                colour = f"C{number}"
                lines.plot(steps, values, color=colour, marker=".", label=label)
        lines.set_ylim(-0.03, 1.03)
        lines.grid(alpha=0.25)
    grid[0, 0].set_title("load: share of an equal one", fontsize=9)
    # Outside, since the lines may be anywhere between 0 and 1.
    grid[0, 1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    for axis in grid[-1]:
        axis.set_xlabel("step")
    return _figure.save_figure(figure, path, title)


def _draw_load(figure, axis, steps, shares):
    """Draws a heat map of loads, relative to an equal share."""
    relative = shares.T * shares.shape[1]
    # A cell extends to the next measurement; the last is as wide as the one before.
    last = steps[-1] - steps[-2] if len(steps) > 1 else 1
    edges = np.append(steps, steps[-1] + last)
    rows = np.arange(shares.shape[1] + 1) - 0.5
    limits = {"vmin": 0.0, "vmax": max(2.0, float(relative.max()))}
    cells = axis.pcolormesh(edges, rows, relative, cmap="viridis", **limits)
    axis.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(cells, ax=axis)
