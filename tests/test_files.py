"""Files are whole or not there, and one process at a time holds a lock."""

import ast
import errno
import json
import math
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from keras_moe import _files
from keras_moe._files import FolderInUse, locked
from tests.forks import ROOT
from tests.refusals import refuses


def test_what_is_written_is_there_as_a_whole(tmp_path):
    path = tmp_path / "one.json"
    for value in ({"a": 1}, {"b": "\u00e4"}):
        _files.write_json(path, value)
        assert json.loads(path.read_text(encoding="utf-8")) == value
    assert os.listdir(tmp_path) == ["one.json"]

    def refuse(name):
        raise ValueError(name)

    history = {"loss": [0.5, float("nan")], "pair": (float("inf"), 1), "x": -math.inf}
    _files.write_json(tmp_path / "results.json", history)
    text = (tmp_path / "results.json").read_text()
    actual = json.loads(text, parse_constant=refuse)
    assert actual == {"loss": [0.5, None], "pair": [None, 1], "x": None}


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_modes_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        _files.write_text(tmp_path / "file", "a")
        partial = _files.new_partial(tmp_path / "folder")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(partial.stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_a_limit_and_a_full_disk_are_one_error(tmp_path, monkeypatch, number):
    def refused(descriptor, offset, size):
        assert size == 5000
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refused)
    with pytest.raises(OSError, match=r"5,000 bytes to write, and .* free") as report:
        _files.write_text(tmp_path / "file", "x" * 5000)
    assert report.value.errno == number
    assert os.listdir(tmp_path) == []
    # This says that the file system does not reserve.
    number = errno.EOPNOTSUPP
    _files.write_text(tmp_path / "file", "x" * 5000)
    assert os.listdir(tmp_path) == ["file"]


def folder_of(path, content):
    path.mkdir()
    (path / "file").write_text(content)
    return path


def test_a_folder_replaces_another(tmp_path):
    target = tmp_path / "target"
    _files.replace_folder(folder_of(tmp_path / "new", "first"), target)
    assert (target / "file").read_text() == "first"
    # A killed process may have left the folder that it put aside.
    folder_of(_files.previous_folder(target), "left")
    _files.replace_folder(folder_of(tmp_path / "new", "second"), target)
    assert (target / "file").read_text() == "second"
    assert os.listdir(tmp_path) == ["target"]


def test_a_folder_that_is_not_replaced_stays(tmp_path, monkeypatch):
    target = folder_of(tmp_path / "target", "old")
    new = folder_of(tmp_path / "new", "new")
    rename = os.rename

    def fail(old_path, new_path):
        if old_path == new:
            raise OSError(errno.EIO, "Input/output error")
        rename(old_path, new_path)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        _files.replace_folder(new, target)
    assert (target / "file").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["new", "target"]


def test_names_of_plain_files(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("a")
    (tmp_path / "folder" / "file").write_text("a")
    (tmp_path / "link").symlink_to("file")
    assert _files.is_plain_file(tmp_path, "file")
    for name in (
        "folder", "link", "absent", "", ".", "..", "folder/file", "../file", 3, None,
        str(tmp_path / "file"), "folder\\file", "file\0",
    ):  # fmt: skip
        assert not _files.is_plain_file(tmp_path / "folder" / "..", name)


# Locks

# Without the package's own imports, and Keras for its checks, which take seconds.
HOLDER = """
import importlib.util, sys, types

package = types.ModuleType("keras_moe")
package.__path__ = [sys.argv[1]]
sys.modules["keras_moe"] = package
sys.modules["keras"] = types.ModuleType("keras")
from keras_moe._files import locked

with locked(sys.argv[2], "the folder"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def lock(tmp_path):
    return tmp_path / ".lock"


@pytest.fixture
def holder(lock):
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(ROOT / "keras_moe"), str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def assert_held(lock, process):
    message = (
        rf"at work on the folder; received: process {process} on host \S+, since "
        rf"\d{{4}}-\d\d-\d\dT.*, which holds {lock}"
    )
    with pytest.raises(FolderInUse, match=message), locked(lock, "the folder"):
        pass


def test_a_lock_is_given_back(lock):
    def work():
        with locked(lock, "the folder"):
            assert_held(lock, os.getpid())
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            work()
        assert not lock.exists()


def test_another_process_is_named_and_its_end_frees_the_lock(lock, holder):
    assert_held(lock, holder.pid)
    holder.stdin.close()
    with locked(lock, "the folder", patience=60):
        assert holder.wait(60) == 0


def test_a_killed_process_does_not_keep_its_lock(lock, holder):
    holder.kill()
    with locked(lock, "the folder", patience=60):
        assert str(os.getpid()) in lock.read_text()
    assert not lock.exists()


# One way to write files

# Files of the package that write or rename by themselves, and why.
WRITERS = {
    "_files.py": "this is how files are written, and locks",
    "analysis/plots/_figure.py": "matplotlib draws to memory",
    "cli/main.py": "a log is appended to",
    "data/_files.py": "arrays go into a file of `_files.new_file`",
    "models/_remote.py": "Keras downloads to a folder of its own",
    "models/base/_exporting.py": "programs leave a folder of `new_partial`",
    "models/saving/_weights_file.py": "HDF5 goes into a file of `_files.new_file`",
    "training/checkpoints.py": "a checkpoint is moved away before it is deleted",
}
RENAMING = {"os.replace", "os.rename", "shutil.move"}
MODE = re.compile(r"[wax][bt+]*|r[bt]*\+[bt]*")


def writes_by_itself(source: str) -> bool:
    """Returns whether a file's source writes or renames without `keras_moe._files`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        if name == "open":
            arguments = [*node.args, *(x.value for x in node.keywords)]
            values = [x.value for x in arguments if isinstance(x, ast.Constant)]
            if any(isinstance(x, str) and MODE.fullmatch(x) for x in values):
                return True
        elif (
            called in RENAMING
            or name == "savefig"
            or (owner not in ("", "_files") and name in ("write_text", "write_bytes"))
            or (owner == "np" and name.startswith("save"))
        ):
            return True
    return False


# One door to read files

# Files of the package that open files otherwise, and why.
READERS = {
    "__init__.py": "Keras's own config, before Keras may be imported",
    "cli/main.py": "its own log",
    "data/_emoji_names.py": "a file of the package",
    "data/_examples.py": "records that `globbed` has checked",
    "data/_fashion_mnist.py": "a file of the package",
    "data/_folder.py": "images that `files_below` or `files_listed` has checked",
    "data/_texts.py": "Python's own library",
    "data/_tfrecord.py": "records that `globbed` has checked",
    "data/reading.py": "the content of a file that was read",
    "_backends/jax_compilation.py": "files of the package, and what XLA wrote",
    "distribution/chips.py": "a file of the package",
    "evaluation/zero_shot.py": "a file of the package",
    "_files.py": "this is the door, and locks",
    "models/saving/_lora.py": "weights in `checked_weights`",
    "models/base/_model.py": "weights in `checked_weights`",
    "models/registry.py": "files of the package",
    "models/tasks/base.py": "weights in `checked_weights`",
    "models/saving/_weights_file.py": "`checked_weights`, and files to write",
    "report/writing.py": "files of the package",
    "training/model_soups.py": "weights in `checked_weights`",
}
OPEN = {
    "open", "os.open", "io.open", "gzip.open", "tarfile.open", "zipfile.ZipFile",
    "np.load", "json.load", "tomllib.load", "h5py.File", "safe_open", "load_file",
    "Image.open", "ElementTree.parse", "ElementTree.iterparse", "tf.io.read_file",
    "tf.data.TFRecordDataset", "tf.raw_ops.TFRecordDatasetV2", "onnx.load",
    "keras.saving.load_model", "keras.saving.load_weights", "super().load_weights",
}  # fmt: skip
DOOR = re.compile(r"(_files\.)?\b(regular_file|open_regular|read_bytes|read_text)\(")


def reads_by_itself(source: str) -> bool:
    """Returns whether a file's source opens a path without the door of `files`."""
    nodes = [*ast.walk(ast.parse(source))]
    items = [x for node in nodes if isinstance(node, ast.With) for x in node.items]
    opened = {
        ast.unparse(x.optional_vars)
        for x in items
        if x.optional_vars and DOOR.match(ast.unparse(x.context_expr))
    }
    later: set[str] = set()
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            inputs = [ast.unparse(x) for x in (*node.args, *node.keywords)][:1]
            is_known = any(
                DOOR.match(x) or x in opened or x.startswith(("fileobj=", "self._file"))
                for x in inputs
            )
            is_method = re.search(r"\.(read_text|read_bytes)$|[pP]ath\.open$", name)
            is_known |= DOOR.fullmatch(f"{name}(") is not None
            if (is_method or name in OPEN) and not is_known:
                return True
        # A function that is called later.
        elif id(node) not in called and isinstance(node, (ast.Attribute, ast.Name)):
            later.add(ast.unparse(node))
    return not OPEN.isdisjoint(later)


@pytest.mark.parametrize(
    ("by_itself", "known"), [(writes_by_itself, WRITERS), (reads_by_itself, READERS)]
)
def test_files_are_read_and_written_in_one_way(by_itself, known):
    package = Path(_files.__file__).parent
    places = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if by_itself(path.read_text(encoding="utf-8"))
    }
    assert places == set(known)


def test_a_link_may_be_the_users_own_and_may_not_lead_out(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside / "sub", outside):
        folder.mkdir(parents=True)
        (folder / "file").write_text("text\r\n")
    (inside / "link").symlink_to("sub/file")
    (inside / "away").symlink_to(outside / "file")
    (inside / "other").symlink_to(outside)
    (tmp_path / "own").symlink_to(inside)
    os.mkfifo(inside / "pipe")
    # Seen from a folder that the user gave, by a link of theirs, or alone.
    for path in ("in/link", "own/link", "own/sub/file"):
        assert _files.read_text(tmp_path / path, tmp_path / "own") == "text\n"
    assert _files.read_bytes(inside / "away") == b"text\r\n"
    for path in ("away", "other/file", "other", "../out/file"):
        with pytest.raises(ValueError, match=r"links to stay within .*/in; .*/out"):
            _files.regular_file(inside / path, inside)
    for folder in (None, inside):
        with pytest.raises(ValueError, match=r"not a pipe or device; .*in/pipe"):
            _files.open_regular(inside / "pipe", folder)
        with pytest.raises(FileNotFoundError):
            _files.open_regular(inside / "absent", folder)
        with pytest.raises(IsADirectoryError):
            _files.open_regular(inside / "sub", folder)


def test_a_snapshot_of_a_hub_leads_to_its_blobs(tmp_path):
    cache = tmp_path / "models--me--one"
    for folder in ("blobs", "snapshots/abc/sub", "refs"):
        (cache / folder).mkdir(parents=True)
    (cache / "blobs" / "0123").write_text("text")
    (cache / "refs" / "main").write_text("abc")
    for folder in ("", "sub"):
        link = cache / "snapshots" / "abc" / folder / "link"
        link.symlink_to(os.path.join(*[".."] * (2 + bool(folder)), "blobs", "0123"))
        assert _files.read_text(link, cache / "snapshots" / "abc") == "text"
        assert _files.read_text(link, link.parent) == "text"
        assert _files.read_text(link, cache / "snapshots") == "text"
    away = cache / "snapshots" / "abc" / "away"
    away.symlink_to("../../refs/main")
    refuses("links to stay within", _files.read_text, away, cache / "snapshots" / "abc")


def test_a_hard_link_is_no_lock(tmp_path):
    other, lock = tmp_path / "other", tmp_path / ".lock"
    other.write_text("precious")
    lock.hardlink_to(other)
    with pytest.raises(OSError, match="no hard link"), locked(lock, "the folder"):
        pass
    assert other.read_text() == "precious"
