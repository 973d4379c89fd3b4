"""Shared parts of all plots: figures, images, colours and files."""

import hashlib
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from keras_moe._checks import import_extra
from keras_moe._files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, safe for colour blindness, without black and yellow, which
# are hard to see on dark or light pages.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
# Of experts, by number modulo eight, wherever they are shown.
EXPERT_COLOURS = (*COLOURS, "#F0E442", "#999999")
# Of types of experts: muted, since they are not those of single experts.
TYPE_COLOURS = {
    "ffn": "#5A7D9A",
    "zero": "#B0A48A",
    "copy": "#8A9A5B",
    "constant": "#A0708F",
}
# Visible on light and dark pages.
GREY = "#808080"
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def new_figure(layout: Any = "constrained", **kwargs) -> "Figure":
    """Makes a figure without pyplot or a display."""
    needs = ("Pictures need matplotlib", "plots")
    figure = import_extra("matplotlib.figure", *needs).Figure(layout=layout, **kwargs)
    import_extra("matplotlib.backends.backend_agg", *needs).FigureCanvasAgg(figure)
    return figure


def new_axes(
    width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any
) -> tuple["Figure", np.ndarray]:
    """Makes a figure of a size in inches, and its grid of axes."""
    figure = new_figure(figsize=(width, height), dpi=110)
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def in_colour(image: ArrayLike) -> np.ndarray:
    """Converts an image in [-1, 1] to RGB in [0, 1]."""
    image = np.clip((np.asarray(image) + 1.0) / 2.0, 0.0, 1.0)
    return np.broadcast_to(image, (*image.shape[:2], 3))


def faded(image: ArrayLike, chosen: ArrayLike) -> np.ndarray:
    """Converts an image to RGB, fading pixels to blue where `chosen` is below 1."""
    image, share = in_colour(image), np.asarray(chosen, "float64")[..., None]
    blue = np.array([0.16, 0.24, 0.42])
    return share * image + (1.0 - share) * (0.25 * image + 0.75 * blue)


def picture_axes(
    width: float, height: float, rows: int, columns: int
) -> tuple["Figure", np.ndarray]:
    """Makes a figure, and its grid of axes without ticks."""
    figure, axes = new_axes(width, height, rows, columns)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    return figure, axes


def name_row(axis: "Axes", name: str) -> None:
    axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)


def plain_axis(axis: "Axes", title: str = "") -> None:
    """Gives an axis small labels and removes its top and right frame."""
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if title:
        axis.set_title(title, fontsize=9, loc="left", parse_math=False)


def save_figure(
    figure: "Figure", path: str | os.PathLike | None, title: str = ""
) -> "Figure":
    """Adds a title, and writes a figure in the format of the path's suffix, if any."""
    if title:
        figure.suptitle(title, fontsize=11)
    if path is None:
        return figure
    kind = Path(path).suffix.removeprefix(".") or "png"
    content = io.BytesIO()
    print_png = getattr(figure.canvas, "print_png", None)
    if kind == "png" and print_png is not None:
        # `savefig` draws twice.
        print_png(content)
    else:
        figure.savefig(content, format=kind)
    target = path if Path(path).suffix else f"{path}.{kind}"
    write_bytes(target, content.getbuffer())
    return figure


def figure_svg(figure: "Figure") -> str:
    """Renders a figure as inline SVG in the page's font and colours (CSS `--page`)."""
    import matplotlib

    content = io.BytesIO()
    # The salt makes ids of clip paths reproducible.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "keras_moe"}):
        figure.savefig(content, format="svg", transparent=True, metadata=_NO_METADATA)
    svg = content.getvalue().decode("utf-8")
    body = svg[svg.index("<svg") :].split(">", 1)[1].strip()
    # Its styles would apply to the whole page.
    body = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r"<!--.*?-->|(?<=>)\s+(?=<)", "", body, flags=re.S)
    prefix = f"f{hashlib.sha256(body.encode()).hexdigest()[:8]}-"
    # Only tags change; texts, which may be untrusted, stay escaped.
    body = re.sub(r"<[^>]*>", lambda tag: _for_page(tag.group(), prefix), body)
    width, height = figure.get_size_inches()
    return (
        f'<svg viewBox="0 0 {72 * width:g} {72 * height:g}" '
        f'style="width: {width:g}in; stroke-linejoin: round" fill="currentColor" '
        f'aria-hidden="true">{body}'
    )


def _for_page(tag, prefix):
    """Rewrites a tag for the page's colours and font, with unique ids."""
    for old, new in (
        ('id="', f'id="{prefix}'),
        ('xlink:href="#', f'href="#{prefix}'),
        ("xlink:href", "href"),
        ("url(#", f"url(#{prefix}"),
        ("#000000", "currentColor"),
        ("#ffffff", "var(--page, #ffffff)"),
    ):
        tag = tag.replace(old, new)
    # Keep the font size, drop the family.
    tag = re.sub(r"\bfont: ([^;\"]*?)([\d.]+px) [^;\"]*", r"font-size: \2", tag)
    tag = re.sub(r"\bfont-family: [^;\"]*;?", "", tag)
    return re.sub(r'\b(d|x|y)="[^"]*"', lambda match: _short(match.group()), tag)


def _short(coordinates):
    """Truncates coordinates to hundredths of a point, on one line."""
    return re.sub(r"(\.\d\d)\d+", r"\1", " ".join(coordinates.split()))
