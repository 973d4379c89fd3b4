"""Checks arrays and labels before `fit`, `evaluate` and `predict`. Axes: B batch.

Models implement `_check_inputs(inputs, labels)`. Datasets are not read ahead: their
batches are seen on the way to a step, the first by all checks.
"""

import contextlib
import contextvars
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_moe._backends.tensorflow import is_iterator, peeked
from keras_moe._checks import check_class_labels, fits_shape, outer_stack_level, unfit
from keras_moe._compat import ONE_AT_A_TIME
from keras_moe._types import KerasModel
from keras_moe.losses import SigmoidCrossentropy, SparseSigmoidCrossentropy


def check_labels(labels: object, num_classes: int, loss: object) -> None:
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
            expected = "integer labels of shape (batch,) or (batch, 1)"
            raise unfit(expected, f"shape={labels.shape}")
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
        if labels.size and not (labels.min() >= 0 and labels.max() <= 1):
            expected = "labels in [0, 1] for each image and class"
            raise unfit(expected, f"{labels.min()} to {labels.max()}")


def checking_labels(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step that checks the labels of each batch."""
    # JAX would give an unknown class no loss. TensorFlow reads batches in its graph,
    # and raises an error of its own.
    if keras.backend.backend() == "tensorflow":
        return step

    def checked(batch):
        _, labels, _ = keras.utils.unpack_x_y_sample_weight(batch)
        if labels is not None and hasattr(model, "check_labels"):
            model.check_labels(labels)
        return batch

    def checked_step(*args):
        # PyTorch's step takes a list of batches, JAX's an iterator.
        batches = map(checked, args[-1])
        batches = [*batches] if isinstance(args[-1], list) else batches
        return step(*args[:-1], batches)

    return checked_step


def array_values(value: object) -> np.ndarray | None:
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


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) or ops.is_tensor(value)


def check_inputs(model: KerasModel, inputs: object, owner: object = None) -> None:
    """Checks the shapes of input arrays; `owner` has the backbone, if not `model`."""
    symbolic_inputs = tree.flatten(model.input)
    if any(symbolic.name == "grids" for symbolic in symbolic_inputs):
        _check_patches(owner or model, inputs)
    if not isinstance(inputs, dict):
        inputs = {symbolic_inputs[0].name: inputs} if len(symbolic_inputs) == 1 else {}
    for symbolic in symbolic_inputs:
        _check_shape(symbolic.name, inputs.get(symbolic.name), symbolic.shape[1:])


def _check_patches(model, inputs):
    most = getattr(model, "backbone", model).max_patches
    if not isinstance(inputs, dict):
        if is_array(inputs):
            expected = "a dict of patches and grids, as pad_patches makes it"
            raise unfit(expected, shape=tuple(inputs.shape))
        return
    patches: Any = inputs.get("patches")
    grids = array_values(inputs.get("grids"))
    longest = patches.shape[1] if is_array(patches) and patches.ndim == 3 else most
    if longest > most:
        raise unfit(f"at most max_patches={most}", shape=tuple(patches.shape))
    if grids is None or grids.ndim != 2 or grids.shape[1] != 2 or not grids.size:
        return
    if is_array(patches) and len(patches) != len(grids):
        expected = f"a grid for each of {len(patches)} images"
        raise unfit(expected, f"{len(grids)} grids")
    fits = (grids.min(axis=1) > 0) & (grids.max(axis=1) <= longest)
    fits &= grids.astype("float64").prod(axis=1) <= longest
    if grids.dtype.kind not in "iu" or not fits.all():
        expected = f"grids, integers whose products are from 1 to {longest} patches"
        raise unfit(expected, grid=grids[np.argmin(fits)].tolist())


def check_prediction(model: Any, inputs: object) -> None:
    if inputs is None:
        raise ValueError("Expected images or a dataset of them; received: None")
    model._check_inputs(inputs)


def has_no_examples(inputs: Any) -> bool:
    values = inputs.values() if isinstance(inputs, dict) else [inputs]
    return any(is_array(x) and tuple(x.shape)[:1] == (0,) for x in values)


def outputs_of_none(model: KerasModel) -> Any:
    def empty(symbolic):
        # Sizes that vary between batches become 0, too.
        shape = (0, *(size or 0 for size in symbolic.shape[1:]))
        return ops.convert_to_numpy(ops.zeros(shape, symbolic.dtype))

    return tree.map_structure(empty, model.output)


def _check_shape(name, value, expected):
    """Raises ValueError for another shape; None matches any size."""
    if not is_array(value):
        return
    shape = tuple(value.shape)
    if not shape or not fits_shape(shape[1:], expected):
        expected = f"{name} of shape (batch, {', '.join(map(str, expected))})"
        raise unfit(expected, shape=shape)


def check_batch(model: Any, batch: object) -> None:
    """Looks at the first batch of a call, whatever it comes from."""
    if batch is None:
        return
    inputs, labels, _ = keras.utils.unpack_x_y_sample_weight(batch)
    on_tensorflow = keras.backend.backend() == "tensorflow"
    if on_tensorflow and labels is not None and hasattr(model, "check_labels"):
        # Elsewhere `checking_labels` has those of every batch.
        model.check_labels(labels)
    if any(symbolic.name == "grids" for symbolic in tree.flatten(model.input)):
        _check_patches(model, inputs)
    token_ids = inputs.get("token_ids") if isinstance(inputs, dict) else None
    vocabulary_size = getattr(model.backbone, "vocabulary_size", None)
    if vocabulary_size is not None:
        _check_ids(array_values(token_ids), vocabulary_size)
    warn_of_raw_pixels(model, inputs)


def warn_of_raw_pixels(model: KerasModel, inputs: Any) -> None:
    """Warns once of pixels from 0 to 255, where a model expects [-1, 1]."""
    names = [symbolic.name for symbolic in tree.flatten(model.input)]
    name = "patches" if "patches" in names else "images"
    images: Any = inputs.get(name) if isinstance(inputs, dict) else inputs
    if name not in names or (images is inputs and len(names) > 1):
        return
    if getattr(model, "_has_warned_of_pixels", False) or not is_array(images):
        return
    if len(images.shape) != (4 if name == "images" else 3):
        return
    # A few pixels of a few images, since they may be on a device.
    step = max(1, images.shape[1] // 64)
    pixels = array_values(images[:8, ::step, :: step if name == "images" else 1])
    if pixels is None or not pixels.size:
        return
    is_float = pixels.dtype.kind not in "biu"
    low, high = pixels.min(), pixels.max()
    size = np.abs(pixels.astype("float32"))
    # Standardised images have single pixels far from 0, but are about 1 on average.
    if high <= 1 or (is_float and not (size.max() > 16 and size.mean() > 2)):
        return
    object.__setattr__(model, "_has_warned_of_pixels", True)
    warnings.warn(
        f"Expected images in [-1, 1]; received {pixels.dtype} pixels from {low:g} to "
        f"{high:g}. For pixels from 0 to 255 use images / 127.5 - 1, in a tf.data "
        "pipeline dataset.map(lambda images, labels: (images / 127.5 - 1, labels)).",
        stacklevel=outer_stack_level(),
    )


def check_texts(
    inputs: object,
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
    if len({value.shape for value in arrays.values()}) > 1:
        shapes = {name: value.shape for name, value in arrays.items()}
        raise ValueError(f"Expected inputs of one shape; received: {shapes}")
    for name, x in arrays.items():
        if x.ndim != 2 or x.dtype.kind not in "biu" or not 0 < x.shape[1] <= max_length:
            raise ValueError(
                f"Expected {name} to be integers of shape (batch, num_tokens), with "
                f"at least one token and at most max_length={max_length}; received: "
                f"shape={x.shape}, dtype={x.dtype}"
            )
    token_ids, mask = arrays.get("token_ids"), arrays.get("padding_mask")
    _check_ids(token_ids, vocabulary_size)
    if mask is not None and mask.dtype.kind == "i" and mask.size and mask.min() < 0:
        raise unfit("a padding_mask without negative numbers", mask.min())
    if mask is None or may_be_empty:
        return
    fits, needed = mask.astype(bool), "a token that is no padding"
    if token_ids is not None and end_of_text_id is not None:
        fits &= token_ids == end_of_text_id
        needed = f"the token end_of_text_id={end_of_text_id}"
    if not fits.any(axis=1).all():
        expected = f"{needed} in each text"
        raise unfit(expected, f"text {np.argmin(fits.any(axis=1))} without")


def _check_ids(token_ids, vocabulary_size):
    if token_ids is None:
        return
    fits = (token_ids >= 0) & (token_ids < vocabulary_size)
    if not fits.all():
        expected = f"token ids from 0 to vocabulary_size - 1 = {vocabulary_size - 1}"
        raise unfit(expected, token_ids[~fits][0])


def check_input_names(inputs: dict, names: tuple[str, ...]) -> None:
    """Raises ValueError on other names, which Keras would match by sorted order."""
    if set(inputs) != set(names):
        raise unfit(f"a dict of {', '.join(names)} alone", sorted(inputs))


# The first batch of a call


# The steps whose first batch was looked at. None outside `fit`, `evaluate`, `predict`.
_looked_at: contextvars.ContextVar[set | None] = contextvars.ContextVar(
    "looked_at", default=None
)


@contextlib.contextmanager
def one_call(seen: tuple[str, ...] = ()) -> Iterator[None]:
    """Looks at the first batch of each step but those that are `seen`."""
    if _looked_at.get() is not None:
        yield
        return
    token = _looked_at.set({*seen})
    try:
        yield
    finally:
        _looked_at.reset(token)


def make_step(
    model: KerasModel, name: str, make: Callable[[bool], Any], force: bool
) -> object:
    """Creates a step that looks at its first batch."""
    with ONE_AT_A_TIME:
        before = getattr(model, name)
        made = make(force)
        function = getattr(model, name)
        is_new = function is not before
        if is_new and name != "predict_function":
            function = checking_labels(model, function)
            setattr(model, name, function)
        # A call that ended before its first step left its wrapper.
        function = getattr(function, "inner", function)
        looked_at = _looked_at.get()
        if looked_at is not None:
            is_new = looked_at.isdisjoint((name, id(function)))
            looked_at.add(id(function))
        # Outside of a call, only the first batch of all.
        if not is_new:
            return made

        def first_step(*args):
            if getattr(model, name) is not first_step:
                # Another thread was first.
                return function(*args)
            setattr(model, name, function)
            batch, data = _peeked(args[-1], model.steps_per_execution)
            check_batch(model, batch)
            return function(*args[:-1], data)

        first_step.inner = first_step.__wrapped__ = function
        setattr(model, name, first_step)
    return made


def _peeked(data, steps):
    """The first batch of what a step gets, and the same data, not yet read."""
    if isinstance(data, (list, tuple)):
        return data[0], data
    if is_iterator(data):
        return peeked(data, steps)
    for batch in data if isinstance(data, Iterator) else ():
        return batch, itertools.chain([batch], data)
    return None, data
