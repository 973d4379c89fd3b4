"""Seconds to build a model and to make its first step, beside dense ones.

    KERAS_BACKEND=jax python tools/benchmark/first_step.py

Each case is built and fitted in a process of its own, in which nothing is compiled yet.
The others are the preset's dense twin and KerasHub's ViT of the same sizes.
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
CASES = {"vmoe_digits": 16, "vit_s32": 16, "vmoe_s32_last2_e8": 16}
MODELS = ("ours", "dense twin", "keras_hub")


def new_model(case: str, name: str, num_classes: int) -> keras.Model:
    """A preset, its dense twin, or KerasHub's dense transformer of the same sizes."""
    own = {"moe_layers": None} if name == "dense twin" else {}
    if name != "keras_hub":
        options = {"num_classes": num_classes, "load_weights": False, **own}
        return models.from_preset(case, **options)
    import keras_hub

    with models.resolve(case, {"num_classes": num_classes}) as blueprint:
        config = blueprint.config
    names = ("image_shape", "patch_size", "num_layers", "num_heads")
    backbone = keras_hub.models.ViTBackbone(
        **{name: config[name] for name in (*names, "hidden_dim", "mlp_dim")}
    )
    return keras_hub.models.ViTImageClassifier(backbone, num_classes, preprocessor=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=int, default=3, help="processes of each case")
    parser.add_argument("--child", choices=MODELS, help=argparse.SUPPRESS)


def measure(args: argparse.Namespace, report: Report) -> None:
    if args.child:
        report.table("times", [times(args.cases[0], args.child)], {})
        return
    for case in args.cases:
        measured = {name: [] for name in MODELS}
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
        name: name among `MODELS`.
    """
    start, cpu = time.perf_counter(), time.process_time()
    model = new_model(case, name, 10)
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
