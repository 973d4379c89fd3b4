"""Models compiled by `torch.compile`, beside the same models as PyTorch runs them.

    KERAS_BACKEND=torch python tools/benchmark/compiled_step.py
    KERAS_BACKEND=torch python tools/benchmark/compiled_step.py --preset \\
        vmoe_s32_last2_e8 --batch-size 16 --work step forward

A step is `train_on_batch` of the model as it compiles itself, with AdamW and clipped
gradients. Each program is compiled before the clock starts, which takes minutes.
"""

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from runner import Report, run

from keras_moe import models

WORKS = ("step", "forward")


def candidates(
    preset: str, batch_size: int, work: str = "step", **overrides: Any
) -> dict[str, Callable[[], Any]]:
    """Steps or forward passes of a preset by form, "compiled" and "eager".

    Args:
        preset: name of the preset.
        batch_size: number of images.
        work: one of `WORKS`.
        **overrides: arguments of the preset.
    """
    generator = np.random.default_rng(0)
    made = {}
    for name in ("compiled", "eager"):
        model = models.from_preset(
            preset, num_classes=10, load_weights=False, multi_label=False, **overrides
        )
        model.compile(metrics=[], jit_compile=name == "compiled")
        images = generator.normal(size=(batch_size, *model.backbone.image_shape))
        labels = generator.integers(10, size=batch_size)
        made[name] = _function(model, work, images.astype("float32"), labels)
    return made


def _function(model, work, images, labels):
    if work == "step":
        return lambda: model.train_on_batch(images, labels)
    images = keras.ops.convert_to_tensor(images)
    model.make_predict_function()
    return lambda: model.predict_function([(images,)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="vmoe_digits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--work", nargs="+", choices=WORKS, default=["step"])


def measure(args: argparse.Namespace, report: Report) -> None:
    if keras.backend.backend() != "torch":
        raise SystemExit("Expected KERAS_BACKEND=torch, which alone is eager")
    for work in args.work:
        title = f"{args.preset}, batch {args.batch_size}: {work}"
        functions = candidates(args.preset, args.batch_size, work)
        report.compare(title, functions, "compiled")


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
