"""Pictures of the share of the work that the most used experts do."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.plots.figure import new_figure, save_figure

# Lines of a panel that have a name each.
_NUM_NAMES = 6


def plot_coverage(
    curves: dict[str, dict[str, Any]],
    path: str | os.PathLike,
    title: str = "Coverage by the experts that are kept",
) -> None:
    """Draws the coverage by the number of pruned experts, and saves the picture.

    There is a panel for each group, such as a modality, and a line for each MoE block;
    the bold one is their mean.

    Args:
        curves: dict from the name of a group to the result of
            `keras_moe.analysis.coverage_curves` for it.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there is no group or no block.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, Figure 13.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import CoverageCurve, plots
    >>> curve = CoverageCurve(np.array([1, 0]), np.array([0.75, 1.0]))
    >>> path = os.path.join(tempfile.mkdtemp(), "coverage.png")
    >>> plots.plot_coverage({"text": {"block_1": curve}}, path)
    >>> os.path.exists(path)
    True
    """
    if not curves or not all(curves.values()):
        raise ValueError(
            "Expected at least one group with at least one block; "
            f"received: curves={ {name: list(x) for name, x in curves.items()} }"
        )
    save_figure(draw_coverage(curves), path, title)


def draw_coverage(curves: dict[str, dict[str, Any]]) -> Any:
    """Draws the coverage by the number of pruned experts; see `plot_coverage`."""
    figure = new_figure(figsize=(0.4 + 3.1 * len(curves), 2.9), dpi=110)
    axes = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
    for axis, (group, blocks) in zip(axes, curves.items()):
        shades = np.linspace(0.0, 1.0, len(blocks))
        for shade, (name, curve) in zip(shades, blocks.items()):
            pruned, percent = _points(curve)
            colour = (0.25, 0.42 + 0.38 * shade, 0.85 - 0.2 * shade)
            # The first and the last of many: the shade says which lie between.
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
        axis.grid(color="#808080", alpha=0.25, zorder=0)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("% covered by the others", fontsize=8)
    axes[-1].legend(loc="lower left", fontsize=7, frameon=False)
    figure.tight_layout(pad=0.5)
    return figure


def _points(curve):
    """The numbers of pruned experts, and the percentages that are left."""
    kept = np.arange(len(curve.covered), -1, -1)
    percent = 100 * np.concatenate([[0.0], np.asarray(curve.covered)])
    return len(curve.covered) - kept, percent[kept]
