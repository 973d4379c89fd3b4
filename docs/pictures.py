"""Draws the pictures of the concepts: `python docs/pictures.py` writes docs/images."""

import os
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from keras_moe.analysis.plots._figure import EXPERT_COLOURS, GREY, new_figure

IMAGES = Path(__file__).resolve().parent / "images"
INK = "#1b1f24"
# Gates of six tokens for three experts.
GATES = np.array(
    [
        [0.7, 0.2, 0.1],
        [0.1, 0.6, 0.3],
        [0.8, 0.1, 0.1],
        [0.2, 0.1, 0.7],
        [0.6, 0.3, 0.1],
        [0.1, 0.2, 0.7],
    ]
)


def canvas(width, height):
    figure = new_figure("none", figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_xlim(0, width)
    axis.set_ylim(0, height)
    axis.set_axis_off()
    return figure, axis


def box(axis, x, y, width, height, text="", colour="none", edge=INK, **style):
    axis.add_patch(
        Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, **style)
    )
    write(axis, x + width / 2, y + height / 2, text)


def write(axis, x, y, text, **style):
    style = {"ha": "center", "va": "center", "fontsize": 9, "color": INK, **style}
    axis.text(x, y, text, **style)


def arrow(axis, start, end, width=1.0, colour=GREY, **style):
    axis.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9,
            lw=width,
            color=colour,
            shrinkA=0,
            shrinkB=0,
            **style,
        )
    )


def router():
    """Tokens, gates as arrows of their width, and experts."""
    figure, axis = canvas(7, 2.3)
    rows = [2.0 - 0.35 * token for token in range(6)]
    for token, y in enumerate(rows):
        box(axis, 0.6, y - 0.13, 0.9, 0.26, f"token {token}")
    for expert in range(3):
        y = 1.9 - 0.75 * expert
        colour = EXPERT_COLOURS[expert]
        box(axis, 4.6, y - 0.22, 1.5, 0.44, f"expert {expert}", f"{colour}55", colour)
        for token in range(6):
            gate = GATES[token, expert]
            is_best = GATES[token].argmax() == expert
            colour_of = colour if is_best else f"{GREY}55"
            arrow(axis, (1.5, rows[token]), (4.6, y), 4 * gate, colour_of)
    write(axis, 3.05, 2.17, "gates")
    return figure


def capacity():
    """Two slots for each expert, and a token that finds none."""
    figure, axis = canvas(7, 1.7)
    for expert in range(3):
        colour = EXPERT_COLOURS[expert]
        x = 0.5 + 2.15 * expert
        write(axis, x + 0.75, 1.5, f"expert {expert}", color=INK)
        chosen = np.flatnonzero(GATES.argmax(axis=1) == expert)
        chosen = chosen[np.argsort(-GATES[chosen, expert], kind="stable")]
        for slot in range(2):
            text = f"token {chosen[slot]}" if slot < len(chosen) else "empty"
            fill = f"{colour}55" if slot < len(chosen) else "none"
            box(axis, x, 1.0 - 0.34 * slot, 1.5, 0.3, text, fill, colour)
        for number, token in enumerate(chosen[2:]):
            y = 0.22 - 0.34 * number
            box(axis, x, y, 1.5, 0.3, f"token {token}: dropped", edge=GREY, ls="--")
    return figure


def group():
    """Two images of four tokens in one group, or in a group each."""
    figure, axis = canvas(7, 1.7)
    for column, (size, text) in enumerate(
        ((2, "examples_per_group=2: both compete"), (1, "a group each: independent"))
    ):
        left = 0.4 + 3.4 * column
        write(axis, left + 1.4, 1.52, text)
        for image in range(2):
            x = left + 1.5 * image
            for token in range(4):
                fill = f"{EXPERT_COLOURS[4 * image]}55"
                spot = x + 0.1 + 0.28 * token, 0.62, 0.24, 0.34
                box(axis, *spot, f"{token}", fill, EXPERT_COLOURS[4 * image])
            write(axis, x + 0.63, 1.12, f"image {image}")
        width = 1.25 + 1.5 * (size - 1)
        for start in range(0, 2, size):
            box(axis, left + 1.5 * start, 0.4, width, 0.9, edge=INK, ls="--", lw=1.2)
            write(axis, left + 1.5 * start + width / 2, 0.2, "group")
    return figure


def dispatch():
    """D sends tokens to slots, and C brings outputs back by gates."""
    figure, axis = canvas(7, 2.2)
    slots = {}
    for expert in range(3):
        chosen = np.flatnonzero(GATES.argmax(axis=1) == expert)
        order = chosen[np.argsort(-GATES[chosen, expert], kind="stable")][:2]
        slots.update({(int(t), 2 * expert + s): expert for s, t in enumerate(order)})
    for column, (name, weighted) in enumerate((("dispatch D", 0), ("combine C", 1))):
        left = 1.2 + 3.1 * column
        write(axis, left + 0.9, 2.05, name)
        for token in range(6):
            for slot in range(6):
                spot = left + 0.3 * slot, 1.65 - 0.24 * token, 0.28, 0.22
                expert = slots.get((token, slot))
                if expert is None:
                    box(axis, *spot, edge=f"{GREY}66", lw=0.6)
                    continue
                text = f"{GATES[token, expert]:.1f}".lstrip("0") if weighted else "1"
                colour = EXPERT_COLOURS[expert]
                box(axis, *spot, text, f"{colour}66", colour, lw=0.8)
            if not column:
                write(axis, left - 0.45, 1.76 - 0.24 * token, f"token {token}")
        for expert in range(3):
            write(axis, left + 0.3 + 0.6 * expert, 0.3, f"expert {expert}", fontsize=7)
        write(axis, left + 0.9, 0.12, "slots", fontsize=7)
    return figure


if __name__ == "__main__":
    for draw in (router, capacity, group, dispatch):
        path = IMAGES / f"concept_{draw.__name__}.svg"
        draw().savefig(path, facecolor="white", metadata={"Date": None})
