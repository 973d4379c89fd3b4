"""What parts of a training step cost: a selection bias, and Muon instead of AdamW.

KERAS_BACKEND=jax python tools/benchmark/step_parts.py
"""

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from runner import Report, run
from training_step import hand_written_step

from keras_moe import models
from keras_moe.training import Muon


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="vmoe_digits")
    parser.add_argument("--batch-size", type=int, default=64)


def selection_bias(preset: str, batch_size: int) -> dict[str, Callable[[], Any]]:
    """Steps of sigmoid gates without auxiliary losses, with and without a bias.

    Args:
        preset: name of a V-MoE.
        batch_size: number of images.
    """
    sigmoid = {"gates": "sigmoid", "auxiliary_losses": None}
    return {
        name: _step(preset, batch_size, selection_bias_rate=rate, **sigmoid)
        for name, rate in (("bias", 1e-3), ("no bias", None))
    }


def muon(preset: str, batch_size: int) -> dict[str, Callable[[], Any]]:
    """Steps of two optimizers.

    Args:
        preset: name of a V-MoE.
        batch_size: number of images.
    """
    return {
        optimizer.__name__: _step(preset, batch_size, optimizer(1e-4))
        for optimizer in (Muon, keras.optimizers.AdamW)
    }


def _step(preset, batch_size, optimizer=None, **overrides):
    model = models.from_preset(preset, num_classes=10, load_weights=False, **overrides)
    generator = np.random.default_rng(0)
    shape = (batch_size, *model.backbone.image_shape)
    images = generator.normal(size=shape).astype("float32")
    labels = generator.integers(10, size=batch_size)
    return hand_written_step(model, images, labels, optimizer)


def measure(args: argparse.Namespace, report: Report) -> None:
    for part, baseline in ((selection_bias, "no bias"), (muon, "AdamW")):
        steps = part(args.preset, args.batch_size)
        report.compare(f"{args.preset}, batch {args.batch_size}", steps, baseline)


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
