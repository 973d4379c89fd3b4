"""Shards of tokens: what they hold, how they come about, and who may read them."""

import functools
import json
import os
import pathlib
import shutil
import tracemalloc

import numpy as np
import pytest

from keras_moe.data import _tokens
from keras_moe.models import TextTokenizer, pack
from keras_moe.training import _tokenizing, train
from keras_moe.training._tokenizing import tokenize_texts
from tests.refusals import refuses
from tests.training.runs import Ends, assert_same_arrays
from tests.training.text_folder import WORDS, text_recipe, write_texts

tf = pytest.importorskip("tensorflow")


class Bytes:
    """A tokenizer whose ids are bytes, with an end of 256."""

    padding_id, vocabulary_size = 0, 257

    def documents(self, texts):
        return [[*text.encode(), 256] for text in texts]

    def sha256(self):
        return "of bytes"

    def save_to_preset(self, folder):
        pathlib.Path(folder).mkdir()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer.trained([WORDS], 530, 16)


@pytest.fixture
def small(monkeypatch):
    """Makes several shards of few texts."""
    monkeypatch.setattr(_tokenizing, "_SHARD", 100)
    monkeypatch.setattr(_tokenizing, "_CHUNK", 100)


@pytest.fixture
def tokens(texts, tokenizer, small, tmp_path):
    tokenize_texts(texts, tmp_path / "tokens", tokenizer, ("train", "test"), 1)
    return f"tokens:{tmp_path / 'tokens'}"


def write_lines(folder, lines):
    folder.mkdir(exist_ok=True)
    text = "\n".join(json.dumps({"text": line}) for line in lines)
    (folder / "a.jsonl").write_text(text)
    return f"text:{folder}"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.*")}


def test_a_shard_has_ids_and_the_bits_of_first_tokens(tmp_path, small):
    source = write_lines(tmp_path / "texts", ["ab", "c", "defg"])
    found = tokenize_texts(source, tmp_path / "tokens", Bytes(), ["all"], 1)
    assert found["all"]["documents"] == 3
    path = tmp_path / "tokens" / "all-00000.safetensors"
    shard = _tokens.safetensors.numpy.load_file(path)
    assert shard["token_ids"].dtype == "uint16"
    assert shard["token_ids"].tolist() == [*b"ab", 256, *b"c", 256, *b"defg", 256]
    bits = np.unpackbits(shard["begins"])[:10]
    assert bits.tolist() == [1, 0, 0, 1, 0, 1, 0, 0, 0, 0]
    rows = _tokens.open_tokens(f"tokens:{tmp_path}/tokens", "all", 4, 9, "of bytes")
    assert [x.tolist() for x in rows.read(1)] == [[256, *b"def"], [1, 2, 2, 2]]
    assert [x.tolist() for x in rows.for_evaluation(2).read(2)] == [
        [*b"g", 256, 9, 9],
        [1, 1, 0, 0],
        [256, -1, -1, -1],
    ]
    # What fills the last batch does not count.
    rows = rows.for_evaluation(2)
    assert rows.count == 4
    assert rows.read(3)[1:] == pytest.approx(np.array([[0] * 4, [-1] * 4]))


@pytest.mark.parametrize("length", [3, 8, 1000])
def test_rows_of_any_length_are_those_of_pack(tmp_path, small, length):
    lines = [WORDS[: n % 40 + 1] for n in range(60)]
    source = write_lines(tmp_path / "texts", lines)
    tokenize_texts(source, tmp_path / "tokens", Bytes(), ["all"], 1)
    args = (length, 0, "of bytes")
    rows = _tokens.open_tokens(f"tokens:{tmp_path}/tokens", "all", *args)
    assert len(rows.parts) > 9
    expected = pack(Bytes().documents(lines), length)
    read = [rows.read(index) for index in range(rows.count)]
    for position, name in enumerate(expected):
        assert np.array_equal([row[position] for row in read], expected[name])


def test_a_run_on_shards_is_that_on_texts(texts, tokens, tmp_path):
    def batches(source):
        # Both have the tokenizer of the shards.
        preset = str(tmp_path / "tokens" / "tokenizer")
        mine = text_recipe(
            source, objective={"name": "next_token", "tokenizer": preset}
        )
        mine = mine.replace(**{"model.vocabulary_size": 530})
        model = mine.new_model(None)
        mine.objective.prepare(model, mine.data)
        found = mine.datasets(model, start_step=3)
        read = [found.train.take(20), found.test]
        return [list(x.as_numpy_iterator()) for x in read], found.steps_per_epoch

    (train_batches, test_batches), steps = batches(tokens)
    (of_texts, test_of_texts), expected = batches(texts)
    assert steps == expected
    for mine, other in zip(train_batches + test_batches, of_texts + test_of_texts):
        assert {*mine} == {*other}
        assert all(np.array_equal(mine[name], other[name]) for name in mine)


def test_a_run_goes_on_exactly(tokens, tmp_path):
    mine = text_recipe(tokens)
    options = {"verbose": 0, "checkpoint_every": 2}
    whole = train(mine, checkpoint_dir=tmp_path / "whole", **options)
    assert whole.model.preprocessor.vocabulary_size == 530
    with pytest.raises(KeyboardInterrupt):
        train(mine, checkpoint_dir=tmp_path / "ended", callbacks=[Ends(5)], **options)
    again = train(mine, checkpoint_dir=tmp_path / "ended", **options)
    assert again.history == whole.history
    assert_same_arrays(again, whole)
    # Ids of another tokenizer mean other words.
    other = {"name": "next_token", "tokenizer": str(tmp_path / "other")}
    TextTokenizer.trained([WORDS[:20]], 530, 16).save_to_preset(tmp_path / "other")
    refuses(
        "which is in its folder tokenizer", train, text_recipe(tokens, objective=other)
    )
    sized = {"name": "next_token", "vocabulary_size": 530}
    refuses(
        "vocabulary_size=530 with tokens:", train, text_recipe(tokens, objective=sized)
    )


def test_what_is_interrupted_goes_on_with_the_same_bytes(tmp_path, small):
    lines = [f"{n} {WORDS}" for n in range(20)]
    source = write_lines(tmp_path / "texts", lines)
    make = functools.partial(tokenize_texts, source, tokenizer=Bytes(), workers=1)
    make(tmp_path / "whole", splits=["all"])
    (tmp_path / "texts" / "a.jsonl").write_text(
        "\n".join([json.dumps({"text": line}) for line in lines[:15]] + ["{'"])
    )
    refuses(r"a\.jsonl; received: line 16", make, tmp_path / "half", splits=["all"])
    left = {*contents(tmp_path / "half")}
    assert "index.json" not in left
    assert "all-00002.safetensors" in left
    opened = functools.partial(_tokens.open_tokens, f"tokens:{tmp_path}/half")
    refuses("same command again finishes", opened, "all", 8, 0, "of bytes")
    # Other texts would not fit to what is there.
    write_lines(tmp_path / "texts", ["other", *lines[1:]])
    refuses("others among the first", make, tmp_path / "half", splits=["all"])
    write_lines(tmp_path / "texts", lines)
    make(tmp_path / "half", splits=["all"])
    assert contents(tmp_path / "half") == contents(tmp_path / "whole")
    # What is done is not done again, and another split is added.
    before = (tmp_path / "half" / "all-00000.safetensors").stat().st_mtime_ns
    assert [*make(tmp_path / "half", splits=["all", "train"])] == ["all", "train"]
    after = (tmp_path / "half" / "all-00000.safetensors").stat().st_mtime_ns
    assert before == after
    assert opened("all", 8, 0, "of bytes").count
    other = write_lines(tmp_path / "others", lines)
    other_make = functools.partial(tokenize_texts, other, tokenizer=Bytes(), workers=1)
    refuses("whose split 'all' is in", other_make, tmp_path / "half", splits=["all"])
    refuses("which has other files", other_make, tmp_path / "texts", splits=["all"])


def test_processes_write_what_one_writes(texts, tokenizer, tokens, tmp_path):
    tokenize_texts(texts, tmp_path / "several", tokenizer, ("train", "test"), 2)
    assert contents(tmp_path / "several") == contents(tmp_path / "tokens")


def test_what_does_not_fit_its_index_is_refused(tokens, tmp_path):
    folder = tmp_path / "tokens"
    digest = json.loads((folder / "index.json").read_text())["tokenizer_sha256"]
    opened = functools.partial(_tokens.open_tokens, tokens, "train", 8, 0, digest)
    assert opened().count
    shard, index = folder / "train-00001.safetensors", folder / "index.json"
    whole, listed = shard.read_bytes(), index.read_text()
    shard.write_bytes(whole[:-1])
    refuses("Expected a shard of", opened)
    shard.write_bytes((folder / "train-00000.safetensors").read_bytes())
    refuses("Expected a shard of", opened)
    shard.unlink()
    shutil.copy(folder / "train-00000.safetensors", tmp_path / "outside")
    os.symlink(tmp_path / "outside", shard)
    refuses("links to stay within", opened)
    shard.unlink()
    with pytest.raises(FileNotFoundError):
        opened()
    for text in (
        listed.replace('"done": 1,', ""),
        listed.replace('"tokens": ', '"tokens": -'),
        listed[:-20],
    ):
        index.write_text(text)
        refuses(r"index\.json", opened)
    index.write_text(listed.replace('"train"', '"../train"'))
    options = {"length": 8, "padding_id": 0, "tokenizer_sha256": digest}
    refuses("without slashes", _tokens.open_tokens, tokens, "../train", **options)
    index.write_text(listed)
    refuses("split of tokens:", _tokens.open_tokens, tokens, "valid", 8, 0, digest)


def test_shards_of_a_bucket_are_copied_once(tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    for path in (tmp_path / "tokens").glob("*.*"):
        with tf.io.gfile.GFile(f"ram://bucket/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    digest = _tokens.read_index(tmp_path / "tokens")["tokenizer_sha256"]
    args = (8, 0, digest)
    own = _tokens.open_tokens(tokens, "test", *args)
    bucket = "tokens:ram://bucket"
    remote = _tokens.open_tokens(bucket, "test", *args)
    assert np.array_equal(own.read(2), remote.read(2))
    copied = [*(tmp_path / "home").rglob("*.safetensors")]
    expected = {x for x in contents(tmp_path / "tokens") if "test-" in x}
    assert {x.name for x in copied} == expected
    # Bits that flipped on the way.
    with tf.io.gfile.GFile("ram://bucket/train-00000.safetensors", "wb") as file:
        file.write(b"\0" * 500)
    refuses("SHA-256 of the index", _tokens.open_tokens, bucket, "train", *args)


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(_tokenizing, "_SHARD", 2**18)
    monkeypatch.setattr(_tokenizing, "_CHUNK", 2**14)

    def peak(count):
        texts = (f"{n} {WORDS}" for n in range(count))
        monkeypatch.setattr(_tokenizing, "read_texts", lambda *_: texts)
        tracemalloc.start()
        tokenize_texts("many", tmp_path / str(count), Bytes(), ["all"], 1)
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(40_000) < 1.5 * peak(10_000)
