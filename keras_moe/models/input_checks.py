"""Checks inputs and labels before `fit`, `evaluate` and `predict`.

Checks the shapes of arrays and the labels of classifiers; datasets and generators are
not read ahead. Models implement `_check_inputs(inputs, labels)`, called through
`check_training` and `check_prediction`.

Axes: B batch.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_moe.checks import check_class_labels, check_integer
from keras_moe.losses import SigmoidCrossentropy, SparseSigmoidCrossentropy


def check_images(images: Any, image_shape: tuple) -> None:
    _check_shape("images", images, image_shape)
    dtype = str(getattr(images, "dtype", ""))
    if "complex" in dtype:
        raise ValueError(f"Expected images of real numbers; received: dtype={dtype}")


def check_multi_labels(labels: Any) -> None:
    """Checks that multi-label targets are in [0, 1]."""
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iuf":
        return
    fits = (labels >= 0) & (labels <= 1)
    if not fits.all():
        raise ValueError(
            "Expected labels in [0, 1] for each image and class; "
            f"received: {labels[~fits].ravel()[0]}"
        )


def check_labels(labels: Any, num_classes: int, loss: Any) -> None:
    """Checks class indices or 0-1 targets, whichever the loss implies."""
    several, losses = tree.flatten(labels), tree.flatten(loss)
    if len(several) != 1 or len(losses) != 1:
        return
    labels, loss = array_values(several[0]), losses[0]
    if labels is None:
        return
    sparse = keras.losses.SparseCategoricalCrossentropy
    if isinstance(loss, sparse) or loss == "sparse_categorical_crossentropy":
        if labels.ndim != 1 and (labels.ndim != 2 or labels.shape[1] != 1):
            raise ValueError(
                "Expected integer labels of shape (batch,) or (batch, 1); received: "
                f"shape={labels.shape}"
            )
        check_class_labels(labels, num_classes, getattr(loss, "ignore_class", None))
    if isinstance(loss, SparseSigmoidCrossentropy):
        check_class_labels(labels, num_classes, ignored=-1)
        return
    multi = (SigmoidCrossentropy, keras.losses.BinaryCrossentropy)
    if isinstance(loss, multi) or loss == "binary_crossentropy":
        # With one class Keras also accepts (batch,).
        if labels.shape[-1:] != (num_classes,) and (num_classes, labels.ndim) != (1, 1):
            raise ValueError(
                f"Expected labels of shape (batch, {num_classes}), one for each image "
                f"and class; received: shape={labels.shape}"
            )
        check_multi_labels(labels)


def array_values(value: Any) -> np.ndarray | None:
    """Returns an array or tensor as NumPy, or None if it has no values."""
    if isinstance(value, np.ndarray):
        return value
    if not ops.is_tensor(value):
        return None
    try:
        return np.asarray(ops.convert_to_numpy(value))
    except (NotImplementedError, RuntimeError, TypeError):
        # Tensors that are being traced or sharded over processes.
        return None


def is_array(value: Any) -> bool:
    """Whether `value` is a NumPy array or a backend's tensor."""
    return isinstance(value, np.ndarray) or ops.is_tensor(value)


def check_inputs(model: keras.Model, inputs: Any) -> None:
    """Checks input arrays, and warns once about images in 0..255."""
    for symbolic, value in _symbolic_inputs(model, inputs):
        shape = tuple(symbolic.shape[1:])
        if symbolic.name == "images":
            check_images(value, shape)
            _warn_of_bytes(model, value)
        else:
            _check_shape(symbolic.name, value, shape)


def check_training(
    model: keras.Model, inputs: Any, labels: Any, validation_data: Any = None
) -> None:
    model._check_inputs(inputs, labels)
    for name, value in _arrays(inputs):
        if tuple(value.shape)[:1] == (0,):
            # The mean over no examples is undefined.
            example = "image" if name == "images" else "example"
            raise ValueError(
                f"Expected at least one {example} to train or evaluate on; received: "
                f"shape={tuple(value.shape)}"
            )
    if isinstance(validation_data, (tuple, list)):
        model._check_inputs(*validation_data[:2])


def check_prediction(model: keras.Model, inputs: Any) -> None:
    if inputs is None:
        raise ValueError("Expected images or a dataset of them; received: None")
    model._check_inputs(inputs)


def has_no_examples(inputs: Any) -> bool:
    """Whether the inputs are arrays with batch size 0."""
    return any(value.shape[0] == 0 for _, value in _arrays(inputs))


def outputs_of_none(model: keras.Model) -> Any:
    """Returns the outputs for an empty batch, as NumPy arrays."""

    def empty(symbolic):
        # Sizes that vary between batches become 0, too.
        shape = (0, *(size or 0 for size in symbolic.shape[1:]))
        return ops.convert_to_numpy(ops.zeros(shape, symbolic.dtype))

    return tree.map_structure(empty, model.output)


def _symbolic_inputs(model, inputs) -> Iterator[tuple[keras.KerasTensor, Any]]:
    """Yields symbolic inputs with their values, where known."""
    symbolic = tree.flatten(model.input)
    if isinstance(inputs, dict):
        yield from ((x, inputs[x.name]) for x in symbolic if x.name in inputs)
    elif len(symbolic) == 1:
        yield symbolic[0], inputs


def _arrays(inputs) -> Iterator[tuple[str, Any]]:
    named = inputs if isinstance(inputs, dict) else {"images": inputs}
    yield from ((name, value) for name, value in named.items() if is_array(value))


def _check_shape(name, value, expected):
    """Raises ValueError for another shape; None matches any size."""
    if not is_array(value):
        return
    shape = tuple(value.shape)
    if len(shape) != 1 + len(expected) or any(
        size not in (None, received) for size, received in zip(expected, shape[1:])
    ):
        raise ValueError(
            f"Expected {name} of shape (batch, {', '.join(map(str, expected))}); "
            f"received: shape={shape}"
        )


def _warn_of_bytes(model, images):
    """Warns once about images in 0..255, where the model expects [-1, 1]."""
    if getattr(model, "_has_warned_of_bytes", False) or not is_array(images):
        return
    if keras.backend.standardize_dtype(images.dtype) != "uint8":
        return
    images = array_values(images)
    if images is not None and images.size and images.max() > 1:
        object.__setattr__(model, "_has_warned_of_bytes", True)
        warnings.warn(
            "Expected images in [-1, 1]; received uint8 images up to "
            f"{images.max()}. Use images / 127.5 - 1.",
            # Point to the caller of `fit`.
            stacklevel=6,
        )


def check_texts(
    inputs: Any,
    vocabulary_size: int,
    max_length: int,
    names: tuple[str, ...] = ("token_ids", "padding_mask"),
    end_of_text_id: int | None = None,
    may_be_empty: bool = False,
) -> None:
    """Checks token ids and padding masks, where their values are known."""
    if not isinstance(inputs, dict):
        return
    check_input_names(inputs, names)
    arrays = {name: array_values(inputs[name]) for name in names}
    arrays = {name: value for name, value in arrays.items() if value is not None}
    for name, value in arrays.items():
        _check_array(name, value, max_length)
    if len({value.shape for value in arrays.values()}) > 1:
        shapes = {name: value.shape for name, value in arrays.items()}
        raise ValueError(f"Expected inputs of one shape; received: {shapes}")
    token_ids, mask = arrays.get("token_ids"), arrays.get("padding_mask")
    if token_ids is not None:
        _check_ids(token_ids, check_integer("vocabulary_size", vocabulary_size))
    if mask is None or may_be_empty:
        return
    mask = mask.astype(bool)
    _check_each(mask.any(axis=1), "a token that is no padding")
    if token_ids is not None and end_of_text_id is not None:
        ends = (mask & (token_ids == end_of_text_id)).any(axis=1)
        _check_each(ends, f"the token end_of_text_id={end_of_text_id}")


def check_input_names(inputs: dict, names: tuple[str, ...]) -> None:
    """Raises ValueError unless a dict has exactly the model's inputs.

    Keras would silently match values by sorted names.
    """
    if missing := [name for name in names if name not in inputs]:
        raise ValueError(
            f"Expected a dict of {', '.join(names)}; received: none of {missing}, but "
            f"{sorted(inputs)}"
        )
    if unknown := sorted(set(inputs) - set(names)):
        raise ValueError(
            f"Expected a dict of {', '.join(names)} alone; received: {unknown}, too"
        )


def _check_array(name, value, max_length):
    if value.ndim != 2 or value.dtype.kind not in "biu":
        raise ValueError(
            f"Expected {name} to be integers of shape (batch, num_tokens); received: "
            f"shape={value.shape}, dtype={value.dtype}"
        )
    if value.shape[1] == 0:
        raise ValueError(
            f"Expected texts of at least one token; received: {name}.shape="
            f"{value.shape}"
        )
    if value.shape[1] > max_length:
        raise ValueError(
            f"Expected texts of at most max_length={max_length} tokens; received: "
            f"{name}.shape={value.shape}"
        )


def _check_ids(token_ids, vocabulary_size):
    fits = (token_ids >= 0) & (token_ids < vocabulary_size)
    if not fits.all():
        raise ValueError(
            "Expected token ids from 0 to vocabulary_size - 1 = "
            f"{vocabulary_size - 1}; received: {token_ids[~fits][0]}"
        )


def _check_each(fits, what):
    """Raises ValueError unless `fits` holds for every text."""
    if not fits.all():
        raise ValueError(
            f"Expected {what} in each text; received: text {np.argmin(fits)} without"
        )
