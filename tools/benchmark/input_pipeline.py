"""Images per second of the input pipeline, over a plain map of `tf.data` and a model.

    python tools/benchmark/input_pipeline.py
    python tools/benchmark/input_pipeline.py --preset vmoe_s32_last2_e8 --rounds 15

Writes JPEG files of photographs' size with the noise of a camera, and reads them as for
training: a random crop, resized. The plain map decodes each image as a whole.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse
import tempfile
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from runner import Report, run
from training_step import jitted_step

from keras_moe import data, models

BATCH = 32
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=int, default=256, help="in the files")
    parser.add_argument("--batches", type=int, default=16, help=f"of {BATCH}, a round")
    parser.add_argument("--size", type=int, nargs=2, default=(375, 500))
    parser.add_argument("--preset", default="vit_s32")


def measure(args: argparse.Namespace, report: Report) -> None:
    model = models.from_preset(args.preset, num_classes=1000, multi_label=False)
    image_shape = model.backbone.image_shape
    images = args.batches * BATCH
    title = f"{images} images of {args.size[1]}x{args.size[0]}, {os.cpu_count()} cores"
    with tempfile.TemporaryDirectory() as folder:
        examples = ((photograph(n, *args.size), n % 10) for n in range(args.images))
        data.write_tfrecords(folder, "train", examples, classes=10, num_files=4)
        candidates = {
            name: lambda batches=batches: drain(batches, args.batches)
            for name, batches in pipelines(folder, image_shape).items()
        }
        report.compare(title, candidates, "plain map", images=images)

    generator = np.random.default_rng(0)
    shape = (BATCH, *image_shape)
    step = jitted_step(
        model,
        generator.normal(size=shape).astype("float32"),
        generator.integers(10, size=BATCH),
    )
    # A step takes longer than a batch: a third of the rounds.
    seconds = report.seconds({"step": step}, max(args.rounds // 3, 1))["step"]
    row = {"model": args.preset, "step ms": 1e3 * seconds, "images/s": BATCH / seconds}
    formats = {"step ms": ".1f", "images/s": ".4g"}
    report.table(f"a training step, batch {BATCH}", [row], formats)


def photograph(seed: int, height: int, width: int) -> bytes:
    """A JPEG file of smooth colours with grain, about as large as a photograph's."""
    rng = np.random.default_rng(seed)
    colours = rng.uniform(0, 255, (height // 30, width // 30, 3)).astype("float32")
    grain = rng.normal(0, 14, (height // 2, width // 2, 3)).astype("float32")
    image = tf.image.resize(colours, (height, width), "bicubic")
    image += tf.image.resize(grain, (height, width))
    image = tf.cast(tf.clip_by_value(image, 0, 255), "uint8")
    return tf.io.encode_jpeg(image, quality=90).numpy()


def pipelines(
    folder: str, image_shape: tuple[int, int, int]
) -> dict[str, tf.data.Dataset]:
    """Endless batches, by name."""
    height, width, _ = image_shape

    def plain():
        def prepare(record, seed):
            example = tf.io.parse_single_example(
                record,
                {
                    "image/encoded": tf.io.FixedLenFeature([], "string"),
                    "image/class/label": tf.io.FixedLenFeature([], "int64"),
                },
            )
            image = tf.io.decode_jpeg(example["image/encoded"], channels=3)
            begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
                tf.shape(image),
                tf.zeros((1, 0, 4)),
                seed=tf.stack([seed, 0]),
                area_range=SCALE,
                aspect_ratio_range=RATIO,
                use_image_if_no_bounding_boxes=True,
            )
            image = tf.image.resize(tf.slice(image, begin, size), (height, width))
            return image / 127.5 - 1.0, example["image/class/label"]

        files = tf.data.Dataset.list_files(f"{folder}/train-*.tfrecord", seed=0)
        records = files.interleave(
            tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE
        )
        records = records.shuffle(10_000, seed=0).repeat()
        pairs = tf.data.Dataset.zip((records, tf.data.Dataset.counter()))
        pairs = pairs.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        return pairs.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    class Whole(data.RandomResizedCrop):
        """Calls its own method, so that images are decoded as a whole for it."""

        def __call__(self, images, seed):
            return super().__call__(images, seed)

    def loaded(crop):
        return data.load(
            f"tfrecord:{folder}",
            "train",
            image_shape,
            batch_size=BATCH,
            augment=crop,
            repeat=True,
        )

    return {
        "plain map": plain(),
        "load": loaded(data.RandomResizedCrop(height, width, SCALE, RATIO)),
        "load, images as a whole": loaded(Whole(height, width, SCALE, RATIO)),
    }


def drain(batches: tf.data.Dataset, count: int) -> None:
    iterator: Iterator = iter(batches)
    for _ in range(count):
        next(iterator)


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
