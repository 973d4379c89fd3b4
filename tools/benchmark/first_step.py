"""Seconds to build a model and to make its first step, beside Keras's layers alone.

    KERAS_BACKEND=jax python tools/benchmark/first_step.py

Each case is built and fitted in a process of its own, in which nothing is compiled yet.
The limit is a dense vision transformer of the same size from Keras's own layers.
"""

import argparse
import statistics
import time
from typing import Any

import keras
import numpy as np
from runner import Report, rows_of_process, run

from keras_moe import models

# Presets, and the batch size of their first step.
CASES = {"vmoe_digits": 16, "vit_s32": 16, "vit_b16": 1}


def plain_transformer(config: dict[str, Any], num_classes: int) -> keras.Model:
    """A dense vision transformer of Keras's layers.

    Args:
        config: arguments of a backbone of the same sizes.
        num_classes: number of outputs.
    """
    layers = keras.layers
    dim, patch = config["hidden_dim"], config["patch_size"]
    inputs = keras.Input(config["image_shape"])
    x = layers.Conv2D(dim, patch, patch)(inputs)
    x = layers.Reshape((-1, dim))(x)
    for _ in range(config["num_layers"]):
        heads = config["num_heads"]
        normed = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(heads, dim // heads)(normed, normed)
        hidden = layers.Dense(config["mlp_dim"], "gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(dim)(hidden)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(num_classes)(x))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=int, default=3, help="processes of each case")
    parser.add_argument("--child", choices=("ours", "plain"), help=argparse.SUPPRESS)


def measure(args: argparse.Namespace, report: Report) -> None:
    if args.child:
        report.table("times", [times(args.cases[0], args.child)], {})
        return
    for case in args.cases:
        measured = {"ours": [], "plain": []}
        for _ in range(args.runs):
            for name, rows in measured.items():
                rows += rows_of_process("--cases", case, "--child", name)
        medians = {
            name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            for name, rows in measured.items()
        }
        rows = [{"model": name, **values} for name, values in medians.items()]
        formats = dict.fromkeys(rows[0], ".2f") | {"model": ""}
        report.table(f"{case}, median of {args.runs} processes", rows, formats)


def times(case: str, name: str) -> dict[str, Any]:
    """Seconds of building a model, and of its first step, by the clock and of CPU.

    Args:
        case: name among `CASES`.
        name: `"ours"` or `"plain"`.
    """
    with models.resolve(case, {"num_classes": 10}) as blueprint:
        config = blueprint.config
    start, cpu = time.perf_counter(), time.process_time()
    if name == "plain":
        model = plain_transformer(config, 10)
    else:
        model = models.from_preset(case, num_classes=10, load_weights=False)
    built, built_cpu = time.perf_counter(), time.process_time()
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[],
    )
    size = CASES[case]
    images = np.zeros((size, *model.input_shape[1:]), "float32")
    model.fit(images, np.zeros(size, "int32"), batch_size=size, verbose=0)
    return {
        "build s": built - start,
        "build CPU s": built_cpu - cpu,
        "first step s": time.perf_counter() - built,
        "first step CPU s": time.process_time() - built_cpu,
    }


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=0)
