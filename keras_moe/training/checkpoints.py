"""Checkpoints of a run: folders such as `step-00000120`, written atomically."""

import contextlib
import dataclasses
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_moe._checks import check_integer, unfit
from keras_moe._files import locked, new_partial, path_within, recover_folder
from keras_moe._processes import (
    broadcast_from_primary,
    checked_all_gather,
    rank_and_world_size,
)
from keras_moe.training import _checkpoint_files as formats
from keras_moe.training.non_finite import NonFiniteLoss

_STEP = re.compile(r"step-\d{8,}")
# Leftovers of interrupted writes: ours, ours during a replacement, and Orbax's.
_LEFTOVER = re.compile(
    r"\.(?P<replaced>step-\d{8,})\.previous"
    r"|\.step-\d{8,}\.[0-9a-f]{8}\.partial"
    r"|step-\d{8,}\.orbax-checkpoint-tmp.*"
)


class SavedVariable(NamedTuple):
    """Path, shape and dtype of a variable in a checkpoint."""

    path: str
    shape: Sequence[int]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with intact files.

    Args:
        path: its folder.
        step: number of training steps before it.
        state: everything but arrays, see `save_checkpoint`.
        variables: path, shape and dtype of each variable, by group.

    Example: see `save_checkpoint`.
    """

    path: Any
    step: int
    state: dict
    variables: dict[str, list[SavedVariable]]

    def restore(self, groups: dict[str, Sequence[keras.Variable]]) -> None:
        """Assigns saved values to variables by group, in all processes together."""
        for group, variables in groups.items():
            saved = self.variables.get(group)
            if saved is None or len(saved) != len(variables):
                expected = f"{len(variables)} variables of {group!r} in {self.path}"
                raise unfit(expected, saved and len(saved))
            for entry, variable in zip(saved, variables):
                if not _fits(group, entry, variable):
                    raise ValueError(
                        f"Expected shape {tuple(variable.shape)} and {variable.dtype} "
                        f"of {variable.path} in {self.path}; received: {entry}"
                    )
        if formats.is_orbax(self.path):
            formats.restore_orbax(self.path, groups)
        else:
            formats.restore_safetensors(self.path, groups, self.variables)


def save_checkpoint(
    folder: str | os.PathLike,
    step: int,
    groups: dict[str, Sequence[keras.Variable]],
    state: dict,
    *,
    keep: int = 3,
    keep_every: int | None = None,
    keep_steps: Collection[int] = (),
) -> Any:
    """Writes a checkpoint, then deletes older ones.

    All processes that share a model must call this together.

    Args:
        folder: folder of a run's checkpoints, possibly remote (`"gs://bucket/run"`).
        step: number of training steps so far.
        groups: variables by group, such as `{"model": model.variables}`. Restoring
            needs the same order.
        state: further JSON data.
        keep: number of newest checkpoints to keep.
        keep_every: also keep checkpoints at multiples of this step.
        keep_steps: also keep checkpoints at these steps.

    Returns:
        The checkpoint's folder.

    Raises:
        NonFiniteLoss: a variable contains NaN or Inf.
        OSError: writing failed; older checkpoints are intact.

    Example:

    >>> import tempfile
    >>> from keras_moe.training import find_checkpoint, save_checkpoint
    >>> folder, weight = tempfile.mkdtemp(), keras.Variable([1.0, 2.0])
    >>> path = save_checkpoint(folder, 7, {"model": [weight]}, {"note": "good"})
    >>> changed = weight.assign([0.0, 0.0])
    >>> checkpoint = find_checkpoint(folder)
    >>> checkpoint.restore({"model": [weight]})
    >>> checkpoint.step, checkpoint.state["note"], weight.numpy().tolist()
    (7, 'good', [1.0, 2.0])
    """
    check_integer("keep", keep)
    _check_finite(step, groups)
    content = {
        "step": step,
        "state": state,
        "variables": {
            group: [(v.path, tuple(v.shape), str(v.dtype)) for v in variables]
            for group, variables in groups.items()
        },
    }
    path = step_folder(folder, step)
    if formats.is_remote(folder) or rank_and_world_size()[1] > 1:
        checked_all_gather(lambda: formats.write_orbax(path, groups, content))
    else:
        formats.write_safetensors(path, groups, content)
    if rank_and_world_size()[0] == 0:
        try:
            _remove_older(path, keep, keep_every, keep_steps)
        except OSError as error:
            # The new checkpoint is complete all the same.
            warnings.warn(
                f"Older checkpoints could not be removed: {error}", stacklevel=2
            )
    return path


def find_checkpoint(folder: str | os.PathLike) -> Checkpoint | None:
    """Opens the newest intact checkpoint in a folder; returns None if there is none.

    Warns about newer damaged ones, and raises ValueError if all are damaged.

    Args:
        folder: folder of a run's checkpoints.

    Example: see `save_checkpoint`.
    """
    folder = formats.as_path(folder)
    damaged = []
    # Other processes may still see folders that the first one is about to delete.
    names = broadcast_from_primary(lambda: [x.name for x in list_checkpoints(folder)])
    for name in reversed(names):
        try:
            checkpoint = open_checkpoint(folder / name, folder)
        except ValueError as error:
            damaged.append(str(error))
            continue
        if damaged:
            warnings.warn(f"Skips checkpoints: {'; '.join(damaged)}", stacklevel=2)
        return checkpoint
    if damaged:
        raise ValueError(f"{'; '.join(damaged)}. Remove them to start over")
    return None


def open_checkpoint(
    path: str | os.PathLike, within: str | os.PathLike | None = None
) -> Checkpoint:
    """Opens a checkpoint, or raises ValueError if it is missing or damaged.

    Args:
        path: its folder.
        within: folder out of which a link may not lead, if any.

    Example: see `save_checkpoint`.
    """
    opened: list[Checkpoint] = []
    try:
        # All processes learn of it where one does not reach the folder.
        checked_all_gather(lambda: opened.append(_read(path, within)))
    except (OSError, ValueError) as error:
        raise unfit("a whole checkpoint", f"{path} ({error})") from error
    return opened[0]


def list_checkpoints(folder: str | os.PathLike) -> list[Any]:
    """Lists the folders of a run's checkpoints, oldest first, damaged ones included."""
    parent = formats.reached_path(folder)
    if not parent.exists():
        return []
    paths = [path for path in parent.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(paths, key=_step_of)


def clean_folder(folder: str | os.PathLike, everything: bool = False) -> None:
    """Deletes leftovers of interrupted writes, and optionally all checkpoints."""

    def clean() -> None:
        parent = formats.reached_path(folder)
        for path in list(parent.iterdir()) if parent.exists() else ():
            if (leftover := _LEFTOVER.fullmatch(path.name)) is None:
                continue
            if leftover["replaced"]:
                recover_folder(parent / leftover["replaced"])
            else:
                _remove(path)
        for path in list_checkpoints(parent) if everything else ():
            _remove(path)

    broadcast_from_primary(clean)


@contextlib.contextmanager
def run_lock(folder: str | os.PathLike) -> Iterator[None]:
    """Locks a run's checkpoint folder, as `train` does.

    Two runs in one folder would delete each other's checkpoints. The error names the
    process that holds the lock. Remote folders are not locked.

    Args:
        folder: folder of the checkpoints; created if missing.

    Example:

    >>> import tempfile
    >>> from keras_moe.training import run_lock
    >>> folder = tempfile.mkdtemp()
    >>> with run_lock(folder):
    ...     with run_lock(folder):
    ...         pass
    Traceback (most recent call last):
        ...
    keras_moe._files.FolderInUse: Expected no one else at work on the run in ...
    """
    if formats.is_remote(folder):
        yield
        return
    folder = Path(folder)

    hint = "--output takes another folder"

    def hold() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(
            locked(folder / ".run.lock", f"the run in {folder} ({hint})")
        )

    with contextlib.ExitStack() as held:
        broadcast_from_primary(hold)
        yield


def is_checkpoint(path: str | os.PathLike) -> bool:
    """Whether a local or remote folder is a checkpoint."""
    if formats.is_remote(path):
        return True
    return (Path(path) / formats.STATE_FILE).exists() or formats.is_orbax(Path(path))


def step_folder(folder: str | os.PathLike, step: int) -> Any:
    """Returns the folder of a step's checkpoint."""
    return formats.as_path(folder) / f"step-{step:08d}"


# Folders


def _step_of(path):
    return int(path.name.removeprefix("step-"))


def _remove(path):
    if formats.is_remote(path):
        path.rmtree()
    elif path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        # Parts of a checkpoint have similar names.
        aside = new_partial(path)
        os.rename(path, aside / path.name)
        shutil.rmtree(aside)


def _remove_older(newest, keep, keep_every, keep_steps):
    paths = list_checkpoints(newest.parent)
    # Newer checkpoints are damaged: the run resumed from an earlier one.
    for path in paths[paths.index(newest) + 1 :]:
        _remove(path)
    for path in paths[: paths.index(newest) + 1][:-keep]:
        step = _step_of(path)
        if step not in keep_steps and (keep_every is None or step % keep_every):
            _remove(path)


# Variables


def _check_finite(step, groups):
    for group, variables in groups.items():
        for variable in variables:
            is_float = keras.backend.is_float_dtype(variable.dtype)
            if is_float and not bool(ops.all(ops.isfinite(variable.value))):
                where = f"{group}/{variable.path}"
                raise NonFiniteLoss(
                    step, f"Expected finite values; received: NaN or Inf in {where}"
                )


def _fits(group, saved, variable):
    same = tuple(saved.shape) == tuple(variable.shape)
    same = same and ("float" in saved.dtype) == ("float" in variable.dtype)
    if group != "model":
        return same
    # Keras calls unnamed variables "variable". The last name alone would not tell the
    # kernels of two layers apart.
    paths = {_plain(saved.path), _plain(variable.path)} - {"variable"}
    return same and len(paths) < 2


def _plain(path):
    # Keras renumbers layers and unnamed variables in each process.
    return re.sub(r"_?\d+(?=/|$)", "", path)


def _read(path, within):
    """Opens the checkpoint in a folder and verifies its files."""
    path = formats.reached_path(path)
    if within is not None and not formats.is_remote(path):
        path_within(path, within)
    read = formats.read_orbax if formats.is_orbax(path) else formats.read_safetensors
    try:
        content = read(path)
        variables = {
            group: [SavedVariable(*entry) for entry in entries]
            for group, entries in content["variables"].items()
        }
        step, state = content["step"], content["state"]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its state is damaged: {error!r}") from error
    # A copy under another name would pass for another step of its run.
    if _STEP.fullmatch(path.name) and step != _step_of(path):
        raise ValueError(f"it is of step {step}")
    return Checkpoint(path, step, state, variables)
