"""The picture of truncated kernels."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.plots.figure import new_figure, write_figure


def plot_truncated_svd(
    results: dict[str, Any],
    path: str | os.PathLike,
    title: str = "MLPs with their largest singular values alone",
) -> None:
    """Draws a model's score by the fraction of singular values kept, and saves it.

    Args:
        results: dict from the name of a model to its `TruncatedSVD`; see
            `keras_moe.analysis.truncated_svd`.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there is no model.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figure 7.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import TruncatedSVD, plots
    >>> path = os.path.join(tempfile.mkdtemp(), "svd.png")
    >>> result = TruncatedSVD([0.25, 0.5], [0.7, 0.9], 0.95, [])
    >>> plots.plot_truncated_svd({"mixer": result}, path)
    >>> os.path.exists(path)
    True
    """
    if not results:
        raise ValueError("Expected at least one model; received: results={}")
    figure = new_figure(figsize=(5.2, 3.7), dpi=110)
    axis = figure.subplots()
    for name, row in results.items():
        order = np.argsort(row.shares)
        shares = [100 * row.shares[i] for i in order]
        (line,) = axis.plot(
            shares, [row.scores[i] for i in order], marker="o", label=name
        )
        axis.axhline(
            row.full, linestyle="--", color=line.get_color(), label=f"{name}, whole"
        )
    axis.set_xlabel("% of singular values kept")
    axis.set_ylabel("score")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    axis.set_title(title, fontsize=11)
    figure.tight_layout()
    write_figure(figure, path)
