"""Pairs per second of `load_pairs`, over arrays in memory, and of a training step.

    KERAS_BACKEND=jax python tools/benchmark/pair_pipeline.py
    KERAS_BACKEND=jax python tools/benchmark/pair_pipeline.py --size 224 --pairs 512

The emoji are written as PNG files of a folder with a CSV, as a tar file and as TFRecord
files; arrays are read with and without a tokenizer. Each round reads from the start of
an endless sequence, a reading of the first records into the shuffle buffer included.
"""

import argparse
import csv
import io
import os
import tarfile
import tempfile
from pathlib import Path

import tensorflow as tf
from runner import Report, run

from keras_moe import data
from keras_moe.losses import SoftmaxContrastiveLoss
from keras_moe.models import TextTokenizer, from_preset

VOCABULARY, LENGTH = 1024, 16
BASELINE = "no tokenizer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=2048, help="in the files")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batches", type=int, default=16, help="in a round")
    parser.add_argument("--size", type=int, default=32, help="side of the images")
    parser.add_argument("--hidden", type=int, default=64, help="size of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")


def measure(args: argparse.Namespace, report: Report) -> None:
    shape = (args.size, args.size, 3)
    emoji = data.load_emoji("all", shape)
    pairs = (emoji.images[: args.pairs], emoji.captions[: args.pairs])
    tokenizer = TextTokenizer.trained(pairs[1], VOCABULARY, LENGTH)
    options = {
        "image_shape": shape,
        "batch_size": args.batch,
        "repeat": True,
        "tokenizer": tokenizer,
    }
    model = from_preset(
        "limoe_s32",
        task="contrastive",
        image_shape=shape,
        patch_size=args.size // 8,
        hidden_dim=args.hidden,
        num_layers=args.layers,
        num_heads=4,
        mlp_dim=4 * args.hidden,
        vocabulary_size=VOCABULARY,
        max_length=LENGTH,
    )
    model.compile("sgd", loss=SoftmaxContrastiveLoss())
    title = f"{args.batches * args.batch} pairs of {args.size} px"
    with tempfile.TemporaryDirectory() as folder:
        loaded = {
            BASELINE: data.load_pairs(pairs, "train", **{**options, "tokenizer": None}),
            "arrays": data.load_pairs(pairs, "train", **options),
            **{
                name: data.load_pairs(source, "train", **options)
                for name, source in written(Path(folder), pairs).items()
            },
        }
        batch, _ = next(loaded["arrays"].as_numpy_iterator())
        candidates = {
            name: lambda batches=batches: drain(batches, args.batches)
            for name, batches in loaded.items()
        }
        title += f", {os.cpu_count()} cores"
        report.compare(title, candidates, BASELINE, pairs=args.batches * args.batch)
        step = {"step": lambda: model.train_on_batch(batch)}
        seconds = report.seconds(step)["step"]
    row = {
        "parameters": model.count_params(),
        "step ms": 1e3 * seconds,
        "pairs/s": args.batch / seconds,
    }
    formats = {"parameters": ",", "step ms": ".1f", "pairs/s": ".4g"}
    report.table(f"a training step, batch {args.batch}", [row], formats)


def written(folder: Path, pairs: tuple) -> dict[str, str]:
    """The sources of files with the same pairs, by name."""
    files = [tf.io.encode_png(image).numpy() for image in pairs[0]]
    images = folder / "folder/train"
    images.mkdir(parents=True)
    with open(images / "captions.csv", "x", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "caption"])
        rows.writerows((f"{i}.png", caption) for i, caption in enumerate(pairs[1]))
    with tarfile.open(folder / "train.tar", "x") as archive:
        for number, (content, caption) in enumerate(zip(files, pairs[1])):
            (images / f"{number}.png").write_bytes(content)
            for suffix, part in ((".png", content), (".txt", caption.encode())):
                member = tarfile.TarInfo(f"{number}{suffix}")
                member.size = len(part)
                archive.addfile(member, io.BytesIO(part))
    data.write_tfrecords(folder / "records", "train", zip(files, pairs[1]), num_files=4)
    return {
        "folder of PNG": f"folder:{folder / 'folder'}",
        "tar of PNG": f"webdataset:{folder / 'train.tar'}",
        "TFRecord of PNG": f"tfrecord:{folder / 'records'}",
    }


def drain(batches: tf.data.Dataset, count: int) -> None:
    # From the start: batches that were prepared before would cost nothing.
    for _ in batches.take(count):
        pass


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
