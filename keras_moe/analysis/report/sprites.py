"""Sprites: small images in one picture, with words beside its rows.

Axes: R rows, C columns, T height and width of a tile.
"""

import base64
import io
from typing import Any

import numpy as np

_SMALLEST_TILE = 12
_GAP = 1


def drawable(image: np.ndarray) -> np.ndarray:
    """An image with one channel or three; others have the mean of their channels."""
    if image.shape[-1] in (1, 3):
        return image
    return image.mean(axis=-1, keepdims=True)


def tile_of(image: Any, size: int) -> np.ndarray:
    """An image as a square tile of a sprite."""
    image = np.asarray(image, "float32")
    if image.ndim != 3 or not image.size:
        raise ValueError(
            f"Expected an image (height, width, channels); received: "
            f"shape={image.shape}"
        )
    image = drawable(image)
    pixels = np.clip(np.nan_to_num((image + 1.0) * 127.5), 0.0, 255.0)
    pixels = np.broadcast_to(np.round(pixels), (*image.shape[:2], 3)).astype("uint8")
    is_smaller = max(image.shape[:2]) > size
    pillow = _pillow()
    # Pixels of digits stay squares, and large images are averaged.
    method = pillow.Resampling.BOX if is_smaller else pillow.Resampling.NEAREST
    return np.asarray(pillow.fromarray(pixels).resize((size, size), method))


def patch_tile(image: Any, grid: tuple[int, int], place: int, size: int) -> np.ndarray:
    """A patch as a tile, in the middle of its dimmed surroundings."""
    image = np.asarray(image, "float32")
    height, width = image.shape[0] // grid[0], image.shape[1] // grid[1]
    row, column = divmod(int(place), grid[1])
    margins = (height + 1) // 2, (width + 1) // 2
    top, left = row * height, column * width
    # Grey beyond the image's edge.
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
    # Dimmed to a grey that stands for neither black nor white.
    dimmed = 0.35 * tile + 0.65 * 128.0
    return np.where(inside[..., None], tile, dimmed).astype("uint8")


def sprite(tiles: Any, max_bytes: int = 60_000) -> tuple[str, int, int]:
    """Tiles as one picture for a page.

    The picture is WebP where Pillow has it, and PNG elsewhere. Its quality and then the
    size of its tiles fall until it is small enough.
    """
    tiles = np.asarray(tiles)
    if tiles.ndim != 5 or tiles.shape[-1] not in (3, 4) or not tiles.size:
        raise ValueError(
            "Expected tiles (rows, columns, size, size, 3 or 4), at least one; "
            f"received: shape={tiles.shape}"
        )
    pillow = _pillow()
    from PIL import features

    sheet = pillow.fromarray(_sheet(tiles))
    full, size = sheet.size, tiles.shape[2]
    kind = "webp" if features.check("webp") else "png"
    while True:
        for quality in (85, 65, 45) if kind == "webp" else (None,):
            content = io.BytesIO()
            options = {"quality": quality, "method": 4} if quality else {}
            sheet.save(content, kind, **options)
            if content.tell() <= max_bytes:
                break
        if content.tell() <= max_bytes or size <= _SMALLEST_TILE:
            break
        size = size * 3 // 4
        scale = size / tiles.shape[2]
        shape = [max(round(length * scale), 1) for length in full]
        sheet = pillow.fromarray(_sheet(tiles)).resize(shape, pillow.Resampling.BOX)
    text = base64.b64encode(content.getvalue()).decode("ascii")
    return f"data:image/{kind};base64,{text}", *full


def sprite_figure(
    tiles: Any, names: list[str], alt: str, caption: str, max_bytes: int = 60_000
) -> Any:
    """A sprite with a name beside each row, as markup."""
    from markupsafe import Markup

    if len(names) != len(tiles):
        raise ValueError(
            f"Expected a name for each of {len(tiles)} rows; received: {len(names)}"
        )
    uri, width, height = sprite(tiles, max_bytes)
    rows = Markup("").join(Markup("<span>{}</span>").format(name) for name in names)
    return Markup(
        '<figure class="sprite"><div><div class="rows" aria-hidden="true">{}</div>'
        '<img src="{}" alt="{}" width="{}" height="{}"></div>'
        "<figcaption>{}</figcaption></figure>"
    ).format(rows, uri, alt, width, height, caption)


def _sheet(tiles):
    """All tiles in one array, with a gap between two, which is transparent."""
    rows, columns, height, width, _ = tiles.shape
    shape = (rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 4)
    sheet = np.zeros(shape, "uint8")
    for row in range(rows):
        for column in range(columns):
            top, left = row * (height + _GAP), column * (width + _GAP)
            area = sheet[top : top + height, left : left + width]
            tile = tiles[row, column]
            area[..., : tile.shape[-1]] = tile
            if tile.shape[-1] == 3:
                area[..., 3] = 255
    return sheet


def _pillow():
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "Reports need Pillow: pip install 'keras-moe[report]'"
        ) from error
    return Image
