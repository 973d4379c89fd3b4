"""Pictures of experts by class, for the report."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_moe.analysis.plots.figure import new_figure

# The longest name of a class on an axis.
_LONGEST = 12


def draw_class_heat(
    values: Any,
    experts: Sequence[str],
    class_names: Sequence[str],
    label: str,
    diverging: bool = False,
    width: float = 3.6,
) -> Any:
    """The figure of a number for each expert and class, by colour."""
    values = np.asarray(values, float)
    if values.shape != (len(experts), len(class_names)) or not values.size:
        raise ValueError(
            "Expected values (experts, classes), one of each at least; received: "
            f"shape={values.shape}, {len(experts)} experts, {len(class_names)} classes"
        )
    names = [
        name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
        for name in map(str, class_names)
    ]
    longest = max(map(len, names))
    height = 1.15 + 0.2 * len(experts) + (0.07 * longest if longest > 2 else 0.1)
    figure = new_figure(figsize=(width, height), dpi=110)
    axis = figure.subplots()
    top = max(float(np.nanmax(np.abs(values), initial=0.0)), 1e-9)
    limits = {"vmin": 0, "vmax": top, "cmap": "viridis"}
    if diverging:
        limits = {"vmin": -top, "vmax": top, "cmap": "PuOr_r"}
    heat = axis.imshow(values, aspect="auto", **limits)
    axis.set_xticks(
        range(len(names)), names, fontsize=7, rotation=90 if longest > 2 else 0,
        parse_math=False,
    )  # fmt: skip
    axis.set_yticks(range(len(experts)), experts, fontsize=7, parse_math=False)
    axis.set_ylabel("expert", fontsize=8)
    axis.set_xlabel("class", fontsize=8)
    axis.tick_params(length=0)
    bar = figure.colorbar(heat, ax=axis, orientation="horizontal", location="top")
    bar.set_label(label, fontsize=8)
    bar.locator.set_params(nbins=5)
    bar.update_ticks()
    bar.ax.tick_params(labelsize=7)
    figure.tight_layout()
    return figure
