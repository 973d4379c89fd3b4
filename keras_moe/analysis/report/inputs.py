"""Checks of what data brings: images, labels, and texts of others.

Axes: B batch, U classes, L labels of an image.
"""

import re
from typing import Any

import keras
import numpy as np

# Images of models without a preprocessor are in [-1, 1], and standardised ones reach a
# few times as far; those in 0..255 reach hundreds.
_FAR = 32.0
# Floats from here on do not tell whole numbers apart.
_WHOLE = 2.0**53
# No encoding of a file has halves of a pair of code units.
_SURROGATES = re.compile("[\ud800-\udfff]")


def array_of(x: Any) -> np.ndarray:
    """An array or tensor of any backend as a NumPy array."""
    return np.asarray(keras.ops.convert_to_numpy(x) if keras.ops.is_tensor(x) else x)


def plain_text(text: Any) -> str:
    """A text that files and pictures can hold."""
    if isinstance(text, bytes):
        return text.decode("utf-8", "replace")
    if not isinstance(text, str):
        raise ValueError(
            f"Expected texts; received: {text!r:.80}, {type(text).__name__}"
        )
    return _SURROGATES.sub("\ufffd", text)


def shortened(text: str, most: int = 300) -> str:
    """A text for the page, which a long one would make large."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def captions_of(captions: Any) -> list[str]:
    """Captions as strings."""
    # Strings of TensorFlow become bytes.
    captions = captions.numpy() if hasattr(captions, "numpy") else captions
    if isinstance(captions, (str, bytes)) or not hasattr(captions, "__iter__"):
        raise ValueError(
            f"Expected captions as a list of texts; received: {captions!r:.80}, "
            f"{type(captions).__name__}"
        )
    return [plain_text(caption) for caption in captions]


def labels_of(labels: Any) -> np.ndarray | None:
    """The class of each example."""
    if labels is None or isinstance(labels, dict):
        return None
    labels = array_of(labels)
    kind = labels.dtype.kind
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 1 and kind in "iub":
        return labels.astype("int64")
    if labels.ndim == 1 and kind == "f":
        # Those that are not finite differ from themselves, or are too large.
        if ((labels == np.round(labels)) & (np.abs(labels) < _WHOLE)).all():
            return labels.astype("int64")
    elif labels.ndim == 2 and kind in "iubf":
        if ((labels == 0) | (labels == 1)).all():
            is_single = (labels == 1).sum(axis=1) == 1
            return np.where(is_single, labels.argmax(axis=1), -1)
        if kind == "i" and labels.min() >= -1:
            is_single = (labels >= 0).sum(axis=1) == 1
            return np.where(is_single, labels.max(axis=1), -1)
    raise ValueError(
        "Expected labels as whole numbers (batch,), or as 0-1 vectors (batch, "
        "classes), none of them soft; received: "
        f"shape={labels.shape}, dtype={labels.dtype}"
    )


def check_inputs(inputs: Any, model: Any) -> None:
    """Raises ValueError for inputs of other names, shapes or ranges than the model's.

    On JAX a failed prediction would leave the model without its weights.
    """
    expected = model.input
    if not isinstance(expected, dict):
        expected = {"images": expected}
        inputs = inputs if isinstance(inputs, dict) else {"images": inputs}
    elif not isinstance(inputs, dict):
        inputs = {"images": inputs}
    for name, symbol in expected.items():
        if name not in inputs:
            raise ValueError(
                f"Expected {' and '.join(expected)}, an array or in a dict; received: "
                f"a dict of {sorted(map(str, inputs))}"
            )
        shape = tuple(inputs[name].shape)
        fits = len(shape) == len(symbol.shape) and all(
            size in (None, actual) for size, actual in zip(symbol.shape, shape)
        )
        if not fits:
            wanted = ", ".join(str(x or "any") for x in symbol.shape[1:])
            raise ValueError(
                f"Expected {name} of shape (batch, {wanted}); received: shape={shape}"
            )
    if "images" in expected:
        _check_range(inputs["images"], getattr(model, "preprocessor", None))


def _check_range(images, preprocessor):
    """Raises ValueError for images that nobody has prepared for the model."""
    if not images.size:
        return
    is_float = images.dtype.kind not in "iub"
    with np.errstate(invalid="ignore"):
        low, high = images.min(), images.max()
        if not np.isfinite([low, high]).all():
            images = images[np.isfinite(images)]
            low, high = images.min(initial=0.0), images.max(initial=0.0)
    if is_float and max(-low, high) <= _FAR * _largest(preprocessor):
        return
    raise ValueError(
        "Expected floating-point images that are prepared for the model, in [-1, 1] as "
        "keras_moe.data.load, images / 127.5 - 1 or the model's ImagePreprocessor "
        f"gives them; received: dtype={images.dtype}, from {low} to {high}"
    )


def _largest(preprocessor):
    """The largest number that a preprocessor makes of pixels, 1 without one."""
    mean, std = (getattr(preprocessor, name, None) for name in ("mean", "std"))
    if mean is None or std is None:
        return 1.0
    mean = np.asarray(mean, "float64")
    return max(float((np.maximum(mean, 1.0 - mean) / np.asarray(std)).max()), 1.0)
