"""Tar files of images and captions."""

import io
import json
import tarfile

import numpy as np
import pytest

from keras_moe.data import load_captions, load_pairs, num_pairs
from tests.pipelines import SHAPE, check_resumption, png, rows
from tests.refusals import refuses

tf = pytest.importorskip("tensorflow")


def write_tar(path, members, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def examples(numbers):
    """The members of some pairs, as WebDataset writes them."""
    members = {}
    for i in numbers:
        members[f"{i:04}.png"] = png(i)
        members[f"{i:04}.txt"] = f"number {i}\n".encode()
    return members


def test_members_are_pairs(tmp_path):
    members = {
        "a/1.seg.png": b"another image of the example",
        "a/1.json": json.dumps({"caption": "from JSON", "width": 4}).encode(),
        "a/1.txt": "größer".encode(),
        "a/1.PNG": png(1),
        "b/1.jpg": tf.io.encode_jpeg(tf.fill([4, 4, 3], np.uint8(2))).numpy(),
        "b/1.json": json.dumps({"captions": ["two", "deux"]}).encode(),
        "README": b"no example",
    }
    folder = tarfile.TarInfo("c")
    folder.type = tarfile.DIRTYPE
    write_tar(tmp_path / "photos-test-0.tar", {**members, "c": folder})
    write_tar(tmp_path / "photos-test-1.tar", examples([3]))
    write_tar(tmp_path / "photos-train.tar", examples(range(9)))
    source = f"webdataset:{tmp_path}"
    dataset = load_pairs(source, "test", SHAPE, captions="all")
    (batch,) = rows(dataset)
    first = [(1, "größer", 0, 0), (2, "two", 1, 1), (2, "deux", 1, 2)]
    assert batch == [*first, (3, "number 3", 2, 3)]
    texts = load_captions(source, "test")
    assert texts == ("größer", "two", "deux", "number 3")
    assert num_pairs(f"webdataset:{tmp_path}/photos-*.tar", "train") == 9
    refuses(r"the split as a word.*'valid'", load_pairs, source, "valid")


@pytest.mark.parametrize(("names", "expected"), [
    (["a.v2", "2024.05.01 12.30", "x.y/0"], [0, 1, 2]),
    # As macOS and systems add them.
    (["0", "._0", "__MACOSX/0"], [0]),
    # Two pairs, of which one name begins like the other.
    (["0", "0.v2"], [0, 1]),
])  # fmt: skip
def test_dots_in_names(tmp_path, names, expected):
    members = {}
    for number, name in enumerate(names):
        members |= {f"{name}.PNG": png(number), f"{name}.txt": b"%d" % number}
    write_tar(tmp_path / "train.tar", members)
    dataset = load_pairs(f"webdataset:{tmp_path}", "train", SHAPE, shuffle=False)
    assert [row[:2] for row in rows(dataset)[0]] == [(n, str(n)) for n in expected]


def test_order_shards_and_resumption(tmp_path):
    # Names of numbers alone are in every split.
    for number in range(3):
        numbers = range(5 * number, 5 * number + 5)
        write_tar(tmp_path / f"{number:05}.tar", examples(numbers))

    def batches(take, **options):
        options |= {"batch_size": 4, "repeat": True}
        dataset = load_pairs(f"webdataset:{tmp_path}", "train", SHAPE, **options)
        return rows(dataset, take)

    whole = check_resumption(batches)
    assert all(row[1] == f"number {row[0]}" for batch in whole for row in batch)
    assert len({row[0] for batch in whole[:3] for row in batch}) == 12
    # The order mixes the files.
    assert len({row[0] // 5 for row in whole[0] + whole[1]}) == 3


def test_a_tar_that_is_cut_off(tmp_path):
    members = examples(range(3))
    whole = write_tar(tmp_path / "whole.tar", members).read_bytes()
    path = tmp_path / "train.tar"
    source = f"webdataset:{path}"
    options = {"unreadable": "exclude", "shuffle": False}
    # Within content, within a header, and between members: each has 2 x 1,024 bytes.
    for size in (4 * 1024 + 530, 4 * 1024 + 100, 4 * 1024):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"train\.tar is cut off after 0001\.txt"):
            load_pairs(source, "train", SHAPE)
        with pytest.warns(UserWarning, match=r"1 of 3 images.*train\.tar is cut off"):
            dataset = load_pairs(source, "train", SHAPE, **options)
        assert [row[0] for row in rows(dataset)[0]] == [0, 1]
    # The image is there, and its caption is cut off.
    path.write_bytes(whole[: 3 * 1024 + 100])
    with pytest.raises(ValueError, match=r"2 of 3 .*0001 has no caption.*cut off"):
        load_pairs(source, "train", SHAPE)
    path.write_bytes(whole + bytes(4096))
    assert num_pairs(source, "train") == 3
    # One shard that is empty, or cut off in its first header, is no reason to stop.
    (tmp_path / "train-0.tar").write_bytes(b"")
    (tmp_path / "train-1.tar").write_bytes(whole[:300])
    (tmp_path / "train-2.tar").write_bytes(whole[:520])
    shards = f"webdataset:{tmp_path}/train*.tar"
    with pytest.warns(UserWarning, match=r"3 of 6 images.*train-0\.tar is cut off"):
        assert num_pairs(shards, "train", unreadable="exclude") == 3
    path.write_bytes(whole + whole)
    refuses(r"1 of 4 images.*content after its end", load_pairs, source, "train", SHAPE)
    # A file that shrinks later on is named, too.
    path.write_bytes(whole)
    dataset = load_pairs(source, "train", SHAPE)
    path.write_bytes(whole[:600])
    refuses(r"not changed since.*train\.tar", rows, dataset)


def test_faults(tmp_path):
    path = tmp_path / "train.tar"
    members = {
        **examples([0]),
        "1.png": png(1), "2.txt": b"no image", "3.png": png(3), "3.json": b"{broken",
        "4.png": png(4), "4.txt": b"caf\xe9", "6.jpg": b"no picture", "6.txt": b"noise",
        "8.json": b'\xef\xbb\xbf{"caption": "eight"}', "8.png": png(8),
        "9.png": png(9), "9.txt": b"\xef\xbb\xbfnine",
        "a.png": png(1), "a.jpg": png(1), "a.txt": b"two formats",
        "b.png": png(2), "b.PNG": png(2), "b.txt": b"twice",
        "c.png": png(3), "c.txt": b"one", "c.TXT": b"another",
    }  # fmt: skip
    write_tar(path, members)
    source = f"webdataset:{path}"
    with pytest.raises(ValueError, match="7 of 11 images") as error:
        load_pairs(source, "train")
    for message in (
        "1 has no caption",
        "2 has a caption and no image",
        "3 has no caption",
        "4 has a caption that is not text in UTF-8",
        "a has several of ['.jpg', '.png'",
    ):
        assert f"{path}: {message}" in str(error.value)
    with pytest.warns(UserWarning, match="images of") as warned:
        dataset = load_pairs(source, "train", SHAPE, unreadable="exclude")
    counts = [str(warning.message).partition(" images")[0] for warning in warned]
    assert counts == ["7 of 11", "1 of 4"]
    kept = [(0, "number 0"), (8, "eight"), (9, "nine")]
    assert sorted(row[:2] for row in rows(dataset)[0]) == kept


def test_members_that_lead_out_of_the_archive(tmp_path):
    link = tarfile.TarInfo("7.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    hard = tarfile.TarInfo("8.png")
    hard.type, hard.linkname = tarfile.LNKTYPE, "0000.png"
    device = tarfile.TarInfo("9.png")
    device.type = tarfile.CHRTYPE
    for name, content in (
        ("/etc/0.png", b"x"),
        ("../0.png", b"x"),
        ("..\\0.txt", b"x"),
        ("7.png", link),
        ("8.png", hard),
        ("9.png", device),
    ):
        path = tmp_path / "train.tar"
        write_tar(path, {**examples([0]), name: content})
        with pytest.raises(ValueError, match="inside the archive") as error:
            load_pairs(f"webdataset:{path}", "train", unreadable="exclude")
        assert f"received: {name!r} in {path}" in str(error.value)


def test_other_files(tmp_path):
    path = tmp_path / "train.tar"
    write_tar(path, examples([0]), "w:gz")
    for content in (path.read_bytes(), b"no tar file" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"train\.tar is .*compressed or no tar"):
            load_pairs(f"webdataset:{path}", "train", unreadable="exclude")
    write_tar(path, {"README": b"nothing"})
    with pytest.raises(ValueError, match=r"Expected images with captions.*without any"):
        load_pairs(f"webdataset:{path}", "train")
    with pytest.raises(ValueError, match="a glob that matches some"):
        load_pairs(f"webdataset:{tmp_path}/nothing-*.tar", "train")
