"""Ablating every expert of a muMoE head, over passes of the whole model.

    python tools/benchmark/expert_ablation.py [--experts 32 128] [--images 256]

The naive way takes a pass over all images for each expert.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse

import keras
import numpy as np
from rich.console import Console
from rich.table import Table
from timing import interleaved

from keras_moe import models
from keras_moe.analysis import ablate_experts
from keras_moe.layers import MuMoE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="vit_s32")
    parser.add_argument("--experts", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    generator = np.random.default_rng(0)
    table = Table(title=f"{args.images} images ({keras.backend.backend()})")
    for column in ("experts", "per image", "a pass ms", "all ablated", "naive over it"):
        table.add_column(column, justify="right")
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
        seconds = interleaved(
            {
                "pass": lambda m=model, x=images: m.predict(x, verbose=0),
                "ablation": lambda m=model, x=images, y=labels: ablate_experts(
                    m, x, y, verbose=0
                ),
            },
            args.rounds,
        )
        passes = seconds["ablation"] / seconds["pass"]
        table.add_row(
            str(count),
            f"{(gates > 0).sum(axis=-1).mean():.1f}",
            f"{1e3 * seconds['pass']:.0f}",
            f"{passes:.2f} passes",
            f"{(count + 1) / passes:.1f}x",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
