"""`model.fit`'s step over a hand-written jitted step, on JAX.

python tools/benchmark/fit_overhead.py
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from runner import Report, run
from training_step import jitted_step

from keras_moe import models

# Name to preset, overrides, batch size and steps: many of the small ones, so that the
# work of a call of `fit` is spread as it is in a real epoch.
CASES = {
    "vmoe_digits": ("vmoe_digits", {}, 16, 128),
    "vmoe_s32": ("vmoe_s32_last2_e8", {"multi_label": False}, 16, 6),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))


def fit_and_hand(case: str) -> dict[str, Callable[[], Any]]:
    """A call of `fit`, and a loop over a hand-written step, of as many steps.

    Args:
        case: name among `CASES`.
    """
    preset, overrides, batch_size, steps = CASES[case]
    fitted, stepped = (
        models.from_preset(preset, num_classes=10, **overrides) for _ in range(2)
    )
    fitted.compile(
        optimizer=keras.optimizers.Adam(1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[],
    )
    generator = np.random.default_rng(0)
    shape = (batch_size, *fitted.backbone.image_shape)
    images = generator.normal(size=shape).astype("float32")
    labels = generator.integers(10, size=batch_size)
    step = jitted_step(stepped, images, labels)

    x, y = np.tile(images, (steps, 1, 1, 1)), np.tile(labels, steps)

    def fit():
        fitted.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)

    def hand():
        for _ in range(steps):
            loss = step()
        return loss

    return {"fit": fit, "hand-written step": hand}


def measure(args: argparse.Namespace, report: Report) -> None:
    for case in args.cases:
        _, _, batch_size, steps = CASES[case]
        title = f"{case}, batch {batch_size}, {steps} steps"
        report.compare(title, fit_and_hand(case), "hand-written step")


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
