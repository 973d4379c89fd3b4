"""Models whose weights have shapes, and no memory: on PyTorch's meta device."""

from collections.abc import Callable

import keras
import pytest


def symbolic_model(make: Callable[[], keras.Model]) -> keras.Model:
    """The model that `make` makes, with none of its weights allocated."""
    if keras.backend.backend() != "torch":
        pytest.skip("only PyTorch makes weights without memory")
    with keras.device("meta"):
        return make()
