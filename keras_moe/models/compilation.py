"""Announces compilation of a first step, during which Keras shows nothing."""

import contextlib
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_moe.compat import ONE_AT_A_TIME
from keras_moe.processes import process_index

# Shorter compilations are not announced.
LEAST_SECONDS = 1.0

# Keras's step functions and their names in the message.
_STEPS = {
    "train_function": "training step",
    "test_function": "evaluation step",
    "predict_function": "prediction step",
}
# Index of `verbose` among the positional arguments after the inputs.
_VERBOSE = {"fit": 3, "evaluate": 2, "predict": 1}

# Whether compilations are announced; None outside `fit`, `evaluate` and `predict`.
_is_announced = contextvars.ContextVar("is_announced", default=None)


@contextlib.contextmanager
def announcing(method: str, args: tuple, kwargs: dict) -> Iterator[None]:
    """Announces compilations unless `verbose` is 0; nested blocks inherit this."""
    if _is_announced.get() is not None:
        yield
        return
    index = _VERBOSE[method]
    verbose = args[index] if len(args) > index else kwargs.get("verbose", "auto")
    token = _is_announced.set(verbose != 0 and process_index() == 0)
    try:
        yield
    finally:
        _is_announced.reset(token)


def make_step(
    model: keras.Model, name: str, make: Callable[[bool], Any], force: bool
) -> Any:
    """Creates a step whose first call is announced; later calls cost nothing."""
    with ONE_AT_A_TIME:
        before = getattr(model, name)
        made = make(force)
        function = getattr(model, name)
        is_eager = keras.backend.backend() == "torch" and not model.jit_compile
        compiles = not (is_eager or model.run_eagerly)
        if function is before or not _is_announced.get() or not compiles:
            return made

        def first_step(*args):
            if getattr(model, name) is not first_step:
                return function(*args)
            setattr(model, name, function)
            with _line(f"Compiling the first {_STEPS[name]}..."):
                return function(*args)

        first_step.__wrapped__ = function
        setattr(model, name, first_step)
    return made


@contextlib.contextmanager
def _line(text):
    """Shows a line on stderr that ends with the elapsed seconds."""
    lock, start = threading.Lock(), time.monotonic()
    is_over, is_shown = False, False

    def show():
        nonlocal is_shown
        with lock:
            if not is_over:
                is_shown = True
                print(text, end="", file=sys.stderr, flush=True)

    timer = threading.Timer(LEAST_SECONDS, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            is_over = True
        if is_shown:
            seconds = time.monotonic() - start
            print(f" {seconds:.0f} s", file=sys.stderr, flush=True)
