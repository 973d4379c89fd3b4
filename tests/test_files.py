"""Files are there as a whole, or not at all, and say what could not be written."""

import ast
import errno
import json
import math
import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from keras_moe import files

pytestmark = pytest.mark.backend_free


def test_what_is_written_is_there_as_a_whole(tmp_path):
    path = tmp_path / "one.json"
    for value in ({"a": 1}, {"b": "\u00e4"}):
        files.write_json(path, value)
        assert json.loads(path.read_text(encoding="utf-8")) == value
    assert os.listdir(tmp_path) == ["one.json"]


def test_what_json_does_not_have_is_null(tmp_path):
    def refuse(name):
        raise ValueError(name)

    history = {"loss": [0.5, float("nan")], "pair": (float("inf"), 1), "x": -math.inf}
    files.write_json(tmp_path / "results.json", history)
    text = (tmp_path / "results.json").read_text()
    actual = json.loads(text, parse_constant=refuse)
    assert actual == {"loss": [0.5, None], "pair": [None, 1], "x": None}


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_modes_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        files.write_text(tmp_path / "file", "a")
        partial = files.new_partial(tmp_path / "folder")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(partial.stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize("failing", ["write_all", "fsync"])
def test_a_failed_write_says_where_and_how_much(tmp_path, monkeypatch, failing):
    path = tmp_path / "file"
    files.write_text(path, "old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files if failing == "write_all" else os, failing, full)
    with pytest.raises(OSError, match=r"space left .* 5,000 bytes to write") as report:
        files.write_text(path, "x" * 5000)
    monkeypatch.undo()
    assert (report.value.errno, report.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def folder_of(path, content):
    path.mkdir()
    (path / "file").write_text(content)
    return path


def test_a_folder_takes_the_place_of_another(tmp_path):
    target, aside = tmp_path / "target", tmp_path / "aside"
    files.replace_folder(folder_of(tmp_path / "new", "first"), target, aside)
    assert (target / "file").read_text() == "first"
    # A killed process may have left the folder that it put aside.
    folder_of(aside, "left")
    files.replace_folder(folder_of(tmp_path / "new", "second"), target, aside)
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
        files.replace_folder(new, target, tmp_path / "aside")
    assert (target / "file").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["new", "target"]


def test_a_folder_is_removed_at_once(tmp_path, monkeypatch):
    aside = folder_of(tmp_path / "aside", "left")
    folder = folder_of(tmp_path / "folder", "old")
    removed = []
    rmtree = shutil.rmtree

    def note(path, *arguments, **options):
        removed.append((path, folder.exists()))
        rmtree(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", note)
    files.remove_folder(folder, aside)
    assert removed == [(aside, True), (aside, False)]
    assert os.listdir(tmp_path) == []


def test_names_of_plain_files(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("a")
    (tmp_path / "folder" / "file").write_text("a")
    (tmp_path / "link").symlink_to("file")
    assert files.is_plain_file(tmp_path, "file")
    for name in (
        "folder", "link", "absent", "", ".", "..", "folder/file", "../file", 3, None,
        str(tmp_path / "file"), "folder\\file", "file\0",
    ):  # fmt: skip
        assert not files.is_plain_file(tmp_path / "folder" / "..", name)


# Files of the package that write or rename by themselves, and why.
WRITERS = {
    "files.py": "this is how files are written",
    "locks.py": "a lock's file is written in its place",
    "analysis/plots/figure.py": "matplotlib draws to memory",
    "cli/comparison.py": "a temporary folder for another process",
    "cli/main.py": "a log is appended to",
    "cli/timm_outputs.py": "a temporary folder for another process",
    "data/kept_arrays.py": "arrays go into a file of `files.new_file`",
    "models/conversion/sources.py": "Keras downloads to a folder of its own",
    "staging.py": "a killed write is finished",
    "training/local_storage.py": "a killed save is finished",
    "training/orbax_storage.py": "remote objects, and Orbax",
    "training/tensor_writer.py": "a file of a checkpoint's new folder",
}
RENAMING = {"os.replace", "os.rename", "shutil.move"}
MODE = re.compile(r"[wax][bt+]*|r[bt]*\+[bt]*")


def writes_by_itself(source: str) -> bool:
    """Returns whether a file's source writes or renames without `keras_moe.files`."""
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
            or (owner and name in ("write_text", "write_bytes"))
            or (owner == "np" and name.startswith("save"))
        ):
            return True
    return False


def test_files_are_written_in_one_way():
    package = Path(files.__file__).parent
    places = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if writes_by_itself(path.read_text(encoding="utf-8"))
    }
    assert places == set(WRITERS)


@pytest.mark.parametrize(
    ("source", "writes"),
    [
        ('open(path, "w")', True),
        ('path.open("ab")', True),
        ('open(path, mode="r+b")', True),
        ('open(path, "rb")', False),
        ("os.replace(part, path)", True),
        ('name.replace("a", "w")', False),
        ("np.savez(path, a=a)", True),
        ("path.write_text(text)", True),
        ("write_text(path, text)", False),
        ("report.save(path)", False),
    ],
)
def test_a_planted_writer_is_seen(source, writes):
    assert writes_by_itself(source) == writes
