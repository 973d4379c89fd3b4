"""Files are there as a whole, or not at all, and say what could not be written."""

import errno
import json
import math
import os
import stat

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
    found = json.loads(text, parse_constant=refuse)
    assert found == {"loss": [0.5, None], "pair": [None, 1], "x": None}


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
    with pytest.raises(OSError, match=r"space left .* 5,000 bytes to write") as told:
        files.write_text(path, "x" * 5000)
    monkeypatch.undo()
    assert (told.value.errno, told.value.filename) == (errno.ENOSPC, str(path))
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
