"""The picture of the routers' health over a training run."""

import csv
import os

import numpy as np

from keras_moe.analysis.plots.figure import new_figure, save_figure

LINES = {
    "load_entropy": "entropy of the load",
    "dead_experts": "dead experts",
    "dropped_choices": "dropped choices",
    "mean_max_gate": "largest gate",
}


def plot_router_health(
    csv_path: str | os.PathLike,
    path: str | os.PathLike,
    title: str = "Router health",
) -> None:
    """Draws each layer's load over the steps, and its entropy, drops and gates.

    Args:
        csv_path: path of a file that `keras_moe.training.RouterHealth` has written.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if the file has no rows.
        ImportError: if matplotlib is not installed.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> folder = tempfile.mkdtemp()
    >>> health = os.path.join(folder, "health.csv")
    >>> with open(health, "w") as file:
    ...     _ = file.write("step,layer,load_entropy,dead_experts,dropped_choices,")
    ...     _ = file.write("mean_max_gate,expert_shares\\n")
    ...     _ = file.write("10,block_1,0.9,0,,0.6,0.3 0.7\\n")
    >>> picture = os.path.join(folder, "health.png")
    >>> plots.plot_router_health(health, picture)
    >>> os.path.exists(picture)
    True
    """
    layers = {}
    with open(csv_path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            layers.setdefault(row["layer"], []).append(row)
    if not layers:
        raise ValueError(f"Expected rows of router health; received: {csv_path}")
    figure = new_figure(figsize=(9, 2.2 * len(layers) + 0.8), dpi=110)
    grid = figure.subplots(len(layers), 2, squeeze=False, sharex=True)
    for (name, rows), (load, lines) in zip(layers.items(), grid):
        steps = np.array([int(row["step"]) for row in rows])
        shares = np.array([row["expert_shares"].split() for row in rows], "float64")
        _draw_load(figure, load, steps, shares)
        load.set_ylabel(f"{name}\nexpert", fontsize=9)
        for number, (column, label) in enumerate(LINES.items()):
            values = [float(row[column] or "nan") for row in rows]
            if not np.isnan(values).all():
                # A layer may lack some lines; the others keep their colours.
                colour = f"C{number}"
                lines.plot(steps, values, color=colour, marker=".", label=label)
        lines.set_ylim(-0.03, 1.03)
        lines.grid(alpha=0.25)
    grid[0, 0].set_title("load: share of an equal one", fontsize=9)
    # The legend stands beside the lines, which may be anywhere between 0 and 1.
    grid[0, 1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    for axis in grid[-1]:
        axis.set_xlabel("step")
    save_figure(figure, path, title)


def _draw_load(figure, axis, steps, shares):
    """Draws a heat map, in which 1 is an expert's equal share."""
    relative = shares.T * shares.shape[1]
    # A cell goes from a measurement to the next; the last is as wide as its neighbour.
    last = steps[-1] - steps[-2] if len(steps) > 1 else 1
    edges = np.append(steps, steps[-1] + last)
    cells = axis.pcolormesh(
        edges,
        np.arange(shares.shape[1] + 1) - 0.5,
        relative,
        vmin=0.0,
        vmax=max(2.0, float(relative.max())),
        cmap="viridis",
    )
    axis.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(cells, ax=axis)
