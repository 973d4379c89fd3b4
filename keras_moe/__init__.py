"""Vision mixture-of-experts for Keras 3, on JAX, TensorFlow and PyTorch."""

import importlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from keras_moe import _triton_first
from keras_moe._version import __version__

# The content of `keras.json` until a user changes it.
WRITTEN_BY_KERAS = {
    "floatx": "float32",
    "epsilon": 1e-07,
    "backend": "tensorflow",
    "image_data_format": "channels_last",
}


def choose_backend() -> None:
    """Sets KERAS_BACKEND by an edited `keras.json`, or to an installed backend."""
    if "keras" in sys.modules or "KERAS_BACKEND" in os.environ:
        return
    # Keras's own default is TensorFlow, which KerasHub installs for every backend.
    installed = filter(find_spec, ("jax", "torch", "tensorflow"))
    os.environ["KERAS_BACKEND"] = configured_backend() or next(installed, "jax")


def configured_backend() -> str | None:
    """The backend the user chose in `keras.json`; None for Keras's own file."""
    folder = os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")
    path = Path(folder).expanduser() / "keras.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return None
    if not isinstance(config, dict) or config == WRITTEN_BY_KERAS:
        return None
    backend = config.get("backend")
    return backend if isinstance(backend, str) else None


def import_keras() -> None:
    """Imports Keras, which needs an installed backend."""
    choose_backend()
    try:
        import keras  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "tensorflow", "torch"):
            raise
        from keras_moe._errors import install

        raise ImportError(
            f"Expected an installed backend of Keras: {install('jax')}, and set "
            "KERAS_BACKEND=jax (or tensorflow, torch) before Keras is imported; "
            f"received: no module {error.name!r}"
        ) from error


def _is_program() -> bool:
    """Whether this process is `keras-moe`, which prints help without Keras."""
    script = PurePath(next(iter(sys.argv), "")).name
    return script in ("keras-moe", "keras-moe.exe") or "keras_moe.cli" in sys.orig_argv


_triton_first.install()
if not _is_program():
    import_keras()
    from keras_moe import layers, losses, ops, routers

if TYPE_CHECKING:
    from keras_moe import (
        analysis,
        data,
        distribution,
        evaluation,
        models,
        report,
        training,
    )

# Imported at first use, unless above: most need KerasHub, tf.data or matplotlib.
__all__ = [
    "__version__", "analysis", "data", "distribution", "evaluation", "layers", "losses",
    "models", "ops", "report", "routers", "training",
]  # fmt: skip


def __getattr__(name: str):
    if name in __all__:
        return importlib.import_module(f"keras_moe.{name}")
    raise AttributeError(f"module 'keras_moe' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
