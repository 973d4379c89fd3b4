"""Work of an augmentation for an image in `tf.data`, over other forms of it.

    python tools/benchmark/augmentations.py
    python tools/benchmark/augmentations.py --names cutmix --size 128

Images lie in memory, and a turn is one pass over them in batches. The plain maps are
written by hand with TensorFlow's own operations; layers of Keras, and of KerasCV where
it is installed, are called on batches, as their documentation does.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse
from collections.abc import Callable

import keras
import numpy as np
import plain_augmentations as plain
import tensorflow as tf
from neighbours import cpu_seconds
from passes import BATCH, one_pass
from row import peer
from runner import Report, run

from keras_moe.data.augmentation import build_steps

NAMES = ("randaugment", "mixup", "cutmix")
CLASSES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--images", type=int, default=256, help=f"in {BATCH}s")
    parser.add_argument("--size", type=int, default=224, help="side of the images")


def measure(args: argparse.Namespace, report: Report) -> None:
    for name in args.names:
        made = candidates(name, args.images, args.size)
        amounts = {"images": args.images}
        title = f"{name}, {args.images} images, CPU time"
        report.compare(title, made, "plain map", clock=cpu_seconds, **amounts)


def candidates(name: str, images: int, size: int) -> dict[str, Callable[[], None]]:
    """Functions by name, each of which augments images once.

    Args:
        name: name of the augmentation.
        images: number of images, full batches.
        size: height and width of the images.
    """
    generator = np.random.default_rng(0)
    pixels = generator.integers(256, size=(BATCH, size, size, 3)).astype("float32")
    labels = np.eye(CLASSES, dtype="float32")[generator.integers(CLASSES, size=BATCH)]
    single = tf.data.Dataset.from_tensor_slices((pixels, labels))
    single = tf.data.Dataset.zip((single.repeat(), tf.data.Dataset.range(images)))
    batches = single.batch(BATCH).map(lambda data, numbers: (data, numbers[0]))

    def mapped(dataset, function):
        def apply(data, number):
            return function(*data, tf.stack([tf.cast(number, "int32"), 0]))

        return dataset.map(apply, num_parallel_calls=tf.data.AUTOTUNE)

    (step,) = build_steps(name, (size, size, 3), 0)
    whole = batches if step.mixes_labels else single
    written = {"randaugment": plain.RandAugment(), "mixup": plain.mixup}
    written["cutmix"] = plain.cutmix
    datasets = {
        "load": mapped(whole, step.function),
        "plain map": mapped(whole, written[name]),
    }
    if not step.mixes_labels:
        datasets = {key: value.batch(BATCH) for key, value in datasets.items()}

    def of_layer(layer):
        def apply(pixels, labels, seed):
            if not step.mixes_labels:
                return layer(pixels, training=True), labels
            mixed = layer({"images": pixels, "labels": labels}, training=True)
            return mixed["images"], mixed["labels"]

        return mapped(batches, apply)

    # Keras's RandAugment computes all of its operations, in 30 times as long: it would
    # leave the row no rounds.
    if name != "randaugment":
        datasets["Keras"] = of_layer(of_keras(keras.layers, name))
    if keras_cv := peer("keras_cv"):
        datasets["KerasCV"] = of_layer(of_keras(keras_cv.layers, name))
    return {
        key: lambda dataset=dataset: one_pass(dataset)
        for key, dataset in datasets.items()
    }


def of_keras(layers, name: str):
    """The layer of a name, of Keras or KerasCV, with their own defaults but these."""
    if name == "mixup":
        return layers.MixUp(alpha=0.2)
    if name == "cutmix":
        return layers.CutMix()
    return layers.RandAugment(value_range=(0, 255), augmentations_per_image=2)


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
