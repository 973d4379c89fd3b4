"""Vision mixture-of-experts for Keras 3, on JAX, TensorFlow and PyTorch."""

import importlib
import sys
from pathlib import PurePath

from keras_moe._version import __version__


def import_keras() -> None:
    """Imports Keras, which needs an installed backend."""
    try:
        import keras  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "tensorflow", "torch"):
            raise
        raise ImportError(
            "Expected an installed backend of Keras, which is TensorFlow unless the "
            'environment names another: pip install "keras-moe[jax]" and set '
            "KERAS_BACKEND=jax (or tensorflow, torch) before Keras is imported; "
            f"received: no module {error.name!r}"
        ) from error


def _is_program() -> bool:
    """Whether this process is `keras-moe`, which prints help without Keras."""
    script = PurePath(next(iter(sys.argv), "")).name
    return script in ("keras-moe", "keras-moe.exe") or "keras_moe.cli" in sys.orig_argv


if not _is_program():
    import_keras()
    from keras_moe import layers, losses, ops, routers

_CORE = ("layers", "losses", "ops", "routers")
# Imported at first use, since they need KerasHub, tf.data or matplotlib.
_LAZY = (
    "analysis",
    "data",
    "distribution",
    "evaluation",
    "models",
    "report",
    "training",
)

__all__ = [*_LAZY, "__version__", "layers", "losses", "ops", "routers"]


def __getattr__(name: str):
    if name in (*_CORE, *_LAZY):
        return importlib.import_module(f"keras_moe.{name}")
    raise AttributeError(f"module 'keras_moe' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
