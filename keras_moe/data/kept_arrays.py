"""Arrays that take long to make, kept on disk by the name of what they follow from."""

import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from keras_moe.files import locked, new_file

# Pictures take seconds to render, and minutes where there are many.
_PATIENCE = 600


def cache_folder(name: str) -> Path:
    """A folder below `KERAS_HOME`, or `~/.keras`, which need not exist."""
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    return home / "keras_moe" / name


def kept_arrays(
    path: Path,
    names: Sequence[str],
    is_whole: Callable[[dict[str, np.ndarray]], bool],
    make: Callable[[], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Arrays from a file, or made and then kept there.

    Processes that start together wait for the one that makes them. Where the file
    cannot be written, a warning says so, and the arrays are not kept.
    """
    if (kept := _read(path, names, is_whole)) is not None:
        return kept
    made = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        with locked(lock, f"the pictures in {path}", _PATIENCE):
            # Another process may have made them while this one waited.
            if (kept := _read(path, names, is_whole)) is not None:
                return kept
            made = make()
            with new_file(path) as file:
                np.savez_compressed(file, **made)
    except OSError as error:
        warnings.warn(f"Pictures in {path} are not kept: {error}", stacklevel=4)
    return make() if made is None else made


def _read(path, names, is_whole):
    """The arrays of a file, None if it is not there or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            kept = {name: file[name] for name in names}
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    except RuntimeError:
        # Damaged headers may tell of encryption, or of an unknown compression.
        return None
    return kept if is_whole(kept) else None
