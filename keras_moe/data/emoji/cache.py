"""Pictures of emoji on disk, so that each size of a style is rendered once."""

import hashlib
import os
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from keras_moe.data.emoji.fonts import FRAMES, Painter, font_path
from keras_moe.files import new_file, sha256_of
from keras_moe.locks import locked

# Increase it to invalidate older caches.
_RENDERING = 1
# Rendering takes seconds, and a minute at the size of photographs.
_PATIENCE = 600


class Pictures(NamedTuple):
    """The pictures of those emoji that a font has.

    Fields:
        images: (N, height, width, 3), uint8.
        places: (N,), int64, places of the emoji in the list that was asked for.
        drawings: (N,), int64, numbers that are equal for equal drawings.
    """

    images: np.ndarray
    places: np.ndarray
    drawings: np.ndarray


def pictures(
    style: str, texts: Sequence[str], image_shape: tuple[int, int, int]
) -> Pictures:
    """The pictures of those emoji that a style has.

    They are kept below `KERAS_HOME`, or `~/.keras`, by the font's content, the emoji
    and the size. Processes that start together wait for the one that renders. Where
    the cache cannot be written, a warning says so, and the pictures are not kept.

    Args:
        style: one of `FRAMES`.
        texts: code points of emoji.
        image_shape: (height, width, 3).
    """
    font = font_path(style)
    key = "\n".join([str(_RENDERING), str(FRAMES[style]), sha256_of(font), *texts])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    size = "x".join(map(str, image_shape[:2]))
    path = cache_folder() / f"{style}_{size}_{digest}.npz"
    if (kept := _read(path, len(texts), image_shape)) is not None:
        return kept
    rendered = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        with locked(lock, f"the pictures in {path}", _PATIENCE):
            # Another process may have rendered them while this one waited.
            if (kept := _read(path, len(texts), image_shape)) is not None:
                return kept
            rendered = _render(style, font, texts, image_shape)
            with new_file(path) as file:
                np.savez_compressed(file, **rendered._asdict())
    except OSError as error:
        warnings.warn(f"Pictures of emoji are not kept: {error}", stacklevel=3)
    if rendered is None:
        rendered = _render(style, font, texts, image_shape)
    return rendered


def cache_folder() -> Path:
    """The folder of the cache, which need not exist."""
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    return home / "keras_moe" / "emoji"


def _read(path, count, image_shape):
    """The pictures of a file, None if it is not there or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            kept = Pictures(*(file[field] for field in Pictures._fields))
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    except RuntimeError:
        # Damaged headers may tell of encryption, or of an unknown compression.
        return None
    number = len(kept.places)
    is_whole = (
        kept.images.dtype == "uint8"
        and kept.images.shape == (number, *image_shape)
        and kept.places.dtype == kept.drawings.dtype == "int64"
        and kept.places.shape == kept.drawings.shape == (number,)
        and np.all((kept.places >= 0) & (kept.places < count))
    )
    return kept if is_whole else None


def _render(style, font, texts, image_shape):
    """Renders the pictures, with a progress bar on the error stream."""
    paint = Painter(font, FRAMES[style], image_shape)
    console = Console(stderr=True)
    images, places, drawings, number = [], [], [], {}
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
            image, digest = painted
            images.append(image)
            places.append(place)
            drawings.append(number.setdefault(digest, len(number)))
    return Pictures(
        np.stack(images) if images else np.zeros((0, *image_shape), "uint8"),
        np.asarray(places, "int64"),
        np.asarray(drawings, "int64"),
    )
