"""Vision mixture-of-experts for Keras 3, on JAX, TensorFlow and PyTorch."""

import importlib
import sys
from pathlib import PurePath

from keras_moe._version import __version__
from keras_moe.backend import import_keras


def _is_program() -> bool:
    """Whether this process is `keras-moe`, which prints help before Keras is there."""
    script = PurePath(next(iter(sys.argv), "")).name
    return script in ("keras-moe", "keras-moe.exe") or "keras_moe.cli" in sys.orig_argv


if not _is_program():
    import_keras()
    from keras_moe import layers, losses, ops, routers

_CORE = ("layers", "losses", "ops", "routers")
# These need more than Keras (KerasHub, tf.data, matplotlib), so they are imported
# when they are first used.
_LAZY = ("analysis", "data", "distribution", "evaluation", "models", "training")

__all__ = [*_LAZY, "__version__", "layers", "losses", "ops", "routers"]


def __getattr__(name: str):
    if name in (*_CORE, *_LAZY):
        return importlib.import_module(f"keras_moe.{name}")
    raise AttributeError(f"module 'keras_moe' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
