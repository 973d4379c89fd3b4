"""Tokenizes texts once, in parallel, into a folder of shards to train on.

`unfinished.json` is the index of a folder at work, which names each shard once it is
written. The same call goes on behind the last one, if the texts before are the same.
"""

import collections
import contextlib
import functools
import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_moe._checks import check_integer, unfit
from keras_moe._files import locked, write_json
from keras_moe.data import _tokens
from keras_moe.data.sources import read_texts
from keras_moe.models import TextTokenizer

# Bytes of a shard's tokens, after which the next one begins, and characters of the
# texts that a process gets at a time.
_SHARD, _CHUNK = 2**25, 2**20


class _Chunk(NamedTuple):
    """Documents in sequence, and what came before their end."""

    texts: list[str]
    documents: int
    sha256: str


def tokenize_texts(
    source: str,
    folder: str | os.PathLike,
    tokenizer: TextTokenizer,
    splits: Sequence[str],
    workers: int | None = None,
    data_dir: str | None = None,
    progress: Callable[[int, None, str], Any] = lambda *_: None,
) -> dict[str, dict]:
    """Writes the tokens of texts to a folder; returns the index of its splits.

    `progress` is called with the number of documents, None, and a text.
    """
    folder = Path(folder).expanduser().resolve()
    workers = check_integer("workers", workers or os.cpu_count())
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.tokenizing.lock")
    with locked(lock, f"the tokens in {folder}"):
        index = _index(folder, tokenizer)
        dtype = index["dtype"]
        with _mapping(tokenizer, folder / _tokens.TOKENIZER, dtype, workers) as mapped:
            for split in splits:
                record = _record(index, folder, source, split)
                if not record["done"]:
                    texts = read_texts(source, split, data_dir)
                    _write(folder, index, split, mapped, texts, progress)
        _finish(folder, index)
    return {split: index["splits"][split] for split in splits}


def _index(folder, tokenizer):
    """Returns the index to go on with, of the same tokenizer, or a new one."""
    name = next(
        (x for x in (_tokens.UNFINISHED, _tokens.INDEX) if (folder / x).is_file()), None
    )
    digest = tokenizer.sha256()
    if name is None:
        if [x for x in folder.iterdir() if x.name != _tokens.TOKENIZER]:
            expected = "a new folder, or one of an earlier call"
            raise unfit(expected, f"{folder}, which has other files")
        tokenizer.save_to_preset(folder / _tokens.TOKENIZER)
        dtype = _tokens.dtype_of(tokenizer.vocabulary_size)
        new = {"dtype": dtype, "tokenizer_sha256": digest, "splits": {}}
        return {"format": 1, **new}
    index = _tokens.read_index(folder, name)
    if index["tokenizer_sha256"] != digest:
        place = folder / _tokens.TOKENIZER
        expected = f"the tokenizer of the earlier call, which is in {place}"
        raise unfit(expected, f"another one, of the digest {digest[:12]}")
    return index


def _record(index, folder, source, split):
    new = {"documents": 0, "texts_sha256": hashlib.sha256().hexdigest(), "done": 0}
    record = index["splits"].setdefault(split, {"source": source, **new, "shards": []})
    if record["source"] != source:
        expected = f"{record['source']!r}, whose split {split!r} is in {folder}"
        raise unfit(expected, source=source)
    return record


def _finish(folder, index):
    done = {name: x for name, x in index["splits"].items() if x["done"]}
    write_json(folder / _tokens.INDEX, {**index, "splits": done})
    if done == index["splits"]:
        (folder / _tokens.UNFINISHED).unlink(missing_ok=True)


def _write(folder, index, split, mapped, texts, progress):
    """Writes the shards of a split that are not there yet, and notes each."""
    record = index["splits"][split]
    shards = record["shards"]
    tokens, lengths = [], []

    def write(chunk):
        if tokens:
            path = folder / _tokens.shard_name(split, len(shards))
            arrays = [np.concatenate(x) for x in (tokens, lengths)]
            tokens.clear()
            lengths.clear()
            shards.append(_tokens.write_shard(path, *arrays))
        record.update(documents=chunk.documents, texts_sha256=chunk.sha256)
        write_json(folder / _tokens.UNFINISHED, index)

    count, chunk = sum(x["tokens"] for x in shards), None
    for chunk, (ids, of_each) in mapped(_left(texts, record, folder)):
        tokens.append(ids)
        lengths.append(of_each)
        count += len(ids)
        progress(chunk.documents, None, f"{split}: {count:,} tokens")
        if sum(x.nbytes for x in tokens) >= _SHARD:
            write(chunk)
    record["done"] = 1
    if chunk is not None:
        write(chunk)


def _left(texts, record, folder) -> Iterator[_Chunk]:
    """Yields the texts that are in no shard; those that are must be as they were."""
    texts, digest, done = iter(texts), hashlib.sha256(), record["documents"]
    for text in itertools.islice(texts, done):
        digest.update(text.encode() + b"\0")
    if digest.hexdigest() != record["texts_sha256"]:
        expected = f"the texts of which {folder} has a part already"
        raise unfit(expected, f"others among the first {done:,} documents")
    chunk, size = [], 0
    for text in texts:
        done += 1
        digest.update(text.encode() + b"\0")
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK:
            yield _Chunk(chunk, done, digest.hexdigest())
            chunk, size = [], 0
    if chunk:
        yield _Chunk(chunk, done, digest.hexdigest())


@contextlib.contextmanager
def _mapping(tokenizer, preset, dtype, workers):
    """A function from chunks to pairs of each and its ids, in order and in parallel."""
    if workers == 1:
        ids = functools.partial(_ids, tokenizer, dtype)
        yield lambda chunks: ((chunk, ids(chunk.texts)) for chunk in chunks)
        return
    methods = multiprocessing.get_all_start_methods()
    # Forks share the memory of what was imported, such as KerasHub's TensorFlow.
    is_forking = "forkserver" in methods
    context = multiprocessing.get_context("forkserver" if is_forking else "spawn")
    if is_forking:
        context.set_forkserver_preload([__name__, "tensorflow"])
    pool = ProcessPoolExecutor(workers, context, _start, (os.fspath(preset), dtype))

    def mapped(chunks):
        waiting = collections.deque()
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_ids_here, chunk.texts)))
            if len(waiting) > 2 * workers:
                chunk, ids = waiting.popleft()
                yield chunk, ids.result()
        for chunk, ids in waiting:
            yield chunk, ids.result()

    try:
        yield mapped
    except BrokenProcessPool as error:
        raise OSError(
            "Expected all processes to go on; received: one that was ended, perhaps "
            "for want of memory. The same again goes on after the last shard"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_here: Any = None


def _start(preset, dtype):
    """Prepares a process, which Ctrl-C ends through the one that started it."""
    global _here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Idle processes would outlive one that is killed.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _here = functools.partial(_ids, TextTokenizer.from_preset(preset), dtype)


def _end_with_parent():
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ids_here(texts):
    return _here(texts)


def _ids(tokenizer, dtype, texts):
    return _tokens.joined(tokenizer.documents(texts), dtype)
