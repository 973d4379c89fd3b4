"""Locks of folders: one process at a time, and its name for the others."""

import contextlib
import datetime
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from keras_moe.files import write_all, write_failed

try:
    import fcntl
except ImportError:  # Windows.
    fcntl = None

_POLL_SECONDS = 0.05
# What this process holds, with what their files say: the system's locks do not tell its
# threads apart, and end when this process closes any descriptor of the file.
_held: dict[Path, dict] = {}
_held_guard = threading.Lock()


class FolderInUse(OSError):
    """Another process, or thread, holds the lock of a folder."""


@contextlib.contextmanager
def locked(
    path: str | os.PathLike, purpose: str, patience: float = 0.0
) -> Iterator[None]:
    """Holds a lock, whose file names its owner.

    The owner's process, host and time are in the file, which is removed at the end. A
    process that was killed leaves its file behind, and the next one takes it over: the
    system has given up the killed one's lock, and its process is not there any more.

    Args:
        path: path of the lock's file, in a folder that exists.
        purpose: subject of the error's message, such as `"the run in runs/a"`.
        patience: seconds to wait for another owner.

    Raises:
        FolderInUse: an OSError that names the owner, if there still is one.
        OSError: if the file cannot be written.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.locks import locked
    >>> path = os.path.join(tempfile.mkdtemp(), ".lock")
    >>> with locked(path, "the folder"):
    ...     with locked(path, "the folder"):
    ...         pass
    Traceback (most recent call last):
        ...
    keras_moe.locks.FolderInUse: Expected no one else at work on the folder...
    """
    path = Path(path).absolute()
    path = path.parent.resolve() / path.name
    deadline = time.monotonic() + patience
    while isinstance(found := _acquire(path), dict):
        if time.monotonic() >= deadline:
            raise FolderInUse(
                f"Expected no one else at work on {purpose}; received: "
                f"{_described(found)}, which holds {path}"
            )
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        # Removed before the lock is given up, so that this is not the next owner's.
        path.unlink(missing_ok=True)
        os.close(found)
        with _held_guard:
            del _held[path]


def _acquire(path):
    """The descriptor of a lock's file that is now ours, or its owner."""
    mine = _this_process()
    with _held_guard:
        if path in _held:
            return _held[path]
        owner = None
        # None again and again, as long as others remove the file that was opened.
        while owner is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                owner = _take(descriptor, path, mine)
            finally:
                if owner is not mine:
                    os.close(descriptor)
        if owner is mine:
            _held[path] = mine
            return descriptor
        return owner


def _take(descriptor, path, mine):
    """Writes this process into a lock's file, or returns the process that is in it.

    Returns None where the file lost its name after it was opened.
    """
    free = _system_lock(descriptor)
    before = _read(descriptor)
    if not free:
        return before
    if not _is_at(descriptor, path):
        return None
    # Alive, although the system's lock is free: its process may have closed another
    # descriptor of the file, as a backup of the folder does.
    if _is_alive(before):
        return before
    if before and not _is_here(before):
        warnings.warn(
            f"{path} was left by {_described(before)}; no one holds it, and it is "
            "taken over",
            stacklevel=5,
        )
    text = (json.dumps(mine) + "\n").encode()
    try:
        os.ftruncate(descriptor, 0)
        with open(descriptor, "r+b", buffering=0, closefd=False) as file:
            file.seek(0)
            write_all(file, text)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise write_failed(error, path, len(text)) from error
    return mine


def _system_lock(descriptor):
    """Whether no other process has the system's lock, which is now ours."""
    if fcntl is None:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        # A file system without locks: what the file says must do.
        pass
    return True


def _is_at(descriptor, path):
    """Whether an open file still has its name: its owner may just have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _read(descriptor):
    """What a lock's file says of its owner, {} if it is not whole."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        owner = json.loads(os.read(descriptor, 4096))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _this_process():
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "system": _system(),
        "started": _started(os.getpid()),
    }


def _described(owner):
    if not owner:
        return "a process that has not yet said its name"
    return (
        f"process {owner.get('process')} on host {owner.get('host')}, since "
        f"{owner.get('time')}"
    )


def _is_here(owner):
    """Whether an owner is of this host, and its number one of this system's."""
    return owner.get("host") == socket.gethostname() and (
        owner.get("system") == _system()
    )


def _is_alive(owner):
    """Whether an owner of this host is still there."""
    started = owner.get("started")
    return (
        started is not None
        and _is_here(owner)
        and _started(owner.get("process")) == started
    )


def _system():
    """The boot and the name space of processes, in which their numbers are unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(process):
    """When a process began, in ticks since the boot; None if it is not there."""
    try:
        # Behind the command's name, which may have spaces and parentheses.
        fields = Path(f"/proc/{int(process)}/stat").read_text().rpartition(")")[2]
        state, started = fields.split()[0], fields.split()[19]
    except (OSError, TypeError, ValueError, IndexError):
        return None
    # A zombie was killed, and its parent has not yet asked how.
    return None if state in "ZX" else int(started)
