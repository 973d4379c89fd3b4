"""A dense ViT's training step in this library and in KerasHub, at several depths.

    python tools/benchmark/vit_step.py

On JAX. The step is the same hand-written one for both models.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import argparse

import keras
import keras_hub
import numpy as np
from rich.console import Console
from rich.table import Table
from timing import interleaved
from training_step import jitted_step

from keras_moe.models import VARIANTS, ViTBackbone


def classifier(backbone: keras.Model) -> keras.Model:
    """Both libraries' backbones under one head: the class token's logits."""
    outputs = keras.layers.Dense(1000)(backbone.output[:, 0])
    return keras.Model(backbone.input, outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", default="vit/S")
    parser.add_argument("--patch-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 6, 12])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()

    generator = np.random.default_rng(0)
    shape = (args.batch_size, 224, 224, 3)
    images = generator.normal(size=shape).astype("float32")
    labels = generator.integers(1000, size=args.batch_size)
    candidates = {}
    for num_layers in args.layers:
        sizes = {**VARIANTS[args.variant].config(), "num_layers": num_layers}
        sizes.update(image_shape=shape[1:], patch_size=args.patch_size)
        for name, cls in (
            ("keras_moe", ViTBackbone),
            ("keras_hub", keras_hub.models.ViTBackbone),
        ):
            model = classifier(cls(**sizes))
            candidates[name, num_layers] = jitted_step(model, images, labels)
    seconds = interleaved(candidates, args.rounds)

    table = Table(
        title=f"{args.variant}/{args.patch_size}, batch {args.batch_size} (jax)"
    )
    for column in (
        "blocks",
        "keras_moe ms",
        "keras_hub ms",
        "speed-up",
        "ms per block",
    ):
        table.add_column(column, justify="right")
    for num_layers in args.layers:
        ours = 1e3 * seconds["keras_moe", num_layers]
        theirs = 1e3 * seconds["keras_hub", num_layers]
        table.add_row(
            str(num_layers),
            f"{ours:.0f}",
            f"{theirs:.0f}",
            f"{theirs / ours:.2f}",
            f"{ours / num_layers:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
