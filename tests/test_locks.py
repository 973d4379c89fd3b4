"""One process at a time holds a folder; the others learn which, and none for ever."""

import errno
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from keras_moe import locks
from keras_moe.locks import FolderInUse, locked

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.backend_free

# Without the package's own imports, which take seconds.
HOLDER = """
import importlib.util, sys, types

package = types.ModuleType("keras_moe")
package.__path__ = [sys.argv[1]]
sys.modules["keras_moe"] = package
from keras_moe.locks import locked

with locked(sys.argv[2], "the folder"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / ".lock"


@pytest.fixture
def holder(path):
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(ROOT / "keras_moe"), str(path)],
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


def written(path, **changes):
    """A lock's file of an owner who is no more, with some of it changed."""
    with locked(path, "the folder"):
        owner = json.loads(path.read_text())
    path.write_text(json.dumps({**owner, **changes}))


def assert_free(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with locked(path, "the folder"):
            owner = json.loads(path.read_text())
            assert owner["process"] == os.getpid()
            assert {"host", "time"} < set(owner)
    assert not path.exists()


def assert_held(path, process, named=None):
    message = (
        rf"at work on the folder; received: process {process} on host \S+, since "
        rf"\d{{4}}-\d\d-\d\dT.*, which holds {named or path}"
    )
    with pytest.raises(FolderInUse, match=message), locked(path, "the folder"):
        pass


def test_a_lock_is_given_back(path):
    assert_free(path)
    with pytest.raises(KeyError), locked(path, "the folder"):
        raise KeyError
    assert_free(path)


def test_another_process_is_named_and_its_end_frees_the_lock(path, holder):
    assert_held(path, holder.pid)
    # Copies of the file do not free it, either.
    path.read_text()
    assert_held(path, holder.pid)
    holder.stdin.close()
    with locked(path, "the folder", patience=60):
        assert holder.wait(60) == 0


def test_a_killed_process_does_not_keep_its_lock(path, holder):
    holder.kill()
    # Not waited for: it is a zombie until the fixture asks.
    with locked(path, "the folder", patience=60):
        pass
    assert not path.exists()


def test_threads_are_told_apart(path):
    link = path.parent / "link"
    link.symlink_to(path.parent)
    with locked(path, "the folder"):
        errors = []

        def second():
            try:
                assert_held(path, os.getpid())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert errors == []
        # By another path, too.
        assert_held(link / path.name, os.getpid(), path)
    assert_free(path)


def test_what_a_killed_process_left_is_taken_over(path):
    # Cut off while it was being written; and a number that another process has now.
    path.write_text("")
    assert_free(path)
    path.write_text('{"process": ')
    assert_free(path)
    written(path, process=999_999_999)
    assert_free(path)
    written(path, started=1)
    assert_free(path)


def test_a_live_process_keeps_its_lock_without_the_system(path, holder):
    """The lock is gone, as where file systems have none or a copy was closed."""
    text = path.read_text()
    path.unlink()
    path.write_text(text)
    assert_held(path, holder.pid)


@pytest.mark.parametrize("changes", [{"host": "other"}, {"system": "other boot"}])
def test_an_owner_elsewhere_is_taken_over_with_a_warning(path, changes):
    written(path, **changes)
    with (
        pytest.warns(UserWarning, match=r"left by process \d+ on host"),
        locked(path, "the folder"),
    ):
        pass
    assert not path.exists()


@pytest.fixture
def no_system_locks(monkeypatch):
    """A file system without locks."""

    def lockf(*_):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(locks.fcntl, "lockf", lockf)


@pytest.mark.parametrize("changes", [{"host": "other"}, {"started": None}])
def test_an_owner_elsewhere_stays_where_the_system_has_no_locks(
    path, no_system_locks, changes
):
    written(path, **changes)
    message = r"which holds .*\.lock\. Remove that file if that process is gone"
    with pytest.raises(FolderInUse, match=message), locked(path, "the folder"):
        pass
    path.unlink()
    assert_free(path)


def test_what_a_killed_process_here_left_is_taken_over_without_locks(
    path, no_system_locks
):
    written(path, process=999_999_999)
    assert_free(path)


def test_a_file_of_something_else_is_not_destroyed(path):
    precious = path.with_name("precious")
    precious.write_text("all that I have")
    path.symlink_to(precious)
    with pytest.raises(OSError, match="received: a link"), locked(path, "it"):
        pass
    path.unlink()
    path.hardlink_to(precious)
    with pytest.raises(OSError, match="of 2 names"), locked(path, "it"):
        pass
    precious.unlink()
    with pytest.raises(OSError, match="begins with b'all"), locked(path, "it"):
        pass
    assert path.read_text() == "all that I have"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="no plain file"), locked(path, "it"):
        pass


def test_hostile_files_are_not_whole(path):
    written(path, process=float("inf"))
    assert_free(path)
    path.write_bytes(bytes(100))
    assert_free(path)
    path.write_text("[" * 4096)
    message = "received: a file that begins"
    with pytest.raises(OSError, match=message), locked(path, "the folder"):
        pass


def test_a_file_that_cannot_be_removed_does_not_lock_its_process_out(path, monkeypatch):
    def unlink(*_, **__):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(KeyError), locked(path, "the folder"):
        raise KeyError
    monkeypatch.undo()
    assert path.read_bytes() == b""
    assert_free(path)


def test_a_forked_process_leaves_its_parents_lock(path):
    lock = locked(path, "the folder")
    lock.__enter__()
    child = os.fork()
    if child == 0:
        try:
            lock.__exit__(None, None, None)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(path.read_text())["process"] == os.getpid()
    lock.__exit__(None, None, None)
    assert not path.exists()
