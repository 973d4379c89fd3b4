"""The door that files are read through, atomic writes of files and folders, and locks.

Nothing but regular files is read: a pipe would wait for a writer for ever. A path that
the user gave may be a link; what is found in a folder may not lead out of it. Content
is written next to the target, synced to disk, and renamed. A failed write raises an
OSError with the path and the number of bytes, and leaves the target intact.
"""

import contextlib
import datetime
import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import filelock

from keras_moe._checks import check_path, unfit

# Pillow's formats of images; its others are none of ours, whatever a name ends in.
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
_PARTIAL = ".partial"
# Seconds to wait for another process that writes the same folder.
_PATIENCE = 600


# Reading


def path_within(path: str | os.PathLike, folder: str | os.PathLike) -> str:
    """Resolves a path; refuses one that leads out of the folder it was found in."""
    real, root = os.path.realpath(path), os.path.realpath(folder)
    places = [root]
    # `models--USER--NAME/snapshots/...` of huggingface_hub's cache links to its blobs.
    cache = os.path.join(root, "").rpartition(f"{os.sep}snapshots{os.sep}")[0]
    if "--" in os.path.basename(cache):
        places.append(os.path.join(cache, "blobs"))
    for place in places:
        if real == place or real.startswith(os.path.join(place, "")):
            return real
    raise unfit(f"links to stay within {root}", f"{path}, which leads to {real}")


def open_regular(
    path: str | os.PathLike,
    within: str | os.PathLike | None = None,
    buffering: int = -1,
) -> BinaryIO:
    """Opens a regular file to read; `within` is the folder it was found in, if any."""
    real, flags = path, getattr(os, "O_NONBLOCK", 0)
    if within is not None:
        real, flags = path_within(path, within), flags | getattr(os, "O_NOFOLLOW", 0)

    def opener(name: str, own: int) -> int:
        return os.open(name, own | flags)

    file = open(real, "rb", buffering, opener=opener)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise unfit("a file, and not a pipe or device", os.fspath(path))
    return file


def regular_file(
    path: str | os.PathLike, within: str | os.PathLike | None = None
) -> str | os.PathLike:
    """Returns the path of a file that another library opens, checked alike."""
    open_regular(path, within).close()
    return path


def read_bytes(
    path: str | os.PathLike, within: str | os.PathLike | None = None
) -> bytes:
    with open_regular(path, within) as file:
        return file.read()


def read_text(
    path: str | os.PathLike,
    within: str | os.PathLike | None = None,
    encoding: str = "utf-8",
) -> str:
    """Returns the text of a regular file, with ends of lines as newlines."""
    with io.TextIOWrapper(open_regular(path, within), encoding) as file:
        return file.read()


# Writing


def write_failed(error: OSError, path: str | os.PathLike, size: int) -> OSError:
    """Returns an error with the path and the bytes that could not be written."""
    reason = f"{error.strerror or error}; received: {size:,} bytes to write"
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(Path(path).absolute().parent).free
        reason += f", and {free:,} bytes free"
    return OSError(error.errno, reason, str(path))


def check_free_space(path: str | os.PathLike, size: int) -> None:
    """Raises OSError if the disk has no space for a new file of `size` bytes."""
    free = shutil.disk_usage(Path(path).absolute().parent).free
    if size > free:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise write_failed(full, path, size)


def check_room(path: str | os.PathLike, *sizes: int) -> None:
    """Raises OSError if new files of these sizes may not be written next to `path`."""
    # Their space is reserved and given back, since a quota or a limit of the size of
    # files shows in nothing else.
    check_free_space(path, sum(sizes))
    folder = Path(path).absolute().parent
    try:
        with contextlib.ExitStack() as files:
            for size in filter(None, sizes if hasattr(os, "posix_fallocate") else ()):
                # It has no name, so that nothing is left by a killed process.
                file = files.enter_context(tempfile.TemporaryFile(dir=folder))
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        # By other errors, file systems say that they do not reserve.
        if error.errno in (errno.EDQUOT, errno.EFBIG, errno.ENOSPC):
            raise write_failed(error, path, sum(sizes)) from error


@contextlib.contextmanager
def new_file(path: str | os.PathLike, size: int = 0) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` once written; needs space for `size` bytes."""
    path = Path(path)
    check_room(path, size)
    part = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.part")
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.filename is not None:
            raise
        written = part.stat().st_size if part.exists() else 0
        raise write_failed(error, path, max(size, written)) from error
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: str | os.PathLike, data: bytes | bytearray | memoryview) -> None:
    """Writes a file atomically."""
    with new_file(path, memoryview(data).nbytes) as file:
        file.write(data)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes UTF-8 text atomically."""
    write_bytes(path, text.encode())


def write_json(path: str | os.PathLike, value: object) -> None:
    """Writes JSON atomically; NaN and infinities become null."""
    write_text(path, json_text(value) + "\n")


def json_text(value: object) -> str:
    """Returns indented JSON; NaN and infinities become null."""
    return json.dumps(_without_non_finite(value), indent=2, allow_nan=False)


def _without_non_finite(value):
    if isinstance(value, dict):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync_file(path: str | os.PathLike) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: str | os.PathLike) -> None:
    # Windows cannot open folders.
    if os.name != "nt":
        sync_file(path)


def _sync_tree(path: str | os.PathLike) -> None:
    for parent, _, names in os.walk(path):
        for name in names:
            file = os.path.join(parent, name)
            if os.path.isfile(file) and not os.path.islink(file):
                sync_file(file)
        sync_folder(parent)


def sha256_of(path: str | os.PathLike) -> str:
    with open_regular(path, buffering=0) as file:
        return hashlib.file_digest(cast(io.FileIO, file), "sha256").hexdigest()


def is_plain_file(folder: str | os.PathLike, name: object) -> bool:
    """Whether a name refers to a regular file in a folder, not to a link or path."""
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name:
        return False
    if re.search(r"[/\\]", name):
        return False
    path = Path(folder) / name
    return path.is_file() and not path.is_symlink()


def shipped_files(folder: str, suffix: str = ".json") -> dict[str, Path]:
    """Returns the files of a folder that ships with the library, by name."""
    # In the wheel these folders are inside the package, in a checkout next to it.
    package = Path(__file__).resolve().parent
    folders = (package / folder, package.parent / folder)
    shipped = next(path for path in folders if path.is_dir())
    return {path.stem: path for path in sorted(shipped.glob(f"*{suffix}"))}


# Locks


class FolderInUse(OSError):
    """Another process or thread holds the lock of a folder."""


@contextlib.contextmanager
def locked(
    path: str | os.PathLike, purpose: str, patience: float = 0.0
) -> Iterator[None]:
    """Holds a lock file, which names its holder; the system frees it after a kill."""
    path = Path(path)
    lock = filelock.FileLock(path, timeout=patience)
    try:
        lock.acquire(poll_interval=0.05)
    except filelock.Timeout as error:
        raise FolderInUse(
            f"Expected no one else at work on {purpose}; received: {_holder(path)}, "
            f"which holds {path}"
        ) from error
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    try:
        if path.stat().st_nlink > 1:
            # Its other name may be of a file that must not be overwritten.
            raise OSError(errno.EMLINK, "Expected no hard link as a lock", str(path))
        path.write_text(
            f"process {os.getpid()} on host {socket.gethostname()}, since {now}"
        )
        yield
    finally:
        # Before the release: afterwards the file may belong to the next holder.
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def _holder(path):
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if holder := read_text(path)[:200]:
            return holder
    return "another process"


# Folders


def replace_folder(new: str | os.PathLike, target: str | os.PathLike) -> None:
    """Replaces a folder by a new one, or leaves the existing one."""
    # A process killed between the two renames leaves the old folder at
    # `previous_folder`, from which `recover_folder` restores it.
    new, target = Path(new), Path(target)
    previous = previous_folder(target)
    replaces = target.exists()
    if replaces:
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(target, previous)
    try:
        os.rename(new, target)
    except BaseException:
        if replaces:
            os.rename(previous, target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def previous_folder(target: Path) -> Path:
    """Returns where `replace_folder` keeps the old folder in the meantime."""
    return target.with_name(f".{target.name}.previous")


def recover_folder(target: Path) -> None:
    """Finishes a `replace_folder` that was killed."""
    previous = previous_folder(target)
    if not previous.is_dir():
        return
    if target.is_dir() and any(target.iterdir()):
        shutil.rmtree(previous, ignore_errors=True)
        return
    if target.is_dir():
        target.rmdir()
    os.rename(previous, target)


def new_partial(target: str | os.PathLike) -> Path:
    """Makes an empty folder next to a target, for the content that replaces it."""
    target = Path(target)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{_PARTIAL}")
    partial.mkdir()
    return partial


def remove_partials(target: str | os.PathLike) -> None:
    """Deletes `new_partial` folders left by killed processes."""
    target = Path(target)
    # `new_partial` draws eight hexadecimal digits.
    own = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}{_PARTIAL}")
    for path in target.parent.iterdir():
        if own.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def staged_folder(
    folder: str | os.PathLike,
    kind: str,
    is_kind: Callable[[Path], bool],
    is_own: Callable[[Path], bool],
    finish: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
    """Yields a folder that replaces `folder` at the end, with files not `is_own`."""
    target = Path(check_path("folder", folder)).expanduser().resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.saving.lock")
    with locked(lock, f"the {kind} {folder}", _PATIENCE):
        recover_folder(target)
        check_replaceable(target, kind, is_kind)
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
            _sync_tree(staging)
            replace_folder(staging, target)
        except OSError as error:
            if error.filename is not None:
                raise
            # Errors of other libraries do not name the file.
            size = sum(path.stat().st_size for path in staging.iterdir())
            raise write_failed(error, folder, size) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def check_replaceable(target: Path, kind: str, is_kind: Callable[[Path], bool]) -> None:
    """Refuses folders of something else and the one that the program runs in."""
    existing = next(path for path in (target, *target.parents) if path.exists())
    if not existing.is_dir():
        raise unfit(f"a folder for the {kind}", f"{target}, where {existing} is a file")
    if existing != target:
        return
    is_other = any(target.iterdir()) and not is_kind(target)
    # Replacing the working folder would leave the program in a deleted one.
    if is_other or Path.cwd().is_relative_to(target):
        raise ValueError(
            f"Expected a new folder, an empty one or an older {kind}, not the one that "
            f"the program runs in, since it is replaced; received: {target}"
        )


def _keep_others(target, staging, is_own):
    for path in target.iterdir() if target.is_dir() else ():
        if is_own(path) or (staging / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, staging / path.name, symlinks=True)
        else:
            shutil.copy2(path, staging / path.name, follow_symlinks=False)
