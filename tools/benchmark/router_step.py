"""A whole training step by router, over that of softmax token choice, on JAX.

    python tools/benchmark/router_step.py

One router at a time beside softmax token choice: several models of `vmoe_s32` and their
optimizers would not fit in memory.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import argparse

import numpy as np
from runner import Report, run
from training_step import jitted_step

from keras_moe import models, routers

BASELINE = "softmax_token_choice"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="vmoe_s32")
    parser.add_argument("--batch-size", type=int, default=16)
    names = [name for name in routers.ROUTERS if name != BASELINE]
    parser.add_argument("--routers", nargs="+", choices=names, default=names)


def measure(args: argparse.Namespace, report: Report) -> None:
    generator = np.random.default_rng(0)
    for name in args.routers:
        steps = {}
        for router in (BASELINE, name):
            model = models.from_preset(
                args.preset, num_classes=10, router=router, load_weights=False
            )
            shape = (args.batch_size, *model.backbone.image_shape)
            images = generator.normal(size=shape).astype("float32")
            labels = generator.integers(10, size=args.batch_size)
            steps[router] = jitted_step(model, images, labels)
        report.compare(f"{args.preset}, batch {args.batch_size}", steps, BASELINE)


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
