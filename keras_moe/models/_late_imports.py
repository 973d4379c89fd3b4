"""Imports KerasHub without TensorFlow, which it only needs for `tf.data`.

On JAX and PyTorch, TensorFlow and TensorFlow Text would double the time and the memory
of an import. They are loaded when KerasHub first uses them.
"""

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator

# What KerasHub's modules import.
_MODULES = (
    "tensorflow",
    "tensorflow_text",
    "tensorflow_text.tools",
    "tensorflow_text.tools.wordpiece_vocab",
    "tensorflow_text.tools.wordpiece_vocab.wordpiece_tokenizer_learner_lib",
)


class _LateModule(types.ModuleType):
    """Stands for a module, which is loaded for the first attribute that is missing."""

    # Marks a package.
    __path__ = []

    def __getattr__(self, name):
        is_importing = sys.modules.get(self.__name__) is self
        # KerasHub's cache of words works without the base class `tf.Module`.
        if name.startswith("__") or (is_importing and name == "Module"):
            raise AttributeError(name)
        _remove()
        return getattr(importlib.import_module(self.__name__), name)


def _remove():
    for name in _MODULES:
        if isinstance(sys.modules.get(name), _LateModule):
            del sys.modules[name]


def _executing_eagerly():
    return importlib.import_module(_MODULES[0]).executing_eagerly()


@contextlib.contextmanager
def tensorflow_on_demand() -> Iterator[None]:
    """Context in which importing TensorFlow and TensorFlow Text loads neither."""
    for name in _MODULES[:2]:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        # A leftover empty folder has no file.
        if spec is None or spec.origin is None:
            yield
            return
    modules = {name: _LateModule(name) for name in _MODULES}
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    # KerasHub looks whether it has this one.
    modules["tensorflow"].executing_eagerly = _executing_eagerly  # pyright: ignore
    sys.modules.update(modules)
    try:
        yield
    finally:
        _remove()
