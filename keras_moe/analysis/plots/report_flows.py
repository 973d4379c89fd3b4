"""The picture of the ways of tokens through experts."""

from typing import Any

from keras_moe.analysis.main_flows import NOBODY, REST, MainFlows
from keras_moe.analysis.plots.figure import COLOURS, GREY, new_figure

LAYERS_IN_A_ROW = 5
_WIDTH = 3.6
_BAR = 0.15
# Not pure black or white, which a page would turn into its own colours.
_DARK, _LIGHT = "#101010", "#fefefe"
_INKS = (_LIGHT, _DARK, _LIGHT, _DARK, _DARK, _LIGHT, _LIGHT)
_INK = dict(zip((*COLOURS, GREY), _INKS))


def draw_flows(flows: MainFlows, names: list[str]) -> Any:
    """Draws an alluvial diagram: layers side by side, ribbons between their experts.

    Rows of up to five layers fit a phone; the next row begins with the last layer of
    the row above.
    """
    count = len(flows.columns)
    if len(names) != count:
        raise ValueError(
            f"Expected a name for each of {count} layers; received: names={names}"
        )
    # Rows of like length, and of one scale.
    rows = max(-(-(count - 1) // (LAYERS_IN_A_ROW - 1)), 1)
    steps = max(-(-(count - 1) // rows), 1)
    starts = range(0, max(count - 1, 1), steps)
    # Room for the name of the smallest node.
    height = min(4.4, max(2.4, 0.23 * max(map(len, flows.columns))))
    figure = new_figure(figsize=(_WIDTH, (height + 0.35) * len(starts)))
    axes = figure.subplots(len(starts), 1, squeeze=False)[:, 0]
    figure.subplots_adjust(
        left=0.01,
        right=0.99,
        bottom=0.02 / len(starts),
        top=1 - 0.28 / (height + 0.35) / len(starts),
        hspace=0.4 / height,
    )
    # Names are wider than bars.
    margin = 0.4 if steps > 2 else 0.25 if steps > 1 else 0.15
    bar = _BAR / (0.98 * _WIDTH) * (steps + 2 * margin)
    for axis, start in zip(axes, starts):
        layers = range(start, min(start + steps + 1, count))
        axis.set_axis_off()
        axis.set_ylim(-0.01, 1.01)
        axis.set_xlim(-margin, steps + margin)
        for place, layer in enumerate(layers[:-1]):
            for number, node in enumerate(flows.columns[layer]):
                own = [
                    ribbon
                    for ribbon in flows.ribbons
                    if (ribbon.layer, ribbon.source) == (layer, number)
                ]
                _draw_ribbons(axis, own, place, bar, _colour(node.name))
        for place, layer in enumerate(layers):
            for node in flows.columns[layer]:
                _draw_node(axis, place, bar, node, 72 * height / 1.02)
            axis.text(
                place,
                1.03,
                _short(names[layer]),
                ha="center",
                va="bottom",
                fontsize=7,
                parse_math=False,
            )
    return figure


def _colour(name):
    """The colour of an expert; neighbours in number differ."""
    return GREY if name in (REST, NOBODY) else COLOURS[int(name) % len(COLOURS)]


def _short(name):
    return name if len(name) <= 12 else f"{name[:11]}…"


def _draw_node(axis, place, bar, node, points):
    from matplotlib.patches import Rectangle

    colour, is_nobody = _colour(node.name), node.name == NOBODY
    axis.add_patch(
        Rectangle(
            (place - bar / 2, node.bottom),
            bar,
            node.height,
            facecolor="none" if is_nobody else colour,
            edgecolor=colour,
            linewidth=0.8 if is_nobody else 0,
            linestyle=":" if is_nobody else "-",
        )
    )
    is_word = node.name in (REST, NOBODY)
    if node.height * points < (16 if is_word else 6.2):
        return
    axis.text(
        place,
        node.bottom + node.height / 2,
        node.name,
        ha="center",
        va="center" if is_word else "center_baseline",
        rotation=90 if is_word else 0,
        fontsize=6,
        color=colour if is_nobody else _INK[colour],
        fontweight="bold",
    )


def _draw_ribbons(axis, ribbons, place, bar, colour):
    """Draws the ribbons of one node, as one path, which takes a third of the bytes."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    left, right = place + bar / 2, place + 1 - bar / 2
    middle = (left + right) / 2
    points, codes = [], []
    for ribbon in ribbons:
        lower, upper = ribbon.start, ribbon.start + ribbon.height
        end_lower, end_upper = ribbon.stop, ribbon.stop + ribbon.end_height
        points += [(left, lower), (middle, lower), (middle, end_lower)]
        points += [(right, end_lower), (right, end_upper), (middle, end_upper)]
        points += [(middle, upper), (left, upper), (left, lower)]
        codes += [Path.MOVETO, *[Path.CURVE4] * 3, Path.LINETO, *[Path.CURVE4] * 3]
        codes.append(Path.CLOSEPOLY)
    if points:
        path = Path(points, codes)
        patch = PathPatch(path, facecolor=colour, alpha=0.45, linewidth=0)
        axis.add_patch(patch).set_clip_on(False)
