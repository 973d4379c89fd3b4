"""Models whose weights have shapes, and no memory: on PyTorch's meta device."""

from collections.abc import Callable

import keras


def symbolic_model(make: Callable[[], keras.Model]) -> keras.Model:
    """The model that `make` makes, with none of its weights allocated."""
    with keras.device("meta"):
        return make()
