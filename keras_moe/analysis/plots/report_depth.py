"""Pictures of figures of routers by depth, for reports.

Axes: L layers.
"""

from typing import Any

import numpy as np

from keras_moe.analysis.plots.figure import COLOURS, new_figure, plain_axis

_STYLES = ("-", "--", ":", "-.")


class Line:
    """A line of `draw_depth`."""

    def __init__(
        self,
        places: Any,
        values: Any,
        band: Any = None,
        colour: int = 0,
        style: int = 0,
    ):
        self.places, self.values, self.band = places, values, band
        self.colour, self.style = colour, style


def draw_depth(
    lines: dict[str, Line],
    names: list[str],
    label: str,
    title: str = "",
    top: float | None = None,
) -> Any:
    """Draws figures of layers over the depth."""
    figure = new_figure(figsize=(3.5, 2.6))
    axis = figure.subplots()
    for name, line in lines.items():
        colour = COLOURS[line.colour]
        axis.plot(
            line.places,
            line.values,
            _STYLES[line.style],
            marker="o",
            ms=3.5,
            lw=1.4,
            color=colour,
            label=name,
        )
        if line.band is not None:
            low, high = line.band
            axis.fill_between(line.places, low, high, color=colour, alpha=0.2, lw=0)
    numbers = [name.removeprefix("block_") for name in names]
    is_short = all(number.isdigit() for number in numbers)
    step = -(-len(names) // 14)
    places = np.arange(len(names))[::step]
    texts = (numbers if is_short else names)[::step]
    turned = {} if is_short or len(texts) < 3 else {"rotation": 90}
    axis.set_xticks(places, texts, parse_math=False, **turned)
    axis.set_xlim(-0.4, len(names) - 0.6)
    axis.set_xlabel("block" if is_short else "layer", fontsize=8)
    axis.set_ylabel(label, fontsize=8)
    low, high = axis.get_ylim()
    axis.set_ylim(0, (top or max(high, 1e-6)) * 1.04)
    plain_axis(axis, title)
    axis.grid(axis="y", color="#808080", alpha=0.25, lw=0.6)
    if len(lines) > 1:
        axis.legend(
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=2,
            fontsize=7.5,
            frameon=False,
            borderaxespad=0.2,
            handlelength=2.6,
            columnspacing=1.0,
        )
    figure.tight_layout(pad=0.4)
    return figure
