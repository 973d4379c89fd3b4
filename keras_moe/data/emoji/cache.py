"""Pictures of emoji on disk, so that each size of a style is rendered once."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from keras_moe.data.emoji.fonts import FRAMES, Painter, font_path
from keras_moe.data.kept_arrays import cache_folder, kept_arrays
from keras_moe.files import sha256_of

# Increase it to invalidate older caches.
_RENDERING = 2
# The root of the mean squared difference, of 255, below which drawings are alike.
_ALIKE = 4.0
# Drawings that are compared with all others at a time.
_BLOCK = 256


class Pictures(NamedTuple):
    """The pictures of those emoji that a font has, each drawing once.

    Fields:
        images: (N, height, width, 3), uint8.
        places: (N,), int64, places of the emoji in the list that was asked for.
    """

    images: np.ndarray
    places: np.ndarray


def pictures(
    style: str, texts: Sequence[str], image_shape: tuple[int, int, int]
) -> Pictures:
    """The pictures of those emoji that a style has, of those drawn alike the first.

    They are kept below `KERAS_HOME`, or `~/.keras`, by the font's content, the emoji
    and the size. Processes that start together wait for the one that renders. Where
    the cache cannot be written, a warning says so, and the pictures are not kept.
    """
    font = font_path(style)
    key = "\n".join([str(_RENDERING), str(FRAMES[style]), sha256_of(font), *texts])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    size = "x".join(map(str, image_shape[:2]))
    path = cache_folder("emoji") / f"{style}_{size}_{digest}.npz"

    def is_whole(kept):
        number = len(kept["places"])
        return (
            kept["images"].dtype == "uint8"
            and kept["images"].shape == (number, *image_shape)
            and kept["places"].dtype == "int64"
            and kept["places"].shape == (number,)
            and np.all((kept["places"] >= 0) & (kept["places"] < len(texts)))
        )

    def render():
        return _render(style, font, texts, image_shape)._asdict()

    return Pictures(**kept_arrays(path, Pictures._fields, is_whole, render))


def _render(style, font, texts, image_shape):
    """Renders the pictures, with a progress bar on the error stream."""
    paint = Painter(font, FRAMES[style], image_shape)
    console = Console(stderr=True)
    images, places, drawings = [], [], []
    for place, text in enumerate(
        track(
            texts,
            f"Rendering {style}",
            console=console,
            transient=True,
            disable=not (console.is_terminal or console.is_jupyter),
        )
    ):
        if (painted := paint(text)) is not None:
            image, drawing = painted
            images.append(image)
            places.append(place)
            drawings.append(drawing.reshape(-1))
    if not images:
        return Pictures(np.zeros((0, *image_shape), "uint8"), np.zeros(0, "int64"))
    first = _first_of_alike(np.stack(drawings).astype("float32"))
    return Pictures(np.stack(images)[first], np.asarray(places, "int64")[first])


def _first_of_alike(drawings: np.ndarray) -> np.ndarray:
    """The numbers of the drawings (N, pixels) that no earlier one of them is like."""
    norms = np.sum(np.square(drawings), axis=1)
    least = _ALIKE**2 * drawings.shape[1]
    is_first = np.ones(len(drawings), bool)
    for start in range(0, len(drawings), _BLOCK):
        block = slice(start, start + _BLOCK)
        squares = norms[block, None] + norms - 2 * drawings[block] @ drawings.T
        for row, near in enumerate(squares < least, start):
            is_first[row] = not np.any(near[:row] & is_first[:row])
    return np.flatnonzero(is_first)
