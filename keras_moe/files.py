"""Files and folders that are written as a whole, or not at all.

Content goes to a new name beside its target, is brought to the disk, and then takes the
target's place. Modes follow the umask. A failure is an OSError with the path and the
number of bytes, and leaves the older file or folder.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_READ_SIZE = 1 << 22
_PARTIAL = ".partial"


def write_failed(error: OSError, path: str | os.PathLike, size: int) -> OSError:
    """An error with the file that could not be written, and the bytes that it needs."""
    reason = f"{error.strerror or error}; received: {size:,} bytes to write"
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(Path(path).absolute().parent).free
        reason += f", and {free:,} bytes free"
    return OSError(error.errno, reason, str(path))


@contextlib.contextmanager
def new_file(path: str | os.PathLike, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write bytes to, which takes its place when all is written."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.part")
    try:
        with open(part, "x+b", buffering=0) as file:
            yield file
            if durable:
                os.fsync(file.fileno())
        replace_file(part, path, durable)
    except OSError as error:
        if error.filename is not None:
            raise
        size = part.stat().st_size if part.exists() else 0
        raise write_failed(error, path, size) from error
    finally:
        part.unlink(missing_ok=True)


def replace_file(
    new: str | os.PathLike, path: str | os.PathLike, durable: bool = True
) -> None:
    """Puts a file that is on the disk in the place of another one."""
    os.replace(new, path)
    if durable:
        sync_folder(Path(path).parent)


def write_all(file: BinaryIO, data: Any) -> None:
    """Writes all of a buffer to an unbuffered file, which may take a part at a time."""
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[file.write(rest) :]


def write_bytes(path: str | os.PathLike, data: Any, durable: bool = True) -> None:
    """Writes a file as a whole, or leaves the one that is there."""
    with new_file(path, durable) as file:
        try:
            write_all(file, data)
        except OSError as error:
            raise write_failed(error, path, memoryview(data).nbytes) from error


def write_text(path: str | os.PathLike, text: str, durable: bool = True) -> None:
    """Writes a text in UTF-8 as `write_bytes` does."""
    write_bytes(path, text.encode(), durable)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes a JSON file as a whole, or leaves the one that is there.

    NaN and infinities, which JSON does not have, become null.
    """
    write_text(path, json_text(value) + "\n")


def json_text(value: Any) -> str:
    """A value as indented JSON, in which NaN and infinities are null."""
    return json.dumps(_without_non_finite(value), indent=2, allow_nan=False)


def _without_non_finite(value):
    if isinstance(value, dict):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync_file(path: str | os.PathLike) -> None:
    """Brings a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: str | os.PathLike) -> None:
    """Brings the names in a folder to the disk."""
    # Windows opens no folders.
    if os.name != "nt":
        sync_file(path)


def sync_tree(path: str | os.PathLike) -> None:
    """Brings a folder with all that is in it to the disk."""
    for parent, _, names in os.walk(path):
        for name in names:
            file = os.path.join(parent, name)
            if os.path.isfile(file) and not os.path.islink(file):
                sync_file(file)
        sync_folder(parent)


def sha256_of(path: str | os.PathLike) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_READ_SIZE):
            digest.update(chunk)
    return digest.hexdigest()


def is_plain_file(folder: str | os.PathLike, name: Any) -> bool:
    """Whether a name is that of a plain file in a folder, and no link or path."""
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name:
        return False
    if re.search(r"[/\\]", name):
        return False
    path = Path(folder) / name
    return path.is_file() and not path.is_symlink()


def new_partial(target: str | os.PathLike) -> Path:
    """Makes an empty folder beside a target, for the content that replaces it."""
    target = Path(target)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{_PARTIAL}")
    partial.mkdir()
    return partial


def replace_folder(
    new: str | os.PathLike, target: str | os.PathLike, aside: str | os.PathLike
) -> None:
    """Puts a folder in the place of another one, or leaves the one that is there.

    No file system exchanges two folders everywhere: a process that is killed between
    the two renames leaves the older folder at `aside`, where its owner looks for it.
    """
    new, target, aside = Path(new), Path(target), Path(aside)
    replaces = target.exists()
    if replaces:
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    try:
        os.rename(new, target)
    except BaseException:
        if replaces:
            os.rename(aside, target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove_folder(path: str | os.PathLike, aside: str | os.PathLike) -> None:
    """Removes a folder at once: half of it is never at its place."""
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside)


def remove_partials(target: str | os.PathLike) -> None:
    """Removes the folders of `new_partial` that killed processes have left."""
    target = Path(target)
    # `new_partial` draws eight hexadecimal digits.
    own = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}{_PARTIAL}")
    for path in target.parent.iterdir():
        if own.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def shipped_files(folder: str, suffix: str = ".json") -> dict[str, Path]:
    """The files of a folder that ships with the library, by their names."""
    # Inside the wheel the folders lie in the package, in a checkout beside it.
    package = Path(__file__).resolve().parent
    folders = (package / folder, package.parent / folder)
    place = next(path for path in folders if path.is_dir())
    return {path.stem: path for path in sorted(place.glob(f"*{suffix}"))}
