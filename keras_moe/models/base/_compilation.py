"""Around the first step of a call: looks at its batch, and announces compilation."""

import contextlib
import contextvars
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_moe._backends.tensorflow import is_iterator, peeked
from keras_moe._compat import ONE_AT_A_TIME
from keras_moe._processes import process_index
from keras_moe._types import KerasModel
from keras_moe.models.base._input_checks import check_batch, checking_labels

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

# Whether compilations are announced, and the steps whose first batch is looked at.
# None outside `fit`, `evaluate` and `predict`.
_call: contextvars.ContextVar[tuple[bool, set] | None] = contextvars.ContextVar(
    "call", default=None
)


@contextlib.contextmanager
def announcing(
    method: str, args: tuple, kwargs: dict, seen: tuple[str, ...] = ()
) -> Iterator[None]:
    """Announces compilations unless `verbose` is 0; `seen` are steps looked at."""
    if _call.get() is not None:
        yield
        return
    index = _VERBOSE[method]
    verbose = args[index] if len(args) > index else kwargs.get("verbose", "auto")
    token = _call.set((verbose != 0 and process_index() == 0, {*seen}))
    try:
        yield
    finally:
        _call.reset(token)


def make_step(
    model: KerasModel, name: str, make: Callable[[bool], Any], force: bool
) -> object:
    """Creates a step whose first call is announced, and looks at its batch."""
    with ONE_AT_A_TIME:
        before = getattr(model, name)
        made = make(force)
        function = getattr(model, name)
        is_new = function is not before
        if is_new and name != "predict_function":
            function = checking_labels(model, function)
            setattr(model, name, function)
        # A call that ended before its first step left its wrapper.
        function = getattr(function, "inner", function)
        announced, looked_at = _call.get() or (False, set())
        is_eager = keras.backend.backend() == "torch" and not model.jit_compile
        announced &= is_new and not (is_eager or model.run_eagerly)
        # Outside of a call, only the first batch of all.
        is_first = is_new
        if _call.get():
            is_first = looked_at.isdisjoint((name, id(function)))
        if not announced and not is_first:
            return made
        looked_at.add(id(function))

        def first_step(*args):
            if getattr(model, name) is not first_step:
                # Another thread was first.
                return function(*args)
            setattr(model, name, function)
            if is_first:
                batch, data = _peeked(args[-1], model.steps_per_execution)
                check_batch(model, batch)
                args = (*args[:-1], data)
            line = f"Compiling the first {_STEPS[name]}..."
            with _line(line) if announced else contextlib.nullcontext():
                return function(*args)

        first_step.inner = first_step.__wrapped__ = function
        setattr(model, name, first_step)
    return made


def _peeked(data, steps):
    """The first batch of what a step gets, and the same data, not yet read."""
    if isinstance(data, (list, tuple)):
        return data[0], data
    if is_iterator(data):
        return peeked(data, steps)
    for batch in data if isinstance(data, Iterator) else ():
        return batch, itertools.chain([batch], data)
    return None, data


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
