"""Rows of the tokens of packed documents: in memory, or in a folder of shards.

index.json                  the tokenizer's digest, and the shards of each split
tokenizer/                  the tokenizer, as a preset has it
train-00000.safetensors     "token_ids", uint16 or uint32 (T,), and "begins", uint8 (T /
                            8,): a bit for each token, whether it begins a document

Documents lie one after another, also over the ends of shards, and row i of N tokens
begins with token i N: it is found without a search, and rows of any length come from
the same shards. They are the rows that `keras_moe.models.pack` makes.
"""

import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from keras_moe._checks import check_integer, check_one_of, unfit
from keras_moe._files import locked, new_file, regular_file, write_bytes
from keras_moe.data._examples import IndexedExamples, as_stored
from keras_moe.data._files import cache_folder, read_json, with_progress
from keras_moe.data._packages import tf
from keras_moe.data._pipeline import BatchSettings, feature_batches

INDEX, UNFINISHED, TOKENIZER = "index.json", "unfinished.json", "tokenizer"
_SHARD = {"tokens": int, "sha256": str}
_SPLIT = {
    "source": str,
    "documents": int,
    "texts_sha256": str,
    "done": range(2),
    "shards": [_SHARD],
}
_SCHEMA = {
    "format": range(1, 2),
    "tokenizer_sha256": str,
    "dtype": str,
    "splits": {str: _SPLIT},
}
_KIND = "tokens:"
# Seconds to wait for another process that copies the same shards.
_PATIENCE = 24 * 3600
_PIECE = 2**24


class _Part(NamedTuple):
    """Tokens in sequence; `take(name, first, last)` reads a slice of an array."""

    count: int
    take: Callable[[str, int, int], np.ndarray]

    def read(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns token ids, and whether each begins a document."""
        bits = np.unpackbits(self.take("begins", start // 8, -(-end // 8)))
        return self.take("token_ids", start, end), bits[start % 8 :][: end - start]


class TokenRows:
    """Rows of documents one after another, each read when it is asked for."""

    def __init__(
        self,
        parts: Sequence[_Part],
        length: int,
        padding_id: int,
        digested: Iterable[bytes | np.ndarray],
    ):
        self.parts, self.padding_id = parts, padding_id
        self.length = check_integer("length", length)
        self.ends = np.cumsum([part.count for part in parts])
        self.count = -(-int(self.ends[-1]) // self.length)
        # What a digest of the rows is made of.
        self.digested = digested
        self.has_targets = False

    def for_evaluation(self, batch_size: int) -> "TokenRows":
        """Adds targets, and rows of padding up to whole batches, which do not count."""
        rows = copy.copy(self)
        rows.has_targets = True
        rows.count += -rows.count % batch_size
        return rows

    def read(self, index: int) -> list[np.ndarray]:
        """Returns a row's ids, and the numbers of its documents: 0 is padding."""
        first = int(index) * self.length
        size = max(0, min(self.length, int(self.ends[-1]) - first))
        token_ids = np.full(self.length, self.padding_id, "int32")
        begins = np.zeros(self.length, "int32")
        at = 0
        while at < size:
            number = int(np.searchsorted(self.ends, first + at, "right"))
            part = self.parts[number]
            start = first + at - int(self.ends[number]) + part.count
            end = min(part.count, start + size - at)
            taken = slice(at, at + end - start)
            token_ids[taken], begins[taken] = part.read(start, end)
            at = taken.stop
        # The first document of a row may have begun before it.
        documents = np.cumsum(begins, dtype="int32") + 1 - begins[0]
        documents[size:] = 0
        if not self.has_targets:
            return [token_ids, documents]
        # Those of `keras_moe.losses.next_tokens`.
        same = (documents[1:] == documents[:-1]) & (documents[1:] != 0)
        targets = np.append(np.where(same, token_ids[1:], -1), -1)
        return [token_ids, documents, targets.astype("int32")]

    def batches(self, name: str, settings: BatchSettings) -> Any:
        """Returns a `tf.data.Dataset` of batches of rows, as dicts."""
        names = ["token_ids", "padding_mask", "targets"][: 2 + self.has_targets]

        def read_all(indices):
            return [np.stack(several) for several in zip(*map(self.read, indices))]

        def read(batch):
            indices = batch["index"]
            arrays = tf.numpy_function(read_all, [indices], [tf.int32] * len(names))
            shape = [indices.shape[0], self.length]
            return {k: tf.ensure_shape(x, shape) for k, x in zip(names, arrays)}

        # A call for each row would cost several times the reading.
        rows = IndexedExamples(self.count, lambda i: {"index": i}, as_stored, name=name)
        dataset = feature_batches(rows, settings)
        dataset = dataset.map(read, num_parallel_calls=tf.data.AUTOTUNE)
        return dataset.prefetch(tf.data.AUTOTUNE)


def joined(documents: Iterable[Sequence[int]], dtype: str) -> list[np.ndarray]:
    """Returns the ids of documents one after another, and their lengths."""
    # Lists of ids would take many times the memory.
    ids = [np.array(document, dtype) for document in documents]
    lengths = np.array([len(x) for x in ids], "int64")
    return [np.concatenate([np.empty(0, dtype), *ids]), lengths]


def _arrays(token_ids, lengths):
    begins = np.zeros(len(token_ids), bool)
    begins[(np.cumsum(lengths) - lengths)[lengths > 0]] = True
    return {"token_ids": token_ids, "begins": np.packbits(begins)}


def rows_in_memory(
    documents: Iterable[Sequence[int]], dtype: str, length: int, padding_id: int
) -> TokenRows:
    arrays = _arrays(*joined(documents, dtype))
    token_ids = arrays["token_ids"]
    if not len(token_ids):
        raise unfit("documents with token ids", "none")
    part = _Part(len(token_ids), lambda name, first, last: arrays[name][first:last])
    padding = np.full(-len(token_ids) % length, padding_id, dtype)
    return TokenRows([part], length, padding_id, (token_ids, padding))


def dtype_of(vocabulary_size: int) -> str:
    return "uint16" if vocabulary_size <= 2**16 else "uint32"


# Folders


def is_tokens(source: object) -> bool:
    return isinstance(source, str) and source.startswith(_KIND)


def tokenizer_of(source: str) -> str:
    return f"{_place(source)}/{TOKENIZER}"


def _place(source):
    # A shell expands ~ at the beginning of a word alone.
    return os.path.expanduser(source.removeprefix(_KIND))


def open_tokens(
    source: str, split: str, length: int, padding_id: int, tokenizer_sha256: str
) -> TokenRows:
    """Opens a split of a folder of shards, made by the tokenizer with a digest."""
    place = _place(source)
    folder = _copied(place, split) if "://" in place else Path(place)
    index = read_index(folder)
    if index["tokenizer_sha256"] != tokenizer_sha256:
        expected = f"the tokenizer of {source}, which is in its folder {TOKENIZER}"
        raise unfit(expected, f"another one, of the SHA-256 {tokenizer_sha256}")
    shards = _shards(index, source, split)
    parts = [
        _opened(folder, shard_name(split, number), shard["tokens"], index["dtype"])
        for number, shard in enumerate(shards)
    ]
    sums = [shard["sha256"].encode() for shard in shards]
    return TokenRows(parts, length, padding_id, sums)


def read_index(folder: Path, name: str = INDEX) -> dict:
    if not (folder / name).is_file():
        found = f"{folder} without it"
        if (folder / UNFINISHED).is_file():
            found += ", which the same command again finishes"
        raise unfit(f"a folder of keras-moe tokenize with {name}", found)
    index = read_json(folder / name, _SCHEMA, _SCHEMA, within=folder)
    for split, record in index["splits"].items():
        whole = [*record.get("shards", ())]
        is_whole = {*record} == {*_SPLIT} and all({*x} == {*_SHARD} for x in whole)
        if not is_whole:
            raise unfit(f"whole splits in {folder / name}", f"{split!r:.80}")
    return index


def _shards(index, source, split):
    check_one_of(f"the split of {source}", split, tuple(index["splits"]))
    shards = index["splits"][split]["shards"]
    if not shards or not all(shard["tokens"] for shard in shards):
        raise unfit("shards with tokens", f"none in {source}, split {split}")
    return shards


def shard_name(split: str, number: int) -> str:
    """Returns a shard's file. No index has names, which could lead out of a folder."""
    if {*split} & {*"/\\\0"}:
        raise unfit("a split without slashes in its name", split=split)
    return f"{split}-{number:05}.safetensors"


def write_shard(path: Path, tokens: np.ndarray, lengths: np.ndarray) -> dict:
    """Writes a shard; returns what the index has about it."""
    content = safetensors.numpy.save(_arrays(tokens, lengths))
    write_bytes(path, content)
    return {"tokens": len(tokens), "sha256": hashlib.sha256(content).hexdigest()}


def _opened(folder, name, count, dtype):
    """Maps a shard, if it is what the index says."""
    path = folder / name
    expected = {
        "token_ids": (dtype.replace("uint", "U"), [count]),
        "begins": ("U8", [-(-count // 8)]),
    }
    try:
        shard = safe_open(regular_file(path, folder), "numpy")
        slices = {name: shard.get_slice(name) for name in expected}
    except SafetensorError as error:
        raise unfit(f"a shard of {count} tokens", f"{path}: {error}") from error
    found = {name: (x.get_dtype(), x.get_shape()) for name, x in slices.items()}
    if found != expected:
        raise unfit(f"a shard of {count} tokens, {dtype}", f"{path} with {found}")
    return _Part(count, lambda name, first, last: slices[name][first:last])


def _copied(place, split):
    """Copies a split from a bucket to this machine's disk, once; returns the folder."""
    with tf.io.gfile.GFile(f"{place}/{INDEX}", "rb") as file:
        content = file.read()
    # Named by its content: other shards go to another folder.
    folder = cache_folder("tokens") / hashlib.sha256(content).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", f"the copy of {place}", _PATIENCE):
        write_bytes(folder / INDEX, content)
        shards = list(enumerate(_shards(read_index(folder), place, split)))
        for number, shard in with_progress(shards, f"copying {place}", len(shards)):
            name = shard_name(split, number)
            if not (folder / name).is_file():
                _copy(f"{place}/{name}", folder / name, shard["sha256"])
    return folder


def _copy(source, target, sha256):
    digest = hashlib.sha256()
    with tf.io.gfile.GFile(source, "rb") as file, new_file(target) as copied:
        while piece := file.read(_PIECE):
            digest.update(piece)
            copied.write(piece)
        if digest.hexdigest() != sha256:
            raise unfit(f"{source} with the SHA-256 of the index", digest.hexdigest())
