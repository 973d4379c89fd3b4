"""Looks at the first batch of a call, whatever it comes from."""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from keras_moe._backends.tensorflow import is_iterator, peeked
from keras_moe._compat import ONE_AT_A_TIME
from keras_moe._types import KerasModel
from keras_moe.models.base._input_checks import check_batch, checking_labels

# The steps whose first batch was looked at. None outside `fit`, `evaluate`, `predict`.
_looked_at: contextvars.ContextVar[set | None] = contextvars.ContextVar(
    "looked_at", default=None
)


@contextlib.contextmanager
def one_call(seen: tuple[str, ...] = ()) -> Iterator[None]:
    """Looks at the first batch of each step but those that are `seen`."""
    if _looked_at.get() is not None:
        yield
        return
    token = _looked_at.set({*seen})
    try:
        yield
    finally:
        _looked_at.reset(token)


def make_step(
    model: KerasModel, name: str, make: Callable[[bool], Any], force: bool
) -> object:
    """Creates a step that looks at its first batch."""
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
        looked_at = _looked_at.get()
        if looked_at is not None:
            is_new = looked_at.isdisjoint((name, id(function)))
            looked_at.add(id(function))
        # Outside of a call, only the first batch of all.
        if not is_new:
            return made

        def first_step(*args):
            if getattr(model, name) is not first_step:
                # Another thread was first.
                return function(*args)
            setattr(model, name, function)
            batch, data = _peeked(args[-1], model.steps_per_execution)
            check_batch(model, batch)
            return function(*args[:-1], data)

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
