"""Packages of the extras, which are imported when they are first used."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from keras_moe._errors import install


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports within name the extra of keras-moe that has the package."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{error}: {install(name)}") from error


class _Lazy:
    """Stands for a module; without a cache, as the import is one look-up."""

    def __init__(self, module: str):
        self.module = module

    def __getattr__(self, name: str) -> Any:
        with extra("data"):
            return getattr(importlib.import_module(self.module), name)


tf, tfds = _Lazy("tensorflow"), _Lazy("tensorflow_datasets")
