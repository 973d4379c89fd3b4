"""Values of variables, kept while these change."""

import contextlib
from collections.abc import Iterator

import numpy as np
from keras import ops


@contextlib.contextmanager
def restored(variables: list) -> Iterator[list[np.ndarray]]:
    """Lets variables change within the context, and restores their values after it."""
    kept = [np.array(ops.convert_to_numpy(v.value)) for v in variables]
    try:
        yield kept
    finally:
        for variable, value in zip(variables, kept):
            variable.assign(value)
