"""Sources of texts, and batches of rows of token ids."""

import collections
import gzip
import json

import numpy as np
import pytest

from keras_moe.data import _texts, load_rows, load_texts, num_classes
from tests.pipelines import check_resumption
from tests.refusals import refuses

tf = pytest.importorskip("tensorflow")

ROWS = {"token_ids": np.arange(24, dtype="uint16").reshape(12, 2)}


@pytest.mark.filterwarnings("ignore:1 files in", "ignore:1 documents in")
def test_a_folder_has_a_document_per_file_or_line(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "a.md").write_text("# Ü\n\nfirst", encoding="utf-8")
    (tmp_path / "more" / "b.py").write_text("second = 2\n")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    lines = [json.dumps({"text": f"line {n}", "id": n}) for n in range(200)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines) + "\n\n")
    source = f"text:{tmp_path}"
    with (
        pytest.warns(UserWarning, match=r"1 files .* such as .*picture\.png"),
        pytest.warns(UserWarning, match=r"1 documents .*empty\.txt, document 1"),
    ):
        texts = load_texts(source, "all")
    assert texts[:2] == ("# Ü\n\nfirst", "line 0")
    assert texts[-1] == "second = 2\n"
    # Each document is in one split, drawn by its contents.
    splits = {x: load_texts(source, x) for x in ("train", "validation", "test")}
    assert sorted(sum(splits.values(), ())) == sorted(texts)
    assert all(10 < len(splits[x]) < 35 for x in ("validation", "test"))
    assert load_texts(f"text:{tmp_path}/a.*", "all") == texts[:1]
    (tmp_path / "c.jsonl").write_text('{"text": 1}')
    refuses(r"c\.jsonl; received: line 1", load_texts, source, "all")


def test_a_folder_may_have_splits(tmp_path):
    for split, text in (("train", "many words"), ("test", "few")):
        (tmp_path / split / "deeper").mkdir(parents=True)
        (tmp_path / split / "deeper" / "a.txt").write_text(text)
    assert load_texts(f"text:{tmp_path}", "test") == ("few",)
    refuses("split", load_texts, f"text:{tmp_path}", "validation")


def test_documentation_of_python_is_split_by_package():
    splits = {x: load_texts("python_docs", x) for x in ("train", "validation", "test")}
    sizes = {x: sum(map(len, texts)) for x, texts in splits.items()}
    packages = collections.defaultdict(set)
    for name, text in _texts.python_documents():
        packages[name] |= {x for x, texts in splits.items() if text in texts}
    assert all(len(found) == 1 for found in packages.values())
    assert (
        max(collections.Counter(x for x, _ in _texts.python_documents()).values()) > 9
    )
    assert min(sizes.values()) > 50_000
    assert sizes["train"] > 0.7 * sum(sizes.values())
    assert any("JSON" in text for texts in splits.values() for text in texts)


def test_links_out_of_python_s_library_are_left_out(tmp_path, monkeypatch):
    """As Debian has them."""
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    (tmp_path / "other.py").write_text('"""Of a linked package."""')
    for name in ("linked.py", "site-packages/linked.py"):
        (tmp_path / "lib" / name).symlink_to(tmp_path / "other.py")
    (tmp_path / "lib" / "own.py").write_text('"""Of the library."""')
    monkeypatch.setattr(
        _texts.sysconfig, "get_paths", lambda: {"stdlib": tmp_path / "lib"}
    )
    documents = _texts.python_documents.__wrapped__()
    assert documents[0] == ("lib/own", "Of the library.")
    assert not any("Of a linked package" in text for _, text in documents)


def test_what_json_and_file_names_may_have(tmp_path):
    texts = ["hello\u2028world", "a\x0cb"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    file = tmp_path / "deep" / "er" / "a.JSONL"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(lines), encoding="utf-8-sig")
    (tmp_path / "page.html").write_text("no text")
    with pytest.warns(UserWarning, match=r"1 files in .*page\.html"):
        assert load_texts(f"text:{tmp_path}", "all") == tuple(texts)
    assert load_texts(f"text:{tmp_path}/**/*.JSONL", "all") == tuple(texts)


def test_lines_that_are_no_texts_are_named(tmp_path):
    line = b'{"text": "one"}\n'
    source, path = f"text:{tmp_path}", tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(2 * line))
    assert load_texts(source, "all") == ("one", "one")
    for content, message in (
        (gzip.compress(2 * line)[:-9], r"a\.jsonl\.gz, behind line \d"),
        (line, "compressed by gzip.* behind line 0"),
        (gzip.compress(line + b'{"text": "\xff"}'), r"in UTF-8 .*received: line 2"),
        (gzip.compress(line + b'{"text": "on'), r"a\.jsonl\.gz; received: line 2"),
    ):
        path.write_bytes(content)
        refuses(message, load_texts, source, "all")
    path.unlink()
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\xff")
    refuses(r"b\.txt, line 2", load_texts, source, "all")


@pytest.mark.parametrize("ids", [[[0.7]], [[2**31]]])
def test_ids_that_are_no_integers_of_32_bits(ids):
    with pytest.raises(ValueError, match="token_ids to be integers of 32 bits"):
        load_rows({"token_ids": np.array(ids)}, 1)


def test_rows_go_on_anywhere_and_are_of_each_source_by_weight():
    def read(take, **options):
        batches = load_rows(ROWS, 4, repeat=True, seed=5, **options).take(take)
        return [x["token_ids"][:, 0].tolist() for x in batches.as_numpy_iterator()]

    whole = check_resumption(read)
    # Each pass has all rows, in another order.
    first, second = (sorted(np.concatenate(x)) for x in (whole[:3], whole[3:6]))
    assert first == second
    assert whole[:3] != whole[3:6]
    rows = {"a": ROWS, "b": {"token_ids": ROWS["token_ids"] + 100}}
    weights = {"a": 0.75, "b": 0.25}
    batches = load_rows(rows, 8, weights, repeat=True).take(3)
    for batch in batches.as_numpy_iterator():
        assert batch["token_ids"].dtype == "int32"
        assert (batch["token_ids"][:, 0] < 100).tolist() == [True] * 6 + [False] * 2
    refuses("repeat=False", load_rows, rows, 8, weights)


def test_sources_without_texts_are_refused(tmp_path):
    refuses("documents for language models", load_texts, "digits", "train")
    refuses("images with labels", num_classes, "python_docs")
    refuses(r"Expected texts \(\.md", load_texts, f"text:{tmp_path}", "train")
