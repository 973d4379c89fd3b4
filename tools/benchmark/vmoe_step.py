"""A V-MoE's training step over that of the dense model that it was made of.

    KERAS_BACKEND=jax python tools/benchmark/vmoe_step.py

A step is `train_on_batch` with plain gradient descent, whose cost is nobody's. The
dense twin has the same blocks, head and loss. `tools/benchmark/gpu.py` has larger
models, on a GPU.
"""

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from runner import Report, run

from keras_moe import models

FORMS = {"V-MoE": {}, "dense twin": {"moe_layers": None}}


def steps(
    preset: str = "vmoe_s32_last2_e8", batch_size: int = 16, num_classes: int = 1000
) -> dict[str, Callable[[], Any]]:
    """Training steps of a preset and of its dense twin.

    Args:
        preset: name of the preset.
        batch_size: number of images.
        num_classes: number of classes.
    """
    generator = np.random.default_rng(0)
    candidates = {}
    for name, overrides in FORMS.items():
        model = models.from_preset(
            preset,
            num_classes=num_classes,
            multi_label=False,
            load_weights=False,
            **overrides,
        )
        model.compile(
            optimizer=keras.optimizers.SGD(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[],
        )
        shape = (batch_size, *model.backbone.image_shape)
        images = generator.normal(size=shape).astype("float32")
        labels = generator.integers(num_classes, size=batch_size)
        candidates[name] = lambda model=model, batch=(images, labels): (
            model.train_on_batch(*batch)
        )
    return candidates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="vmoe_s32_last2_e8")
    parser.add_argument("--batch-size", type=int, default=16)


def measure(args: argparse.Namespace, report: Report) -> None:
    title = f"{args.preset}, batch {args.batch_size}"
    report.compare(title, steps(args.preset, args.batch_size), "dense twin")


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
