"""Ablating every expert of a muMoE head, over passes of the whole model.

    python tools/benchmark/expert_ablation.py [--experts 32 128] [--images 256]

The naive way takes a pass over all images for each expert.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse

import keras
import numpy as np
from runner import Report, run

from keras_moe import models
from keras_moe.analysis import ablate_experts
from keras_moe.layers import MuMoE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="vit_s32")
    parser.add_argument("--experts", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--rank", type=int, default=128)


def measure(args: argparse.Namespace, report: Report) -> None:
    generator = np.random.default_rng(0)
    rows = []
    for count in args.experts:
        head = MuMoE(args.classes, count, rank=args.rank)
        shape = (args.image_size, args.image_size, 3)
        model = models.from_preset(
            args.preset, num_classes=args.classes, image_shape=shape, head=head
        )
        # Coefficients as sparse as those of trained heads, not all alike.
        for kernel in model.head.gate.kernels:
            kernel.assign(generator.normal(size=kernel.shape))
        images = generator.uniform(-1, 1, (args.images, *shape)).astype("float32")
        labels = generator.integers(args.classes, size=args.images)
        records = keras.Model(model.input, model.routing["head"])
        gates = records.predict(images, verbose=0).gates
        seconds = report.seconds(
            {
                "pass": lambda m=model, x=images: m.predict(x, verbose=0),
                "ablation": lambda m=model, x=images, y=labels: ablate_experts(
                    m, x, y, verbose=0
                ),
            }
        )
        passes = seconds["ablation"] / seconds["pass"]
        rows.append(
            {
                "experts": count,
                "per image": float((gates > 0).sum(axis=-1).mean()),
                "a pass ms": 1e3 * seconds["pass"],
                "all ablated, passes": passes,
                "naive over it": (count + 1) / passes,
            }
        )
    formats = {"per image": ".1f", "a pass ms": ".0f"}
    formats |= {"all ablated, passes": ".2f", "naive over it": ".1f"}
    report.table(f"{args.images} images", rows, formats)


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=5)
