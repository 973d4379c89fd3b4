"""Tokens per second of rows of packed documents, from shards on disk and from memory.

    KERAS_BACKEND=jax python tools/benchmark/token_rows.py
    KERAS_BACKEND=jax python tools/benchmark/token_rows.py --shards 64 --length 4096

The last table has what training eats: 6 FLOPs for each token and parameter that it
uses, at 40% of the devices' peak.
"""

import argparse
import hashlib
import json
import os
import tempfile
from pathlib import Path

import numpy as np
from runner import Report, run

from keras_moe import data
from keras_moe.data import _tokens

DOCUMENT, SHARD = 500, 2**24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=8, help="of 16M tokens each")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--batches", type=int, default=16, help="in a round")
    parser.add_argument("--parameters", type=float, default=0.6e9)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--peak", type=float, default=400e12, help="FLOP/s of a device")


def measure(args: argparse.Namespace, report: Report) -> None:
    tokens = args.batches * args.batch * args.length
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.shards)
        rows = {
            "shards": _tokens.open_tokens(
                f"tokens:{folder}", "train", args.length, 0, "of noise"
            ),
            "memory": _tokens.rows_in_memory(
                documents(0), "uint16", args.length, padding_id=0
            ),
        }
        loaded = {
            name: data.load_rows(x, args.batch, repeat=True) for name, x in rows.items()
        }
        candidates = {
            name: lambda batches=batches: drain(batches, args.batches)
            for name, batches in loaded.items()
        }
        title = f"{tokens:,} tokens in rows of {args.length}, {os.cpu_count()} cores"
        report.compare(title, candidates, "memory", tokens=tokens)
    flops = args.devices * 0.4 * args.peak
    row = {
        "devices": args.devices,
        "parameters": args.parameters,
        "tokens/s": flops / (6 * args.parameters),
    }
    formats = {"devices": "d", "parameters": ".2g", "tokens/s": ".4g"}
    report.table("what training eats", [row], formats)


def documents(seed: int) -> np.ndarray:
    """The ids of documents of one length, as many as a shard has."""
    draw = np.random.default_rng(seed)
    return draw.integers(32_000, size=(SHARD // DOCUMENT, DOCUMENT), dtype="uint16")


def write(folder: Path, count: int) -> None:
    """Writes a folder as `keras-moe tokenize` does."""
    shards = []
    for number in range(count):
        path = folder / _tokens.shard_name("train", number)
        tokens, lengths = _tokens.joined(documents(number), "uint16")
        shards.append(_tokens.write_shard(path, tokens, lengths))
    split = {
        "source": "noise",
        "documents": count * SHARD // DOCUMENT,
        "texts_sha256": hashlib.sha256().hexdigest(),
        "done": 1,
        "shards": shards,
    }
    index = {"format": 1, "tokenizer_sha256": "of noise", "dtype": "uint16"}
    text = json.dumps({**index, "splits": {"train": split}})
    (folder / _tokens.INDEX).write_text(text)


def drain(batches, count: int) -> None:
    for _ in batches.take(count):
        pass


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
