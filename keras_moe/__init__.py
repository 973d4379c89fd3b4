"""Vision mixture-of-experts for Keras 3, on JAX, TensorFlow and PyTorch."""

import importlib
import sys

from keras_moe._version import __version__
from keras_moe.backend import import_keras


def _is_for_programs() -> bool:
    """Whether `keras_moe.cli` is imported, which prints help before Keras is there.

    Python imports this package first, and only the frames of that import know the name
    that was asked for. `python -m keras_moe.cli` has it among its arguments.
    """
    if "keras_moe.cli" in sys.orig_argv:
        return True
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            name = frame.f_locals.get("name")
            if isinstance(name, str) and f"{name}.".startswith("keras_moe.cli."):
                return True
        frame = frame.f_back
    return False


if not _is_for_programs():
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
