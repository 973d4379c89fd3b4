"""HTML of sections, with untrusted text escaped; patches of maps have `CELL` units.

Axes: N tokens, E experts, K entries kept per token, R rows, C columns, T tile size.
"""

import base64
import functools
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike
from PIL import Image

from keras_moe.ops import Routing

COLOURS = 8
CELL = 10
# Opacity levels of a heat map, each drawn as one path.
_LEVELS = 5
_SMALLEST_TILE = 12
_GAP = 1
# A packed entry is an unsigned integer: the expert in the high bits, one bit for
# whether it serves the token, and the value as a fraction of the largest.
VALUE_BITS = 15
_LARGEST = 2**VALUE_BITS - 1
ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


@functools.cache
def parts() -> Any:
    """The macros of parts.html."""
    return ENVIRONMENT.get_template("parts.html").module


# Sprites: many small images in one picture, with labels next to its rows.


def drawable(image: np.ndarray) -> np.ndarray:
    """Averages channels of an image unless it has one or three."""
    if image.shape[-1] in (1, 3):
        return image
    return image.mean(axis=-1, keepdims=True)


def tile_of(image: ArrayLike, size: int) -> np.ndarray:
    image = drawable(np.asarray(image, "float32"))
    pixels = np.clip(np.nan_to_num((image + 1.0) * 127.5), 0.0, 255.0)
    pixels = np.broadcast_to(np.round(pixels), (*image.shape[:2], 3)).astype("uint8")
    # Averages large images, and keeps the pixels of small ones sharp.
    is_smaller = max(image.shape[:2]) > size
    method = Image.Resampling.BOX if is_smaller else Image.Resampling.NEAREST
    return np.asarray(Image.fromarray(pixels).resize((size, size), method))


def patch_tile(
    image: ArrayLike, grid: tuple[int, int], index: int, size: int
) -> np.ndarray:
    """A tile with a patch in the middle of its dimmed surroundings."""
    image = np.asarray(image, "float32")
    height, width = image.shape[0] // grid[0], image.shape[1] // grid[1]
    row, column = divmod(int(index), grid[1])
    margins = (height + 1) // 2, (width + 1) // 2
    top, left = row * height, column * width
    # Grey beyond the image's border.
    padded = np.pad(image, [(m, m) for m in margins] + [(0, 0)])
    area = padded[top : top + height + 2 * margins[0]]
    area = area[:, left : left + width + 2 * margins[1]]
    tile = tile_of(area, size).astype("float32")
    inside = np.zeros(tile.shape[:2], bool)
    edges = [
        round(size * margin / (length + 2 * margin))
        for margin, length in zip(margins, (height, width))
    ]
    inside[edges[0] : size - edges[0], edges[1] : size - edges[1]] = True
    # Dimmed towards mid-grey.
    dimmed = 0.35 * tile + 0.65 * 128.0
    return np.where(inside[..., None], tile, dimmed).astype("uint8")


def sprite(tiles: ArrayLike, max_bytes: int = 60_000) -> tuple[str, int, int]:
    """Joins tiles (R, C, T, T, 3 or 4) in a small picture: data URI, width, height."""
    tiles = np.asarray(tiles)
    sheet = whole = Image.fromarray(sheet_of(tiles))
    content, size = _webp(sheet, max_bytes), tiles.shape[2]
    while len(content) > max_bytes and size > _SMALLEST_TILE:
        size = size * 3 // 4
        scale = size / tiles.shape[2]
        shape = [max(round(length * scale), 1) for length in whole.size]
        sheet = whole.resize(shape, Image.Resampling.BOX)
        content = _webp(sheet, max_bytes)
    text = base64.b64encode(content).decode("ascii")
    return f"data:image/webp;base64,{text}", *whole.size


def _webp(sheet, max_bytes):
    """A picture as WebP, at the best quality that fits."""
    for quality in (85, 65, 45):
        content = io.BytesIO()
        sheet.save(content, "webp", quality=quality, method=4)
        if content.tell() <= max_bytes:
            break
    return content.getvalue()


def sprite_figure(
    tiles: ArrayLike, names: list[str], alt: str, caption: str, max_bytes: int = 60_000
) -> Markup:
    """A sprite with a label next to each row."""
    return parts().sprite(names, *sprite(tiles, max_bytes), alt, caption)


def sheet_of(tiles: np.ndarray) -> np.ndarray:
    rows, columns, size, _, channels = tiles.shape
    step = size + _GAP
    sheet = np.zeros((rows * step - _GAP, columns * step - _GAP, 4), "uint8")
    for row in range(rows):
        for column in range(columns):
            area = sheet[row * step :, column * step :][:size, :size]
            area[..., 3] = 255
            area[..., :channels] = tiles[row, column]
    return sheet


# Maps over an image, and chips of words.


def expert_map(
    experts: np.ndarray, grid: tuple[int, int], image: str | None, title: str
) -> Markup:
    """A map of each patch's expert, over the image."""
    paths = [
        (f"c{expert % COLOURS}", _squares(patches, grid[1]))
        for expert, patches in _patches_by_value(experts).items()
        if expert >= 0
    ]
    counts = Counter(experts.tolist()).most_common()
    texts = [f"{e if e >= 0 else 'none'} ({number})" for e, number in counts]
    alt = f"{title}, expert (number of patches): {', '.join(texts)}"
    rows = experts.reshape(grid).tolist()
    return parts().map(grid, CELL, image, title, alt, paths, rows)


def heat_map(
    values: np.ndarray, grid: tuple[int, int], image: str | None, title: str
) -> Markup:
    """A map of shares of the patches, such as of an expert's slots, over the image."""
    largest = max(float(values.max(initial=0.0)), 1e-9)
    levels = np.rint(values / largest * _LEVELS).astype(int)
    paths = [
        (f"h{level}", _squares(patches, grid[1]))
        for level, patches in _patches_by_value(levels).items()
        if level > 0
    ]
    row, column = divmod(int(values.argmax()), grid[1])
    alt = f"{title}, on the patch of row {row + 1}, column {column + 1}"
    return parts().map(grid, CELL, image, title, alt, paths)


def word_chips(experts: np.ndarray, words: Sequence[str], title: str) -> Markup:
    """The words of a caption, each with its expert."""
    chips = [
        (f"c{expert % COLOURS}", word, expert) if expert >= 0 else ("none", word, "x")
        for word, expert in zip(words, experts.tolist())
    ]
    return parts().chips(chips, title)


def legend(names: Sequence[str]) -> Markup:
    shown = names[: 2 * COLOURS]
    chips = [(f"c{e % COLOURS}", name, "") for e, name in enumerate(shown)]
    is_part = len(names) > len(shown)
    more = f" and so on to {len(names) - 1}" if is_part else ""
    return parts().chips(chips, "Experts", more)


def _patches_by_value(values):
    """Dict from value to the indices of its patches, sorted by value."""
    return {
        value: np.flatnonzero(values == value) for value in sorted({*values.tolist()})
    }


def _squares(patches, columns):
    """An SVG path of patches, merging neighbours in a row."""
    path, runs = "", []
    for patch in patches.tolist():
        row, column = divmod(patch, columns)
        if runs and runs[-1][0] == row and sum(runs[-1][1:]) == column:
            runs[-1][2] += 1
        else:
            runs.append([row, column, 1])
    for row, column, width in runs:
        across = CELL * width
        path += f"M{CELL * column} {CELL * row}h{across}v{CELL}h-{across}z"
    return path


# Routing of single examples, packed for the page's script.


class TokenRouting(NamedTuple):
    """The experts of one example's tokens in one layer."""

    # (N, E), gates; for soft routers a token's share of an expert's slots, which sums
    # to 1 over tokens; for muMoE coefficients.
    values: np.ndarray
    # Boolean (N, E), whether the expert contributes to the token's output.
    served: np.ndarray
    weights: np.ndarray  # (N, E), combine weights

    def heaviest(self) -> np.ndarray:
        """(N,), the expert with the largest weight; -1 if not served."""
        best = np.where(self.served, self.weights, -np.inf).argmax(axis=-1)
        return np.where(self.served.any(axis=-1), best, -1)


def token_routing(record: Routing, kind: str, index: int) -> TokenRouting:
    gates, dispatched, combined = (
        np.array(x[index], "float32")
        for x in (record.gates, record.dispatched, record.combined)
    )
    if kind == "soft":
        slots = np.maximum(dispatched.sum(axis=0, keepdims=True), 1e-9)
        return TokenRouting(dispatched / slots, np.ones(gates.shape, bool), combined)
    if kind == "mumoe":
        return TokenRouting(gates, gates > 0, gates)
    return TokenRouting(gates, dispatched > 0, combined)


def pack(routing: TokenRouting, kept: int) -> dict:
    """Packs the routing as JSON, with K entries per token, heaviest first."""
    values, kept = np.nan_to_num(routing.values), min(kept, routing.values.shape[-1])
    largest = float(max(values.max(initial=0.0), 1e-9))
    # Serving experts by weight, then the others by value.
    rank = np.where(routing.served, routing.weights, values)
    order = np.lexsort((-rank, ~routing.served), axis=-1)[:, :kept]
    parts = np.clip(np.take_along_axis(values, order, axis=-1) / largest, 0, 1)
    served = np.take_along_axis(routing.served, order, axis=-1)
    entries = np.rint(parts * _LARGEST).astype("<u4")
    entries |= served.astype("<u4") << np.uint32(VALUE_BITS)
    entries |= order.astype("<u4") << np.uint32(VALUE_BITS + 1)
    text = base64.b64encode(entries.astype("<u4").tobytes()).decode("ascii")
    return {"entries": text, "largest": round(largest, 6)}


def json_script(name: str, data: object) -> Markup:
    """Data for the page's script, escaped so that no text can end the element."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return Markup('<script type="application/json" id="{}">{}</script>').format(
        name, Markup(text)
    )
