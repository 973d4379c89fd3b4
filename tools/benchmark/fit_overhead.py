"""`model.fit`'s step over a hand-written one; on JAX with its parts.

KERAS_BACKEND=jax python tools/benchmark/fit_overhead.py
"""

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from runner import Report, run
from training_step import hand_written_step

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
    fitted, images, labels, steps = fitted_model(case)
    stepped, *_ = fitted_model(case)
    x, y = np.tile(images, (steps, 1, 1, 1)), np.tile(labels, steps)
    step = hand_written_step(stepped, images, labels)

    def fit(x=x, y=y):
        fitted.fit(x, y, batch_size=len(images), shuffle=False, verbose=0)

    def hand():
        for _ in range(steps):
            loss = step()
        return loss

    return {"fit": fit, "hand-written step": hand}


def parts_of_fit(case: str) -> dict[str, Callable[[], Any]]:
    """A call of `fit`, its parts, and a loop over a hand-written step.

    The parts are Keras's own compiled step in a bare loop, the same on batches that
    are cut from the arrays, and a call of `fit` of one step: nearly all of that is
    paid once a call.

    Args:
        case: name among `CASES`.
    """
    looped, images, labels, steps = fitted_model(case)
    batch_size = len(images)
    x, y = np.tile(images, (steps, 1, 1, 1)), np.tile(labels, steps)
    looped.fit(images, labels, batch_size=batch_size, verbose=0)
    keras_step = bare_step(looped)
    whole = fit_and_hand(case)

    def bare():
        for _ in range(steps):
            logs = keras_step(images, labels)
        return logs

    def from_arrays():
        for start in range(0, len(x), batch_size):
            places = np.arange(start, start + batch_size)
            logs = keras_step(x[places], y[places])
        return logs

    return {
        **whole,
        "Keras's step alone": bare,
        "with batches of arrays": from_arrays,
        "fit of one step": lambda: whole["fit"](images, labels),
    }


def fitted_model(case: str) -> tuple[keras.Model, np.ndarray, np.ndarray, int]:
    """A compiled model, one batch of images and labels, and the number of steps.

    Args:
        case: name among `CASES`.
    """
    preset, overrides, batch_size, steps = CASES[case]
    model = models.from_preset(preset, num_classes=10, load_weights=False, **overrides)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[],
        # The hand-written step has XLA, which Keras leaves out on a CPU.
        jit_compile=keras.backend.backend() == "tensorflow" or "auto",
    )
    generator = np.random.default_rng(0)
    shape = (batch_size, *model.backbone.image_shape)
    images = generator.normal(size=shape).astype("float32")
    return model, images, generator.integers(10, size=batch_size), steps


def bare_step(model: keras.Model) -> Callable[..., Any]:
    """The compiled step that `fit` calls, as a function of images and labels.

    Args:
        model: a model that has been fitted.
    """
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    # Copies: the step gives its state's memory away.
    state = [[np.array(variable) for variable in group] for group in groups]

    def step(images, labels):
        nonlocal state
        logs, state = model.train_function(tuple(state), iter([(images, labels)]))
        return logs

    return step


def measure(args: argparse.Namespace, report: Report) -> None:
    for case in args.cases:
        _, _, batch_size, steps = CASES[case]
        title = f"{case}, batch {batch_size}, {steps} steps"
        on_jax = keras.backend.backend() == "jax"
        parts = parts_of_fit(case) if on_jax else fit_and_hand(case)
        report.compare(title, parts, "hand-written step")


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
