"""The backend and the versions that results come from."""

import importlib
from typing import Any

import keras

import keras_moe


def backend_and_versions() -> dict[str, Any]:
    """The backend, and the versions of this library, Keras and the backend."""
    backend = keras.backend.backend()
    return {
        "backend": backend,
        "versions": {
            "keras_moe": keras_moe.__version__,
            "keras": keras.__version__,
            backend: importlib.import_module(backend).__version__,
        },
    }
