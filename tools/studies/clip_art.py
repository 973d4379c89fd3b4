"""Writes the Open Clip Art Library, as packaged by Debian, as folders of images.

PATH/png/animals/mammals/bull_utrescu_.png     a picture; the first folder is its class
PATH/svg/animals/mammals/bull_utrescu_.svg     the same with title and keywords

OUTPUT/pairs/test/00007.png and captions.csv   all pictures, with their captions
OUTPUT/classes/test/animals/00007.png          those of the larger categories
"""

import contextlib
import csv
import os
import re
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from keras_moe._files import new_partial, open_regular
from keras_moe.data._files import held_out_split, with_progress

# Side of the pictures in pixels.
SIDE = 64
# Longer series go to training: one of them would dominate a test split.
_LONGEST_SERIES = 50
# Titles of more pictures than this describe a collection.
_MOST_OF_ONE_TITLE = 5
# Correlation of pixels above which pictures are alike.
_ALIKE = 0.95
# Number of pictures to compare with all others at a time.
_BLOCK = 512
# Minimum number of pictures of a class.
_LEAST_OF_CLASS = 40
_NO_CLASS = "unsorted"
# Keywords that do not describe the picture.
_NO_KEYWORDS = ("", "hash", "unsorted", "magick")
_BY_SOMEONE = re.compile(r"^clip ?art by .* - ")
_FOLDERS = ("", "usr/share/openclipart")


class ClipArt(NamedTuple):
    """Pictures and their captions, in the order of their files."""

    images: np.ndarray
    captions: np.ndarray
    categories: np.ndarray
    splits: np.ndarray


class _Description(NamedTuple):
    """The metadata of an SVG, in lower case."""

    title: str
    keywords: tuple[str, ...]
    artist: str


def write_folders(path: str | Path, output: Path) -> None:
    """Writes OUTPUT/pairs and OUTPUT/classes from an unpacked folder of Debian's."""
    clip_art = read_clip_art(path)
    counts = Counter(clip_art.categories.tolist())
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = new_partial(output)
    for split in ("train", "validation", "test"):
        pairs = staging / "pairs" / split
        pairs.mkdir(parents=True)
        rows = [("image", "caption")]
        for number in np.flatnonzero(clip_art.splits == split):
            name, category = f"{number:05}.png", clip_art.categories[number]
            picture = Image.fromarray(clip_art.images[number])
            picture.save(pairs / name)
            rows.append((name, clip_art.captions[number]))
            if counts[category] >= _LEAST_OF_CLASS and category != _NO_CLASS:
                folder = staging / "classes" / split / category
                folder.mkdir(parents=True, exist_ok=True)
                picture.save(folder / name)
        with (pairs / "captions.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    staging.rename(output)


def read_clip_art(path: str | Path) -> ClipArt:
    """Reads all pictures and their metadata, with a progress bar."""
    root = _root(path)
    files = _files(root / "png")
    # Pillow warns of palettes, and of sizes below those that it rejects.
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor() as threads:
        pictures = threads.map(lambda name: _picture(root, name), files)
        images = list(with_progress(pictures, "Reading openclipart", len(files)))
    unreadable = [name for name, image in zip(files, images) if image is None]
    if len(unreadable) == len(files):
        raise ValueError(f"Expected pictures in {root / 'png'}; received: {files[:3]}")
    if unreadable:
        warnings.warn(
            f"{len(unreadable)} of {len(files)} pictures in {root} are left out, such "
            f"as {unreadable[0]}: they are damaged or too large",
            stacklevel=2,
        )
    files = [name for name, image in zip(files, images) if image is not None]
    images = np.stack([image for image in images if image is not None])
    described = [_described(root, name) for name in files]
    titles = Counter(one.title for one in described)
    captions, series = [], []
    for name, one in zip(files, described):
        is_own = one.title and titles[one.title] <= _MOST_OF_ONE_TITLE
        title = one.title if is_own else _of_file(name, one.artist)
        captions.append(_caption(title, one))
        # Titles of a series differ in numbers only.
        series.append(" ".join(re.findall(r"[^\W\d_]+", title)) or title)
    splits = _splits(files, _joined(series, images))
    categories = [name.split("/")[0] for name in files]
    return ClipArt(images, *map(np.asarray, (captions, categories, splits)))


def _root(path: str | Path) -> Path:
    for folder in _FOLDERS:
        root = Path(path) / folder
        if (root / "png").is_dir() and (root / "svg").is_dir():
            return root
    raise ValueError(
        "Expected a folder with png and svg of the Debian packages openclipart-png and "
        f"openclipart-svg; received: {path}"
    )


def _files(folder: Path) -> list[str]:
    """Sorted paths of the files below a folder's subfolders, without links."""
    found = []
    for current, _, files in os.walk(folder):
        below = Path(current).relative_to(folder).as_posix()
        if below != ".":
            found += [f"{below}/{name}" for name in files if name.endswith(".png")]
    return sorted(name for name in found if not (folder / name).is_symlink())


def _svg(root: Path, name: str) -> Path:
    return root / "svg" / f"{name[:-4]}.svg"


def _picture(root: Path, name: str) -> np.ndarray | None:
    """Reads a picture as (64, 64, 3) on white; None if it is damaged or too large."""
    with open_regular(root / "png" / name, root) as opened:
        try:
            with Image.open(opened) as file:
                picture = file.convert("RGBA")
        except Exception:
            # Pillow fails over damaged files in many ways.
            return None
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS, reducing_gap=2.0)
    canvas = Image.new("RGBA", (SIDE, SIDE), "white")
    corner = (SIDE - picture.width) // 2, (SIDE - picture.height) // 2
    canvas.alpha_composite(picture, corner)
    return np.asarray(canvas.convert("RGB"))


def _described(root: Path, name: str) -> _Description:
    """Reads the metadata of an SVG; empty if there is none."""
    title, artist, keywords, above = "", "", [], []
    path = _svg(root, name)
    if not path.exists():
        return _Description(title, (), artist)
    with contextlib.suppress(ElementTree.ParseError), open_regular(path, root) as file:
        for event, element in ElementTree.iterparse(file, ("start", "end")):
            tag = element.tag.rpartition("}")[2]
            if event == "start":
                above.append(tag)
                continue
            above.pop()
            text = " ".join((element.text or "").lower().replace("_", " ").split())
            if tag == "metadata":
                break
            elif tag == "title" and above[-1:] == ["Work"]:
                title = _BY_SOMEONE.sub("", text)
            elif tag == "title" and "creator" in above:
                artist = text
            elif tag == "li" and "subject" in above:
                keywords.append(text)
    return _Description(title, tuple(keywords), artist)


def _of_file(name: str, artist: str) -> str:
    """Returns the words of a file name without the artist's name at the end."""
    words = re.split(r"[\W_]+", Path(name).stem.lower())
    words = [word for word in words if word]
    artists = artist.split()
    while len(words) > 1 and (
        words[-1].isdigit() or any(x.startswith(words[-1]) for x in artists)
    ):
        words.pop()
    return " ".join(words)


def _caption(title: str, description: _Description) -> str:
    """Combines the title with keywords that add something."""
    parts = [title]
    for keyword in description.keywords:
        is_new = keyword not in (*parts, description.artist, *_NO_KEYWORDS)
        if is_new and not {*keyword.split()} <= {*title.split()}:
            parts.append(keyword)
    return ", ".join(parts)


def _joined(series: Sequence[str], images: np.ndarray) -> np.ndarray:
    """Numbers pictures so that a series or similar pictures share a number."""
    small = images.reshape(len(images), SIDE // 2, 2, SIDE // 2, 2, 3).mean((2, 4))
    pixels = small.reshape(len(images), -1).astype("float32")
    pixels -= pixels.mean(axis=1, keepdims=True)
    pixels /= np.maximum(np.linalg.norm(pixels, axis=1, keepdims=True), 1e-3)
    rows: dict[str, int] = {}
    first = [rows.setdefault(name, row) for row, name in enumerate(series)]
    links = [*enumerate(first)]
    for start in range(0, len(pixels), _BLOCK):
        alike = pixels[start : start + _BLOCK] @ pixels.T > _ALIKE
        links += [(start + row, other) for row, other in np.argwhere(alike).tolist()]
    group = list(range(len(images)))

    def head(row):
        while group[row] != row:
            group[row] = row = group[group[row]]
        return row

    for row, other in links:
        row, other = head(row), head(other)
        group[max(row, other)] = min(row, other)
    return np.asarray([head(row) for row in range(len(images))])


def _splits(files: Sequence[str], groups: np.ndarray) -> list[str]:
    """Draws the split of each group of pictures by its first file."""
    sizes = np.bincount(groups)
    of_group = {}
    for group in np.unique(groups).tolist():
        split = held_out_split(files[group].encode("utf-8", "surrogateescape"))
        of_group[group] = "train" if sizes[group] > _LONGEST_SERIES else split
    return [of_group[group] for group in groups.tolist()]


if __name__ == "__main__":
    write_folders(sys.argv[1], Path(sys.argv[2]))
