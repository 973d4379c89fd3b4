"""A model's weights after a failed `fit`, `evaluate` or `predict`.

On JAX, Keras takes the values out of a model's variables while it runs, and puts them
back at the end. After an exception it does not: the next call of the model fails with
"'NoneType' object is not callable".
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras


@contextlib.contextmanager
def state_kept(model: keras.Model, training: bool = False) -> Iterator[None]:
    """Puts the values back into a model's variables if the block raises.

    These are the values after the last complete step. Other backends keep the values
    in the variables, and need nothing.
    """
    if keras.backend.backend() != "jax":
        yield
        return
    optimizer = getattr(model, "optimizer", None)
    if training and optimizer is not None and not optimizer.built:
        # Keras would build it later, but its variables are needed here.
        optimizer.build(model.trainable_variables)
    # References do not keep the memory of buffers that Keras donates.
    before = [(variable, _value(variable)) for variable in _variables(model)]
    try:
        yield
    except BaseException:
        # After the first step the state of the last one is with the model.
        model.jax_state_sync()
        for variable, value in before:
            if value is None or value.is_deleted() or _value(variable) is not None:
                continue
            variable.assign(value)
        raise


def _variables(model: keras.Model) -> list[Any]:
    optimizer = getattr(model, "optimizer", None)
    of_optimizer = [] if optimizer is None else optimizer.variables
    return [*model.variables, *model.metrics_variables, *of_optimizer]


def _value(variable: Any) -> Any:
    """The variable's array, or None if it has been taken out."""
    try:
        return variable.value
    except TypeError:
        return None
