"""Markup of one example's routing: maps over its image, and chips of its words.

Maps are drawn in patches of `CELL` units. Colours repeat, so that each patch has the
number of its expert, too. All texts of others are escaped.

Axes: N tokens, E experts.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup, escape

COLOURS = 8
CELL = 10
# Levels of the opacity of a heat map, each of which is one path.
_LEVELS = 5


def expert_map(
    experts: np.ndarray, grid: tuple[int, int], image: str | None, title: str
) -> Markup:
    """A map of the expert of each patch, over the image."""
    paths, numbers = Markup(), Markup()
    for expert, places in _places(experts).items():
        if expert >= 0:
            paths += Markup('<path class="c{}" d="{}"/>').format(
                expert % COLOURS, _squares(places, grid[1])
            )
    for row in range(grid[0]):
        of_row = experts[row * grid[1] : (row + 1) * grid[1]]
        numbers += Markup('<text y="{}">{}</text>').format(
            CELL * row + 7,
            Markup().join(
                Markup('<tspan x="{}">{}</tspan>').format(
                    CELL * column + CELL // 2, expert if expert >= 0 else "x"
                )
                for column, expert in enumerate(of_row.tolist())
            ),
        )
    alt = f"{title}: {counts_in_words(experts, 'patch', 'patches')}"
    return _figure(grid, image, paths + numbers, alt, title)


def heat_map(
    values: np.ndarray, grid: tuple[int, int], image: str | None, title: str
) -> Markup:
    """A map of the part that each patch has in one expert's slots, over the image."""
    largest = max(float(values.max(initial=0.0)), 1e-9)
    levels = np.rint(values / largest * _LEVELS).astype(int)
    paths = Markup()
    for level, places in sorted(_places(levels).items()):
        if level > 0:
            paths += Markup('<path class="h{}" d="{}"/>').format(
                level, _squares(places, grid[1])
            )
    row, column = divmod(int(values.argmax()), grid[1])
    alt = f"{title}, on the patch of row {row + 1}, column {column + 1}"
    return _figure(grid, image, paths, alt, title)


def word_chips(experts: np.ndarray, words: Sequence[str], title: str) -> Markup:
    """The words of a caption with the expert of each."""
    chips = Markup(" ").join(
        Markup('<span class="chip {}">{}<sub>{}</sub></span>').format(
            f"c{expert % COLOURS}" if expert >= 0 else "none",
            word,
            expert if expert >= 0 else "x",
        )
        for word, expert in zip(words, experts.tolist())
    )
    return Markup('<p class="chips"><b>{}</b> {}</p>').format(title, chips)


def legend(expert_types: Sequence[str]) -> Markup:
    """The colours of experts, with the kinds of those that are no FFN."""
    shown = range(min(len(expert_types), 2 * COLOURS))
    chips = Markup(" ").join(
        Markup('<span class="chip c{}">{}{}</span>').format(
            expert % COLOURS,
            expert,
            "" if expert_types[expert] == "ffn" else f" {expert_types[expert]}",
        )
        for expert in shown
    )
    if len(expert_types) > len(shown):
        chips += escape(f" and so on to {len(expert_types) - 1}")
    return Markup('<p class="chips"><b>Experts</b> {}</p>').format(chips)


def counts_in_words(experts: np.ndarray, one: str, many: str) -> str:
    """How many tokens each expert has, such as "expert 3: 5 patches"."""
    counts = Counter(experts.tolist())
    dropped = counts.pop(-1, 0)
    parts = [f"{n} {one if n == 1 else many}" for _, n in counts.most_common()]
    texts = [f"expert {e}: {part}" for (e, _), part in zip(counts.most_common(), parts)]
    if dropped:
        texts.append(f"{dropped} {one if dropped == 1 else many} without an expert")
    return ", ".join(texts)


def _figure(grid, image, content, alt, title):
    picture = Markup("")
    if image is not None:
        picture = Markup('<use href="#{}"/>').format(image)
    return Markup(
        '<figure class="map"><svg viewBox="0 0 {} {}" role="img" aria-label="{}">'
        "{}{}</svg><figcaption>{}</figcaption></figure>"
    ).format(CELL * grid[1], CELL * grid[0], alt, picture, content, title)


def _places(values):
    """The places of each value, in the order of the values."""
    return {
        value: np.flatnonzero(values == value) for value in sorted({*values.tolist()})
    }


def _squares(places, columns):
    """A path of patches, in which neighbours in a row are one rectangle."""
    path, runs = "", []
    for place in places.tolist():
        row, column = divmod(place, columns)
        if runs and runs[-1][0] == row and sum(runs[-1][1:]) == column:
            runs[-1][2] += 1
        else:
            runs.append([row, column, 1])
    for row, column, width in runs:
        across = CELL * width
        path += f"M{CELL * column} {CELL * row}h{across}v{CELL}h-{across}z"
    return path
