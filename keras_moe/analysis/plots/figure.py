"""Figures and images of all pictures; the only folder that needs matplotlib."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe.files import write_bytes


def new_figure(**kwargs) -> Any:
    """A figure for files: it needs no display, and leaves the caller's alone."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib: pip install 'keras-moe[plots]'"
        ) from error
    figure = Figure(**kwargs)
    FigureCanvasAgg(figure)
    return figure


def checked_images(images: Any) -> np.ndarray:
    """Images as an array, if they can be drawn."""
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise ValueError(
            "Expected images (batch, height, width, 1 or 3); "
            f"received: shape={images.shape}"
        )
    return images


def in_colour(image: Any) -> np.ndarray:
    """An image in [-1, 1] as matplotlib draws it."""
    image = np.clip((image + 1.0) / 2.0, 0.0, 1.0)
    return np.broadcast_to(image, (*image.shape[:2], 3))


def faded(image: Any, chosen: Any) -> np.ndarray:
    """The image in colour, with the other pixels faded to blue."""
    image = in_colour(image)
    blue = np.array([0.16, 0.24, 0.42])
    return np.where(chosen[..., None] > 0, image, 0.25 * image + 0.75 * blue)


def name_row(axis: Any, name: str) -> None:
    """Writes a name to the left of a row's first axis."""
    axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)


def save_figure(
    figure: Any, path: str | os.PathLike, title: str, **layout: Any
) -> None:
    """Saves a figure with its title, and its parts laid out by `tight_layout`."""
    figure.suptitle(title, fontsize=11)
    figure.tight_layout(**layout)
    write_figure(figure, path)


def write_figure(figure: Any, path: str | os.PathLike) -> None:
    """Writes a figure as it is laid out, in the format of the path's suffix."""
    kind = Path(path).suffix.removeprefix(".") or "png"
    content = io.BytesIO()
    figure.savefig(content, format=kind)
    target = path if Path(path).suffix else f"{path}.{kind}"
    write_bytes(target, content.getbuffer(), durable=False)
