"""Files of sources, none of them outside; cached arrays; and splits of names."""

import glob
import hashlib
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

import numpy as np
from rich.console import Console
from rich.progress import track

from keras_moe.files import locked, new_file

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
# Seconds to wait for another process that makes arrays: rendering many pictures takes
# minutes.
_PATIENCE = 600
# The splits of sources that are split by the names of their examples, and the share of
# the validation and of the test split.
SPLITS = ("train", "validation", "test", "all")
_HELD_OUT_FRACTION = 0.1


def matching_files(source: str, names: str) -> list[Path]:
    """The files of a source such as "tfrecord:PATH", a folder or a glob; sorted."""
    pattern = source.partition(":")[2]
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), names)
    paths = [Path(path) for path in sorted(glob.glob(pattern))]
    paths = [path for path in paths if path.is_file() and path.suffix != ".json"]
    if not paths:
        raise ValueError(
            f"Expected a folder with files {names}, or a glob that matches some; "
            f"received: source={source!r}"
        )
    return paths


def files_of_split(source: str, names: str, split: str) -> list[Path]:
    """Those files that have the split as a word, as "train-00000-of-00008" has.

    Files that are named by numbers only, such as img2dataset's, are in every split.
    """
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


def folders_in(path: Path) -> list[str]:
    """The names of the folders in a folder, but for hidden ones, sorted."""
    return sorted(
        entry.name
        for entry in path.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )


def leads_outside(name: str) -> bool:
    """Whether a relative path is none, or may lead out of its folder."""
    place = PurePosixPath(name.replace("\\", "/"))
    return place.is_absolute() or ".." in place.parts


def image_suffixes() -> tuple[str, ...]:
    """The suffixes of the files that the installed TensorFlow decodes."""
    import tensorflow as tf

    has_webp = hasattr(tf.io, "decode_webp")
    return _SUFFIXES if has_webp else tuple(x for x in _SUFFIXES if x != ".webp")


def files_below(folder: Path, root: Path | None = None) -> list[Path]:
    """All files in a folder and below it, but for hidden ones, sorted.

    Pipes and devices are no files. A link may lead to another place below `root`.
    """
    root = os.path.realpath(folder if root is None else root)
    paths, seen, pending = [], set(), [Path(folder)]
    while pending:
        place = pending.pop()
        # A link may lead to a folder above itself.
        real = _within(place, root)
        if real in seen:
            continue
        seen.add(real)
        with os.scandir(place) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
        # The first of several names of one folder is then the same on any machine.
        for entry in sorted(shown, key=lambda entry: entry.name, reverse=True):
            if entry.is_dir():
                pending.append(place / entry.name)
            elif entry.is_file():
                if entry.is_symlink():
                    _within(entry.path, root)
                paths.append(place / entry.name)
    return sorted(paths)


def _within(path: str | Path, root: str) -> str:
    """The real path of a path, if it is below a folder's."""
    real = os.path.realpath(path)
    if real != root and not real.startswith(os.path.join(root, "")):
        raise ValueError(
            f"Expected links to stay within {root}; received: {path}, which leads to "
            f"{real}"
        )
    return real


def is_file_within(path: Path, root: Path) -> bool:
    """Whether a path is a file, and no link out of a folder."""
    if path.is_symlink():
        _within(path, os.path.realpath(root))
    return path.is_file()


def cache_folder(name: str) -> Path:
    """A folder below `KERAS_HOME`, or `~/.keras`, which need not exist."""
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    return home / "keras_moe" / name


def kept_arrays(
    path: Path,
    kinds: dict[str, tuple[str, tuple[int, ...]]],
    make: Callable[[], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Arrays of one length from a file, or made and then kept there.

    Processes that start together wait for the one that makes them. Where the file
    cannot be written there is a warning, and the arrays are not kept.

    Args:
        path: path of the file.
        kinds: names of the arrays with their kind of dtype, and their shape without the
            first axis.
        make: function that makes the arrays.
    """
    if (kept := _read(path, kinds)) is not None:
        return kept
    made = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        with locked(lock, f"the pictures in {path}", _PATIENCE):
            # Another process may have made them while this one waited.
            if (kept := _read(path, kinds)) is not None:
                return kept
            made = make()
            with new_file(path) as file:
                np.savez_compressed(file, **made)
    except OSError as error:
        warnings.warn(f"Pictures in {path} are not kept: {error}", stacklevel=4)
    return make() if made is None else made


def _read(path, kinds):
    """The arrays of a file, or None if it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            kept = {name: file[name] for name in kinds}
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    except RuntimeError:
        # Damaged headers may tell of encryption, or of an unknown compression.
        return None
    fits = len({len(array) for array in kept.values()}) == 1 and all(
        (kept[name].dtype.kind, kept[name].shape[1:]) == kind
        for name, kind in kinds.items()
    )
    return kept if fits else None


def with_progress(items: Iterable, text: str, total: int) -> Iterable:
    """Items with a progress bar on the error stream, if that is a terminal."""
    console = Console(stderr=True)
    return track(
        items,
        text,
        total=total,
        console=console,
        transient=True,
        disable=not (console.is_terminal or console.is_jupyter),
    )


def held_out_split(name: bytes) -> str:
    """The split that a name draws: a tenth is "test", a tenth is "validation"."""
    draw = int.from_bytes(hashlib.sha256(name).digest()[:6], "big") / 2**48
    if draw < _HELD_OUT_FRACTION:
        return "test"
    return "validation" if draw < 2 * _HELD_OUT_FRACTION else "train"
