"""Checkpoints of a run: found, opened, written and removed, whatever their storage."""

import importlib.util
import os
from collections.abc import Collection, Sequence
from typing import Any

import keras

from keras_moe.training.agreement import first_decides, shared_by
from keras_moe.training.local_storage import LocalStorage
from keras_moe.training.orbax_storage import OrbaxStorage, is_orbax
from keras_moe.training.storage import Checkpoint, Retention, Storage, is_remote


def new_storage(folder: str | os.PathLike | Storage) -> Storage:
    """The storage of a run's checkpoints.

    Processes that share a model by a distribution of Keras call this together.

    A folder that has checkpoints keeps their format. Otherwise `OrbaxStorage` has
    those of remote folders, such as `gs://bucket/run`, and those of several processes
    that share a model, where orbax-checkpoint is installed; `LocalStorage` has all
    others.

    Args:
        folder: folder of the checkpoints, or a storage.

    Raises:
        ImportError: if orbax-checkpoint is needed and not installed.

    Example:

    >>> from keras_moe.training.checkpoints import new_storage
    >>> type(new_storage("runs/mine/checkpoints")).__name__
    'LocalStorage'
    """
    if isinstance(folder, Storage):
        return folder
    if is_remote(folder):
        return OrbaxStorage(folder)
    # Other processes may see what the first is about to remove.
    by_orbax = first_decides(lambda: _is_by_orbax(folder))
    return OrbaxStorage(folder) if by_orbax else LocalStorage(folder)


def _is_by_orbax(folder):
    """Whether a local folder's checkpoints are those of `OrbaxStorage`."""
    paths = LocalStorage(folder).paths()
    if any(is_orbax(path) for path in paths):
        return True
    # Empty ones were begun by a storage that fills them in place, and was killed.
    if any(any(path.iterdir()) for path in paths):
        return False
    return shared_by()[1] > 1 and importlib.util.find_spec("orbax") is not None


def save_checkpoint(
    folder: str | os.PathLike | Storage,
    step: int,
    groups: dict[str, Sequence[keras.Variable]],
    state: dict,
    keep: int = 3,
    keep_every: int | None = None,
    keep_steps: Collection[int] = (),
) -> Any:
    """Writes a checkpoint, and removes older ones once it is there.

    Where variables lie on several processes, all of these call it.

    Args:
        folder: folder of all checkpoints of a run, or their storage.
        step: how many steps were made.
        groups: variables in the order in which they will be restored, such as
            `{"model": model.variables, "optimizer": model.optimizer.variables}`.
        state: further state, JSON.
        keep: how many checkpoints stay.
        keep_every: those of steps that this divides stay, too.
        keep_steps: those of these steps stay, too.

    Returns:
        The checkpoint's folder.

    Raises:
        NonFiniteValues: a ValueError, if a value is not finite.
        ValueError: if the state is not JSON.
        OSError: if it cannot be written. Nothing is left of it then, and the
            checkpoints before are as they were.

    Example:

    >>> import tempfile
    >>> import keras
    >>> from keras_moe.training import find_checkpoint, restore_checkpoint
    >>> from keras_moe.training import save_checkpoint
    >>> folder, weight = tempfile.mkdtemp(), keras.Variable([1.0, 2.0])
    >>> path = save_checkpoint(folder, 7, {"model": [weight]}, {"note": "good"})
    >>> changed = weight.assign([0.0, 0.0])
    >>> checkpoint = find_checkpoint(folder)
    >>> restore_checkpoint(checkpoint, {"model": [weight]})
    >>> checkpoint.step, checkpoint.state["note"], keras.ops.max(weight).item()
    (7, 'good', 2.0)
    """
    retention = Retention(keep, keep_every, keep_steps)
    return new_storage(folder).save(step, groups, state, retention)


def find_checkpoint(folder: str | os.PathLike | Storage) -> Checkpoint | None:
    """The newest checkpoint that is whole.

    Args:
        folder: folder of a run's checkpoints, or their storage.

    Returns:
        The checkpoint, or None if there never was any. A warning names newer ones whose
        files are missing or are not what was written.

    Raises:
        ValueError: if there are checkpoints, and none is whole.

    Example: see `save_checkpoint`.
    """
    return new_storage(folder).newest()


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """One checkpoint, if it is whole.

    Args:
        path: its folder.

    Raises:
        ValueError: if there is none, or its files are not what was written.

    Example: see `save_checkpoint`.
    """
    remote = is_remote(path)
    place = OrbaxStorage.as_path(path) if remote else LocalStorage.as_path(path)
    kind = OrbaxStorage if remote or is_orbax(place) else LocalStorage
    return kind(place.parent).open(place)


def list_checkpoints(folder: str | os.PathLike | Storage) -> list[Any]:
    """The folders of a run's checkpoints, oldest first; they are not looked into.

    Args:
        folder: folder of a run's checkpoints, or their storage.

    Example:

    >>> from keras_moe.training import list_checkpoints
    >>> list_checkpoints("nowhere")
    []
    """
    if not isinstance(folder, Storage):
        # Names alone, which are the same in any storage.
        kind = OrbaxStorage if is_remote(folder) else LocalStorage
        folder = kind(folder)
    return folder.paths()


def restore_checkpoint(
    checkpoint: Checkpoint, groups: dict[str, Sequence[keras.Variable]]
) -> None:
    """Gives variables the values of a checkpoint.

    They may lie on other devices, or other numbers of devices, than those that were
    saved; each process reads the pieces that it needs.

    Args:
        checkpoint: a checkpoint of `find_checkpoint`.
        groups: the groups to restore, their variables in the order of saving. There may
            be fewer groups than were saved.

    Raises:
        ValueError: if a group is not there, or variables differ in number or shape.

    Example: see `save_checkpoint`.
    """
    checkpoint.storage.restore(checkpoint, groups)


def clean_checkpoints(
    folder: str | os.PathLike | Storage, everything: bool = False
) -> None:
    """Removes what writing left behind that never came to its end.

    Args:
        folder: folder of a run's checkpoints, or their storage, in which nothing is
            being written.
        everything: whether to remove all checkpoints, too.

    Example:

    >>> from keras_moe.training import clean_checkpoints
    >>> clean_checkpoints("nowhere")
    """
    new_storage(folder).clean(everything)
