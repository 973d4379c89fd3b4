"""A V-MoE's training step over that of the dense model that it was made of.

    KERAS_BACKEND=jax python tools/benchmark/vmoe_step.py

A step is `train_on_batch` with plain gradient descent, whose cost is nobody's. The
dense twin has the same blocks, head and loss. On a GPU, with the form without a
capacity (grouped matmuls, as in MegaBlocks) and the einsums of google-research/vmoe,
as shares of what the chip can do:

    KERAS_BACKEND=jax python tools/benchmark/vmoe_step.py --preset vmoe_l16 \\
        --batch-size 32 --dtype mixed_bfloat16 --chip h200 \\
        --forms V-MoE dropless einsum "dense twin"
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from runner import Report, run

from keras_moe import models
from keras_moe.distribution import CHIPS

FORMS = {
    "V-MoE": {},
    "dropless": {"dropless": True},
    "einsum": {"dispatcher": "einsum"},
    "dense twin": {"moe_layers": None},
}


def made(
    preset: str, form: str, num_classes: int = 1000, dtype: str | None = None
) -> keras.Model:
    """The preset's model in one of `FORMS`, compiled for training."""
    model = models.from_preset(
        preset,
        num_classes=num_classes,
        multi_label=False,
        dtype=dtype,
        load_weights=False,
        **FORMS[form],
    )
    model.compile(
        optimizer=keras.optimizers.SGD(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[],
    )
    return model


def steps(
    preset: str = "vmoe_s32_last2_e8",
    batch_size: int = 16,
    num_classes: int = 1000,
    forms: Sequence[str] = ("V-MoE", "dense twin"),
    dtype: str | None = None,
) -> dict[str, Callable[[], Any]]:
    """Training steps of a preset and of its dense twin.

    Args:
        preset: name of the preset.
        batch_size: number of images.
        num_classes: number of classes.
        forms: names of `FORMS`.
        dtype: dtype policy of the models.
    """
    generator = np.random.default_rng(0)
    candidates = {}
    for name in forms:
        model = made(preset, name, num_classes, dtype)
        shape = (batch_size, *model.backbone.image_shape)
        images = generator.normal(size=shape).astype("float32")
        labels = generator.integers(num_classes, size=batch_size)
        candidates[name] = lambda model=model, batch=(images, labels): (
            model.train_on_batch(*batch)
        )
    return candidates


def rates(
    preset: str, batch_size: int, chip: str, seconds: dict[str, float]
) -> list[dict[str, Any]]:
    """Rows of tokens and FLOPs by second, and their share of the chip's bfloat16 peak.

    The FLOPs are those that `describe` counts, three times for a step: without what a
    form pads or repeats.
    """
    rows = []
    for name, value in seconds.items():
        model = models.abstract(preset, multi_label=False, **FORMS[name])
        flops = 3 * batch_size * sum(part.flops for part in model.describe().parts)
        tokens = batch_size * model.backbone.output.shape[1]
        rows.append(
            {
                "candidate": name,
                "tokens/s": tokens / value,
                "TFLOP/s": flops / value / 1e12,
                "% of peak": 100 * flops / value / CHIPS[chip].peak_flops,
            }
        )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="vmoe_s32_last2_e8")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=["V-MoE", "dense twin"]
    )
    parser.add_argument("--dtype", help="such as mixed_bfloat16")
    parser.add_argument("--chip", choices=CHIPS, help="whose peak is the measure")


def measure(args: argparse.Namespace, report: Report) -> None:
    title = f"{args.preset}, batch {args.batch_size}"
    candidates = steps(args.preset, args.batch_size, forms=args.forms, dtype=args.dtype)
    seconds = report.compare(title, candidates, args.forms[-1])
    if args.chip:
        rows = rates(args.preset, args.batch_size, args.chip, seconds)
        formats = {"tokens/s": ".0f", "TFLOP/s": ".4g", "% of peak": ".1f"}
        report.table(f"{title}, {args.chip}", rows, formats)


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
