"""Folders that are written beside their place, and take it as a whole or not at all."""

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from keras_moe.checks import check_path
from keras_moe.files import (
    new_partial,
    remove_partials,
    replace_folder,
    sync_tree,
    write_failed,
)
from keras_moe.locks import locked

# Seconds to wait for another process that writes the same folder.
_PATIENCE = 600


@contextlib.contextmanager
def staged_folder(
    folder: str | os.PathLike,
    kind: str,
    is_kind: Callable[[Path], bool],
    is_own: Callable[[Path], bool],
    finish: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
    """A folder to write to, which takes the place of another when all is written.

    If writing fails or is interrupted, `folder` stays as it was. One process at a time
    writes it, and another one waits. The remains of killed processes beside it are
    removed.
    """
    target = Path(check_path("folder", folder)).expanduser().resolve()
    _check_target(target, kind, is_kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.saving.lock")
    with locked(lock, f"the {kind} {folder}", _PATIENCE):
        _recover(target, kind, is_kind)
        # Another process may have been first.
        _check_target(target, kind, is_kind)
        remove_partials(target)
        staging = new_partial(target)
        try:
            if target.is_dir():
                # A private folder stays private.
                staging.chmod(stat.S_IMODE(target.stat().st_mode) | stat.S_IRWXU)
            yield staging
            _keep_others(target, staging, is_own)
            if finish is not None:
                finish(staging)
            sync_tree(staging)
            replace_folder(staging, target, previous_folder(target, kind))
        except OSError as error:
            if error.filename is not None:
                raise
            # Errors of other libraries do not name the file that was not written.
            size = sum(path.stat().st_size for path in staging.iterdir())
            raise write_failed(error, folder, size) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def previous_folder(target: Path, kind: str) -> Path:
    """The place of the older folder while the new one takes its own."""
    return target.with_name(f".{target.name}.previous-{kind}")


def _check_target(target, kind, is_kind):
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"Expected a folder; received a file: {target}")
    if Path.cwd().is_relative_to(target):
        # Its replacement would leave the program in a folder that is no more.
        raise ValueError(
            f"Expected a folder for the {kind} that the program does not run in, since "
            f"the new one replaces it; received: {target}"
        )
    if any(target.iterdir()) and not is_kind(target):
        raise ValueError(
            f"Expected a new folder, an empty one or an older {kind}, since the new "
            f"one replaces it; received: {target}"
        )


def _recover(target, kind, is_kind):
    """Finishes what was killed between the two renames, or after them."""
    previous = previous_folder(target, kind)
    if not previous.is_dir():
        return
    if target.is_dir() and is_kind(target):
        shutil.rmtree(previous, ignore_errors=True)
        return
    if target.is_dir():
        # It fails unless the folder is empty: the older one is safe.
        target.rmdir()
    os.rename(previous, target)


def _keep_others(target, staging, is_own):
    for path in target.iterdir() if target.is_dir() else ():
        if is_own(path) or (staging / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, staging / path.name, symlinks=True)
        else:
            shutil.copy2(path, staging / path.name, follow_symlinks=False)
