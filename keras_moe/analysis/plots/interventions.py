"""Pictures of the effects of edits and of truncated kernels."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.plots.figure import new_figure, save_figure


def plot_subpopulations(
    before: Any,
    after: Any,
    path: str | os.PathLike,
    target_names: Any = None,
    attribute_names: Any = None,
    target: tuple[int, int] | None = None,
    title: str = "Accuracy by subpopulation",
) -> None:
    """Draws accuracies before and after an edit, and saves the picture.

    The third panel is their difference.

    Args:
        before: `FairnessMetrics` before the edit; see
            `keras_moe.analysis.fairness_metrics`.
        after: `FairnessMetrics` of the edited model.
        path: path of the picture; its suffix is the format.
        target_names: names of the target's values, the rows; None numbers them.
        attribute_names: names of the attribute's values, the columns.
        target: subpopulation that the edit was for, which gets a frame.
        title: title above the picture.

    Raises:
        ValueError: if the metrics are of different subpopulations.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figure 25.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import fairness_metrics, plots
    >>> metrics = fairness_metrics([1, 0, 0, 1], [0, 0, 1, 1], [0, 1, 0, 1])
    >>> path = os.path.join(tempfile.mkdtemp(), "subpopulations.png")
    >>> plots.plot_subpopulations(metrics, metrics, path, target=(1, 0))
    >>> os.path.exists(path)
    True
    """
    first, second = before.accuracies, after.accuracies
    if first.shape != second.shape:
        raise ValueError(
            "Expected metrics of the same subpopulations; received: shapes "
            f"{first.shape} and {second.shape}"
        )
    rows = target_names or [f"target {i}" for i in range(first.shape[0])]
    columns = attribute_names or [f"attribute {i}" for i in range(first.shape[1])]
    figure = new_figure(figsize=(9.6, 1.3 + 0.8 * len(rows)), dpi=110)
    axes = figure.subplots(1, 3)
    reach = max(np.abs(second - first).max(), 0.01)
    for axis, name, values, limits, colours in (
        (axes[0], "before", first, (0, 1), "viridis"),
        (axes[1], "after", second, (0, 1), "viridis"),
        (axes[2], "difference", second - first, (-reach, reach), "RdBu"),
    ):
        axis.imshow(values, vmin=limits[0], vmax=limits[1], cmap=colours, aspect="auto")
        axis.set_xticks(range(len(columns)), columns, fontsize=8)
        axis.set_yticks(range(len(rows)), rows if axis is axes[0] else [], fontsize=8)
        axis.set_title(name, fontsize=9)
        for (row, column), value in np.ndenumerate(values):
            text = f"{value:+.3f}" if name == "difference" else f"{value:.3f}"
            share = (value - limits[0]) / (limits[1] - limits[0])
            light = 0.25 < share < 0.75 if name == "difference" else share > 0.5
            axis.text(
                column, row, text, ha="center", va="center", fontsize=9,
                color="black" if light else "white",
            )  # fmt: skip
        if target is not None:
            x, y = target[1] + np.array([-1, 1, 1, -1, -1]) * 0.47, target[0]
            y = y + np.array([-1, -1, 1, 1, -1]) * 0.47
            axis.plot(x, y, color="lime", linewidth=2.5)
    save_figure(figure, path, title)
