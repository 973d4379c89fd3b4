"""Locks of folders, whose files name the process that holds them."""

import contextlib
import datetime
import errno
import json
import os
import socket
import stat
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
# A lock's file is short, and begins like this, even if it was truncated.
_LARGEST = 4096
_BEGINNING = b'{"process": '
# Windows has no such flag.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# The locks of this process, with the content of their files: the system's locks do not
# distinguish its threads, and end when it closes any descriptor of the file.
_held: dict[Path, dict] = {}
_held_guard = threading.Lock()


class FolderInUse(OSError):
    """Another process, or thread, holds the lock of a folder."""


@contextlib.contextmanager
def locked(
    path: str | os.PathLike, purpose: str, patience: float = 0.0
) -> Iterator[None]:
    """Holds a lock, whose file names its owner."""
    path = Path(path).absolute()
    path = path.parent.resolve() / path.name
    deadline = time.monotonic() + patience
    while isinstance(held := _acquire(path), dict):
        if time.monotonic() >= deadline:
            raise FolderInUse(
                f"Expected no one else at work on {purpose}; received: "
                f"{_described(held)}, which holds {path}"
                + (
                    ". Remove that file if that process is gone"
                    if held and not _can_be_looked_up(held)
                    else ""
                )
            )
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        _release(path, held)


def _acquire(path):
    """The descriptor of a lock's file that this process now holds, or its owner."""
    mine = _this_process()
    with _held_guard:
        # A forked process has its parent's entries, and none of its parent's locks.
        if path in _held and _held[path]["process"] == mine["process"]:
            return _held[path]
        owner = None
        # The owner is None as long as others remove the file that was opened.
        while owner is None:
            descriptor = _open(path)
            try:
                owner = _take(descriptor, path, mine)
            finally:
                if owner is not mine:
                    os.close(descriptor)
        if owner is mine:
            _held[path] = mine
            return descriptor
        return owner


def _open(path):
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _no_lock(path, "a link") from error
        raise


def _no_lock(path, received):
    return OSError(
        errno.EEXIST, f"Expected no file or one of a lock; received: {received}", path
    )


def _take(descriptor, path, mine):
    """Writes this process into a lock's file, or returns the process that is in it.

    Returns None where the file lost its name after it was opened.
    """
    file = os.fstat(descriptor)
    if not stat.S_ISREG(file.st_mode):
        raise _no_lock(path, "no plain file")
    lock = _system_lock(descriptor)
    text = _read(descriptor)
    before = _owner_in(text)
    if lock == "busy":
        return before
    if not _is_at(descriptor, path):
        return None
    # An owner may be alive although the system's lock is free: its process may have
    # closed another descriptor of the file, as a backup of the folder does.
    if _is_alive(before):
        return before
    if before and lock == "unknown" and not _can_be_looked_up(before):
        return before
    if file.st_nlink > 1:
        raise _no_lock(path, f"a file of {file.st_nlink} names")
    if not (before or _is_cut_off(text)):
        raise _no_lock(path, f"a file that begins with {text[:40]!r}")
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
        with contextlib.suppress(OSError):
            path.unlink()
        raise write_failed(error, path, len(text)) from error
    return mine


def _release(path, descriptor):
    """Releases a lock; an error of the file system must not hide one of the work."""
    with _held_guard:
        entry = _held.pop(path)
        try:
            # The parent of a forked process still holds the lock.
            if entry["process"] == os.getpid() and _is_at(descriptor, path):
                # The file goes before the lock, so that it is not the next owner's.
                path.unlink()
        except OSError:
            # An empty file has no owner.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
        finally:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _system_lock(descriptor):
    """Asks for the system's lock: "got", "busy", or "unknown" where there are none."""
    if fcntl is None:
        return "unknown"
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return "busy"
    except OSError:
        # The file system has no locks: the file's content has to do.
        return "unknown"
    return "got"


def _is_at(descriptor, path):
    """Whether an open file still has its name: its owner may just have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _read(descriptor):
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, _LARGEST + 1)


def _owner_in(text):
    """The owner that a lock's file names, {} if it is not whole."""
    try:
        owner = json.loads(text)
    except (RecursionError, ValueError):
        return {}
    is_whole = isinstance(owner, dict) and isinstance(owner.get("process"), int)
    return owner if is_whole else {}


def _is_cut_off(text):
    """Whether a file may be a lock's that did not come to the disk as a whole."""
    text = text.rstrip(b"\0")
    return len(text) <= _LARGEST and (
        text.startswith(_BEGINNING) or _BEGINNING.startswith(text)
    )


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
        return "a process that has not yet written its name"
    return (
        f"process {owner.get('process')} on host {owner.get('host')}, since "
        f"{owner.get('time')}"
    )


def _is_here(owner):
    """Whether an owner is of this host, with a number of this system."""
    return owner.get("host") == socket.gethostname() and (
        owner.get("system") == _system()
    )


def _can_be_looked_up(owner):
    """Whether this system knows if an owner is still there."""
    return owner.get("started") is not None and _is_here(owner)


def _is_alive(owner):
    """Whether an owner of this host is still there."""
    return _can_be_looked_up(owner) and (
        _started(owner.get("process")) == owner["started"]
    )


def _system():
    """The boot and the name space in which the numbers of processes are unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(process):
    """The start of a process in ticks since the boot; None if it is not there."""
    try:
        # The fields follow the command's name, which may have spaces and parentheses.
        fields = Path(f"/proc/{int(process)}/stat").read_text().rpartition(")")[2]
        state, started = fields.split()[0], fields.split()[19]
    except (OSError, TypeError, ValueError, IndexError):
        return None
    # A zombie was killed, and its parent has not yet waited for it.
    return None if state in "ZX" else int(started)
