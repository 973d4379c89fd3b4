"""The import of Keras, which needs an installed backend."""


def import_keras() -> None:
    """Imports Keras."""
    try:
        import keras  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "tensorflow", "torch"):
            raise
        raise ImportError(
            "Expected an installed backend of Keras, which takes TensorFlow unless the "
            'environment says otherwise: pip install "keras-moe[jax]" and set '
            "KERAS_BACKEND=jax (or tensorflow, torch) before Keras is imported; "
            f"received: no module {error.name!r}"
        ) from error
