"""Several sources of pairs in each batch."""

import numpy as np
import pytest

from keras_moe.data import (
    load_captions,
    load_pairs,
    num_pairs,
    write_pair_tfrecords,
)
from keras_moe.data.pairs.mixture import batch_sizes

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.backend_free


@pytest.fixture
def sources(tmp_path, pair_tools):
    names = []
    for name, numbers in (("a", range(10)), ("b", range(100, 107))):
        pairs = [(pair_tools.png(i), [f"{i}", f"{i} again"]) for i in numbers]
        write_pair_tfrecords(tmp_path / name, "train", pairs)
        names.append(f"tfrecord:{tmp_path / name}")
    return names


def test_ratio_order_and_resumption(sources, pair_tools):
    first, second = sources
    mixture = {first: 3, second: 1}

    def batches(take, source=mixture, size=8, **options):
        options = {"repeat": True, **options}
        dataset = load_pairs(source, "train", pair_tools.shape, size, **options)
        return pair_tools.rows(dataset, take)

    whole = batches(4)
    for batch in whole:
        assert [row[0] >= 100 for row in batch] == [False] * 6 + [True] * 2
        # Image 3 of one source is not image 3 of the other.
        assert len({row[2] for row in batch}) == len({row[0] for row in batch})
        assert all(row[1].split()[0] == str(row[0]) for row in batch)
    assert batches(1, start_batch=3) == whole[3:]
    # Each source has its own order: alone, with its own seed, it has the same rows.
    alone = batches(4, second, 2, seed=1)
    assert [[row[:2] for row in batch[6:]] for batch in whole] == [
        [row[:2] for row in batch] for batch in alone
    ]
    # A host has its rows of each source; record files are read in parts.
    assert [row[0] >= 100 for row in batches(1, shard=(1, 2))[0]] == [False] * 3 + [
        True
    ]
    assert num_pairs(mixture, "train") == 17
    assert len(load_captions(mixture, "train")) == 34
    assert num_pairs(mixture, "train", exclude={second: [0]}) == 16


def test_classes_are_part_of_a_mixture(sources, pair_tools):
    options = {"repeat": True, "templates": "the digit {}"}
    mixture = {"digits": 0.5, sources[0]: 0.5}
    dataset = load_pairs(mixture, "train", pair_tools.shape, 4, **options)
    (batch,) = pair_tools.rows(dataset, 1)
    assert [row[1].startswith("the digit") for row in batch] == [True] * 2 + [False] * 2


def test_weights():
    assert batch_sizes({"a": 3, "b": 1}, 16_384, 8) == {"a": 12_288, "b": 4_096}
    assert batch_sizes({"a": 0.7, "b": 0.2, "c": 0.1}, 20, 2) == {
        "a": 14,
        "b": 4,
        "c": 2,
    }
    # Largest remainders, the first of equal ones, alike on each host.
    assert batch_sizes({"a": 1, "b": 3}, 21_502, 1) == {"a": 5376, "b": 16_126}
    assert batch_sizes({"a": 1, "b": 1, "c": 1.5}, 20, 2) == {"a": 6, "b": 6, "c": 8}
    assert batch_sizes({"a": 3, "b": 1}, 12, 2) == {"a": 10, "b": 2}
    assert batch_sizes({"a": np.float32(3), "b": 1}, 4, 1) == {"a": 3, "b": 1}
    for weight in (1e-5, 1e-300):
        with pytest.raises(ValueError, match="pairs of each source"):
            batch_sizes({"a": 1, "b": weight}, 8, 1)
    with pytest.raises(ValueError, match=r"pairs of each source; .*batch_size=4 for 2"):
        batch_sizes({"a": 9, "b": 1}, 4, 2)
    with pytest.raises(ValueError, match="sources with their weights; received: none"):
        batch_sizes({}, 12, 2)
    with pytest.raises(ValueError, match=r"received: source\['b'\]=0"):
        batch_sizes({"a": 3, "b": 0}, 12, 2)


def test_bad_input(tmp_path, sources, pair_tools):
    mixture = {sources[0]: 3, sources[1]: 1}
    with pytest.raises(ValueError, match="repeat=True with a mixture"):
        load_pairs(mixture, "train", pair_tools.shape, 8)
    with pytest.raises(ValueError, match=r"exclude as a dict.*exclude=\[0\]"):
        load_pairs(mixture, "train", pair_tools.shape, 8, repeat=True, exclude=[0])
    for exclude in (np.array([0]), {"other": [0]}):
        with pytest.raises(ValueError, match=r"exclude as a dict of the sources"):
            num_pairs(mixture, "train", exclude=exclude)
    with pytest.raises(ValueError, match=r"language with emoji alone.*'de'"):
        num_pairs(mixture, "train", language="de")
    with pytest.raises(ValueError, match="source of classes alone"):
        load_pairs(mixture, "train", pair_tools.shape, 8, repeat=True, templates="{}")

    def tokenizer(captions):
        ids = np.ones((len(captions), 2), int)
        return {"token_ids": ids, "padding_mask": ids > 0}

    pairs = [(pair_tools.png(i), f"{i}") for i in range(9)]
    write_pair_tfrecords(tmp_path / "c", "train", pairs, tokenizer=tokenizer)
    mixture = {sources[0]: 1, f"tfrecord:{tmp_path / 'c'}": 1}
    with pytest.raises(ValueError, match="stored tokens in all"):
        load_pairs(mixture, "train", pair_tools.shape, 8, repeat=True)
