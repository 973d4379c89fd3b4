"""Files of sources, confined to their folder; JSON; cached arrays; splits by name."""

import glob
import hashlib
import itertools
import json
import os
import re
import reprlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from keras_moe._checks import unfit
from keras_moe._files import locked, new_file, open_regular, path_within, read_text

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
# What systems put beside people's files: thumbnails, attributes, deleted files.
_OF_SYSTEMS = ("__macosx", "@eadir", "@recycle", "#recycle", "$recycle.bin")
_OF_SYSTEMS += ("system volume information", "lost+found")
_OF_SYSTEMS += ("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r")
# Seconds to wait for another process that makes the arrays: rendering many pictures
# takes minutes.
_PATIENCE = 600
# Splits drawn from the names of examples, and the shares of validation and test.
SPLITS = ("train", "validation", "test", "all")
_HELD_OUT_FRACTION = 0.1


def matching_files(source: str, names: str) -> list[Path]:
    """Returns the sorted files of a folder or glob, as in "tfrecord:PATH"."""
    pattern, folder = source.partition(":")[2], None
    if os.path.isdir(pattern):
        folder, pattern = pattern, os.path.join(glob.escape(pattern), names)
    paths = [path for path in globbed(pattern, folder) if path.suffix != ".json"]
    if not paths:
        expected = f"a folder with files {names}, or a glob that matches some"
        raise unfit(expected, source=source)
    return paths


def globbed(pattern: str, folder: str | None = None) -> list[Path]:
    """Returns the sorted files that a glob matches; links stay in its folder."""
    paths = [Path(path) for path in sorted(glob.glob(pattern, recursive=True))]
    paths = [path for path in paths if path.is_file()]
    parts = Path(pattern).parts
    # Up to the first wildcard, the path is the user's own.
    own = [*itertools.takewhile(lambda part: glob.escape(part) == part, parts)]
    if len(own) < len(parts):
        for path in paths:
            path_within(path, folder or Path(*own))
    return paths


def files_of_split(source: str, names: str, split: str) -> list[Path]:
    """Files with the split as a word in their name, or named by numbers only."""
    paths = matching_files(source, names)
    chosen = [path for path in paths if split in re.split(r"[-_.]", path.name)]
    if not chosen and not any(re.search("[A-Za-z]", path.stem) for path in paths):
        chosen = paths
    if not chosen:
        raise ValueError(
            f"Expected files of {source} with the split as a word of their names, or "
            f"numbers only; received: split={split!r}, "
            f"{[path.name for path in paths[:3]]}"
        )
    return chosen


def is_hidden(name: str) -> bool:
    """Whether a file or folder is hidden, or a system's and not its owner's."""
    return name.startswith(".") or name.lower() in _OF_SYSTEMS


def folders_in(path: Path) -> list[str]:
    """Returns the sorted names of the folders in a folder, without hidden ones."""
    return sorted(
        entry.name
        for entry in path.iterdir()
        if entry.is_dir() and not is_hidden(entry.name)
    )


def leads_outside(name: str) -> bool:
    """Whether a name is not a relative path, or may leave its folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts


def is_image(path: str | Path) -> bool:
    return str(path).lower().endswith(IMAGE_SUFFIXES)


def folders_with_images(folder: Path, root: Path) -> list[str]:
    """Returns the folders in a folder that hold images, also further below."""
    names = folders_in(folder)
    return [name for name in names if any(map(is_image, _walk(folder / name, root)))]


def files_below(folder: Path, root: Path, images: bool = False) -> list[Path]:
    """Returns the files, or images, below a folder, sorted, without hidden ones."""
    return sorted(x for x in _walk(folder, root) if is_image(x) or not images)


def _walk(folder: Path, root: Path) -> Iterator[Path]:
    seen, pending = set(), [Path(folder)]
    while pending:
        current = pending.pop()
        # A link may lead to a parent folder.
        real = path_within(current, root)
        if real in seen:
            continue
        seen.add(real)
        with os.scandir(current) as entries:
            shown = [entry for entry in entries if not is_hidden(entry.name)]
        # Makes the first of several names of a folder the same on all machines.
        for entry in sorted(shown, key=lambda entry: entry.name, reverse=True):
            if entry.is_dir():
                pending.append(current / entry.name)
            elif entry.is_file():
                if entry.is_symlink():
                    path_within(entry.path, root)
                yield current / entry.name


def files_listed(files: Iterable[Path], root: Path) -> set[Path]:
    """Returns those of some paths that are files; refuses links out of `root`."""
    there = {path for path in files if path.is_file()}
    # Most are plain files in a few folders.
    for path in {x if x.is_symlink() else x.parent for x in there}:
        path_within(path, root)
    return there


def cache_folder(name: str) -> Path:
    """Returns a folder below `KERAS_HOME` or `~/.keras`, which may not exist."""
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    return home / "keras_moe" / name


def kept_arrays(
    path: Path, make: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Loads arrays from a file, or makes and saves them, once for all processes."""
    if (kept := _read(path)) is not None:
        return kept
    made = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        with locked(lock, f"the pictures in {path}", _PATIENCE):
            # Another process may have made them in the meantime.
            if (kept := _read(path)) is not None:
                return kept
            made = make()
            with new_file(path) as file:
                np.savez_compressed(file, **made)  # pyright: ignore[reportArgumentType]
    except OSError as error:
        warnings.warn(f"Pictures in {path} are not kept: {error}", stacklevel=4)
    return make() if made is None else made


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """Reads the arrays of a file; None if it is missing or damaged."""
    try:
        # NumPy leaves a damaged file open that it has opened itself.
        with open_regular(path) as opened:
            return dict(np.load(opened, allow_pickle=False))
    except Exception:
        # NumPy and zipfile fail over damaged files in many ways.
        return None


def with_progress(items: Iterable, text: str, total: int) -> Iterable:
    """Shows a progress bar on the error stream, if that is a terminal."""
    console = Console(stderr=True)
    return track(
        items,
        escape(text),
        total=total,
        console=console,
        transient=True,
        disable=not (console.is_terminal or console.is_jupyter),
    )


def held_out_split(name: bytes) -> str:
    """Draws a split from a name: 10% "test", 10% "validation", the rest "train"."""
    draw = int.from_bytes(hashlib.sha256(name).digest()[:6], "big") / 2**48
    if draw < _HELD_OUT_FRACTION:
        return "test"
    return "validation" if draw < 2 * _HELD_OUT_FRACTION else "train"


def read_json(
    path: Path,
    schema: dict,
    required: Collection[str] = (),
    others: bool = False,
    within: Path | None = None,
) -> dict[str, Any]:
    """Reads a JSON file; errors name the file and the first value that does not fit."""
    # In a schema, `str` is a string that is not empty, `int` an integer from 0 on, a
    # `range` an integer in it, `[item]` a list, `{str: item}` a dict of any names, and
    # `{"name": item}` one of some of its names. Tuples are for numbers and for lists.
    try:
        value = json.loads(read_text(path, within))
        known = value
        if others and isinstance(value, dict):
            known = {name: value[name] for name in schema if name in value}
        _check(known, schema, "")
        _expect({*required} <= {*value}, f"a dict with {sorted(required)}", value, "")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"In {path}: {error}") from error
    return value


def _check(value, schema, where):
    if schema is str:
        _expect(isinstance(value, str) and value, "a string", value, where)
    elif schema is int or isinstance(schema, range):
        allowed = schema if isinstance(schema, range) else range(2**63)
        fits = type(value) is int and value in allowed
        _expect(fits, f"an integer from {allowed.start} on", value, where)
    elif isinstance(schema, tuple):
        _check(value, schema[isinstance(value, list)], where)
    elif isinstance(schema, list):
        _expect(isinstance(value, list), "a list", value, where)
        for index, item in enumerate(value):
            _check(item, schema[0], f"{where}[{index}]")
    else:
        _expect(isinstance(value, dict), "a dict", value, where)
        if str not in schema:
            known = f"a dict with any of {sorted(schema)}"
            _expect({*value} <= {*schema}, known, value, where)
        for name, item in value.items():
            _check(item, schema.get(name) or schema[str], f"{where}[{name!r:.50}]")


def _expect(fits, expected, value, where):
    if not fits:
        at = f" at {where}" if where else ""
        raise ValueError(f"Expected {expected}{at}; received: {reprlib.repr(value)}")
