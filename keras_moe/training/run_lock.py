"""One process at a time in a run's folder."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from keras_moe.locks import locked
from keras_moe.processes import process_shard
from keras_moe.training.agreement import first_decides, shared_by
from keras_moe.training.storage import is_remote

LOCK = ".run.lock"


@contextlib.contextmanager
def run_lock(folder: str | os.PathLike) -> Iterator[None]:
    """Holds the folder of a run's checkpoints, as `train` does.

    Two runs that save to one folder would remove each other's checkpoints. The lock
    says which process holds it, on which host, and since when; that of a process that
    was killed is taken over. The first of the processes that train one model together
    holds the lock for all: they call this together, and have its error together. A
    remote folder, as `gs://bucket/run`, is not locked.

    Args:
        folder: folder of the checkpoints, made if it is not there.

    Raises:
        FolderInUse: an OSError that names the process that holds it.

    Example:

    >>> import tempfile
    >>> from keras_moe.training import run_lock
    >>> folder = tempfile.mkdtemp()
    >>> with run_lock(folder):
    ...     with run_lock(folder):
    ...         pass
    Traceback (most recent call last):
        ...
    keras_moe.locks.FolderInUse: Expected no one else at work on the run in ...
    """
    # A store of objects has no locks.
    if is_remote(folder):
        yield
        return
    folder = Path(folder)

    def hold() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(locked(folder / LOCK, f"the run in {folder}"))

    with contextlib.ExitStack() as held:
        if shared_by()[1] > 1 or process_shard()[0] == 0:
            first_decides(hold)
        yield


def holds_run_folder(train: Callable) -> Callable:
    """Makes a function hold the lock of its `checkpoint_dir`, if it is given one."""
    signature = inspect.signature(train)

    @functools.wraps(train)
    def train_alone(*args, **kwargs):
        folder = signature.bind(*args, **kwargs).arguments.get("checkpoint_dir")
        with contextlib.nullcontext() if folder is None else run_lock(folder):
            return train(*args, **kwargs)

    return train_alone
