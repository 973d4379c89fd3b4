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
from runner import Report, run
from training_step import jitted_step

from keras_moe.models import VARIANTS, ViTBackbone


def classifier(backbone: keras.Model) -> keras.Model:
    """Both libraries' backbones under one head: the class token's logits."""
    outputs = keras.layers.Dense(1000)(backbone.output[:, 0])
    return keras.Model(backbone.input, outputs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variant", default="vit/S")
    parser.add_argument("--patch-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 6, 12])


def measure(args: argparse.Namespace, report: Report) -> None:
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
    seconds = report.seconds(candidates)

    rows = []
    for num_layers in args.layers:
        here, there = (
            1e3 * seconds[name, num_layers] for name in ("keras_moe", "keras_hub")
        )
        rows.append(
            {
                "blocks": num_layers,
                "keras_moe ms": here,
                "keras_hub ms": there,
                "speed-up": there / here,
                "ms per block": here / num_layers,
            }
        )
    formats = {"keras_moe ms": ".0f", "keras_hub ms": ".0f", "speed-up": ".2f"}
    title = f"{args.variant}/{args.patch_size}, batch {args.batch_size}"
    report.table(title, rows, {**formats, "ms per block": ".1f"})


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
