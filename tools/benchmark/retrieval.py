"""Throughput of the evaluation of pairs: embedding, and retrieval by chunks.

    python tools/benchmark/retrieval.py --images 100000 --texts 500000 --dim 512

Retrieval runs on a part of the images and of the texts, `--part` of each, and its time
is extrapolated to the whole by the number of similarities, N x M. The memory is what it
adds to the embeddings' own.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse
import resource

import numpy as np
from runner import Report, run

from keras_moe import evaluation, models
from keras_moe.evaluation.retrieval import CHUNK_SIZE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="limoe_s32")
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--texts", type=int, default=500_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument(
        "--part", type=float, default=0.1, help="share of images and texts"
    )
    parser.add_argument("--chunk-size", type=int, default=CHUNK_SIZE)


def measure(args: argparse.Namespace, report: Report) -> None:
    measure_retrieval(args, report)
    measure_encoding(args, report)


def peak() -> float:
    """The largest memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure_retrieval(args: argparse.Namespace, report: Report) -> None:
    generator = np.random.default_rng(0)
    images, texts = (max(int(n * args.part), 1) for n in (args.images, args.texts))
    embeddings = [
        generator.standard_normal((n, args.dim), "float32") for n in (images, texts)
    ]
    owner, before = np.arange(texts) % images, peak()

    def rank():
        evaluation.retrieval(*embeddings, owner, ks=(1,), chunk_size=args.chunk_size)

    seconds = report.seconds({"retrieval": rank}, rounds=1)["retrieval"]
    row = {
        "images": images,
        "texts": texts,
        "dim": args.dim,
        "seconds": seconds,
        "embeddings GB": sum(x.nbytes for x in embeddings) / 1e9,
        "added GB": peak() - before,
    }
    formats = {name: ".2f" for name in ("seconds", "embeddings GB", "added GB")}
    if args.part != 1:
        whole = f"seconds of {args.images:,} x {args.texts:,}, extrapolated"
        row[whole] = seconds * args.images * args.texts / (images * texts)
        formats[whole] = ".0f"
    report.table("retrieval", [row], formats)


def measure_encoding(args: argparse.Namespace, report: Report) -> None:
    shape = (args.image_size, args.image_size, 3)
    model = models.from_preset(args.preset, task="contrastive", image_shape=shape)
    ids = np.ones((args.batch_size, model.backbone.max_length), "int32")
    texts = {"token_ids": ids, "padding_mask": ids > 0}
    images = np.zeros((args.batch_size, *shape), "float32")
    encoders = {
        "images": lambda: model.encode_images(images, args.batch_size),
        "captions": lambda: model.encode_text(texts, args.batch_size),
    }
    report.compare(
        f"{args.preset} at {args.image_size} pixels",
        encoders,
        "images",
        examples=args.batch_size,
    )


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=5)
