"""Checks of images and labels before a model's `fit`, `evaluate` and `predict`.

Axes: B batch.
"""

import warnings
from typing import Any

import keras
import keras_hub
import numpy as np
from keras import ops, tree

from keras_moe.checks import check_class_labels
from keras_moe.losses import SigmoidCrossentropy, SparseSigmoidCrossentropy
from keras_moe.models.state_recovery import state_kept


def check_images(images: Any, image_shape: tuple) -> None:
    """Checks the shape of an array of images.

    Args:
        images: an array or tensor; anything else, such as a dataset, passes.
        image_shape: (height, width, channels) of the model.

    Raises:
        ValueError: if the images have another shape.

    Example:

    >>> import numpy as np
    >>> from keras_moe.models.input_checks import check_images
    >>> check_images(np.zeros((2, 8, 8, 3), "float32"), (8, 8, 3))
    """
    if not is_array(images):
        return
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[1:] != tuple(image_shape):
        raise ValueError(
            f"Expected images of shape (batch, {', '.join(map(str, image_shape))}); "
            f"received: shape={shape}"
        )


def check_given(images: Any) -> None:
    """Raises ValueError for None, of which Keras makes an empty dataset."""
    if images is None:
        raise ValueError("Expected images or a dataset of them; received: None")


def check_not_empty(images: Any) -> None:
    """Raises ValueError for an array of no images: a mean over them is undefined."""
    if is_array(images) and tuple(images.shape)[:1] == (0,):
        raise ValueError(
            "Expected at least one image to train or evaluate on; received: "
            f"shape={tuple(images.shape)}"
        )


def check_multi_labels(labels: Any) -> None:
    """Checks a label for each image and class, which is 0, 1 or smoothed.

    Args:
        labels: a NumPy array; anything else passes.

    Raises:
        ValueError: if a label is not in [0, 1].

    Example:

    >>> import numpy as np
    >>> from keras_moe.models.input_checks import check_multi_labels
    >>> check_multi_labels(np.array([[0, 1, 1]]))
    """
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iuf":
        return
    fits = (labels >= 0) & (labels <= 1)
    if not fits.all():
        raise ValueError(
            "Expected labels in [0, 1] for each image and class; "
            f"received: {labels[~fits].ravel()[0]}"
        )


def check_labels(labels: Any, num_classes: int, loss: Any) -> None:
    """Checks the labels of a loss that is known, as integers or by class.

    Args:
        labels: an array or a tensor with values, or a list or dict of one; anything
            else passes.
        num_classes: the number of classes.
        loss: the compiled loss or its name, or a list or dict of one; those of other
            kinds take any labels.

    Raises:
        ValueError: if a label is out of range, or the labels are of another shape.

    Example:

    >>> import numpy as np
    >>> from keras_moe.models.input_checks import check_labels
    >>> check_labels(np.array([0, 2]), 3, "sparse_categorical_crossentropy")
    """
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
        # Of one class Keras takes (batch,), too.
        if labels.shape[-1:] != (num_classes,) and (num_classes, labels.ndim) != (1, 1):
            raise ValueError(
                f"Expected labels of shape (batch, {num_classes}), one for each image "
                f"and class; received: shape={labels.shape}"
            )
        check_multi_labels(labels)


def array_values(value: Any) -> np.ndarray | None:
    """A NumPy array of an array or tensor, or None where there are no values."""
    if isinstance(value, np.ndarray):
        return value
    if not ops.is_tensor(value):
        return None
    try:
        return np.asarray(ops.convert_to_numpy(value))
    except (NotImplementedError, RuntimeError, TypeError):
        # A tensor that is being traced, or parts of which other processes have.
        return None


def is_array(value: Any) -> bool:
    """Whether `value` is a NumPy array or a backend's tensor."""
    return isinstance(value, np.ndarray) or ops.is_tensor(value)


class InputChecksMixin:
    """Images and labels are checked before Keras sees them.

    Arrays are: the shape of the images, and of a classifier the range of its labels.
    Datasets and generators are not looked into ahead. If a call fails all the same, the
    model stays usable on every backend (`state_kept`).

    A class with this mixin has `image_shape`, or a `backbone` that has.
    """

    def fit(
        self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any
    ) -> keras.callbacks.History:
        """Trains the model; see `keras.Model.fit`.

        Arrays of images and labels, those of `validation_data` too, are checked first:
        another shape or labels out of range raise ValueError. Generators,
        `tf.data.Dataset` and the like are not checked ahead.
        """
        self._check_inputs(x, y)
        check_not_empty(x)
        validation = kwargs.get("validation_data")
        if isinstance(validation, (tuple, list)):
            self._check_inputs(*validation[:2])
        with state_kept(self, training=True):
            return super().fit(x, y, *args, **kwargs)

    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The loss and metrics; see `keras.Model.evaluate`, and `fit` for checks."""
        self._check_inputs(x, y)
        check_not_empty(x)
        with state_kept(self):
            return super().evaluate(x, y, *args, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The outputs; see `keras.Model.predict`. No images have empty outputs."""
        check_given(x)
        self._check_inputs(x)
        if is_array(x) and x.shape[0] == 0:
            return self._outputs_of_none()
        with state_kept(self):
            return super().predict(x, *args, **kwargs)

    def train_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """One step of training; see `keras.Model.train_on_batch`, and `fit`."""
        self._check_inputs(x, y)
        check_not_empty(x)
        with state_kept(self, training=True):
            return super().train_on_batch(x, y, *args, **kwargs)

    def test_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Loss and metrics of a batch; see `keras.Model.test_on_batch`, and `fit`."""
        self._check_inputs(x, y)
        check_not_empty(x)
        with state_kept(self):
            return super().test_on_batch(x, y, *args, **kwargs)

    def predict_on_batch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The outputs of a batch; see `keras.Model.predict_on_batch`."""
        check_given(x)
        self._check_inputs(x)
        if is_array(x) and x.shape[0] == 0:
            return self._outputs_of_none()
        with state_kept(self):
            return super().predict_on_batch(x, *args, **kwargs)

    def _check_inputs(self, images: Any, labels: Any = None) -> None:
        # KerasHub's preprocessors make images of the model's size and range of others.
        preprocessor = getattr(self, "preprocessor", None)
        if not isinstance(preprocessor, keras_hub.models.Preprocessor):
            backbone = getattr(self, "backbone", self)
            check_images(images, backbone.image_shape)
            self._warn_of_bytes(images)
        if labels is not None and hasattr(self, "num_classes"):
            check_labels(labels, self.num_classes, getattr(self, "loss", None))

    def _warn_of_bytes(self, images: Any) -> None:
        """Warns once about images in 0..255, where the model expects [-1, 1]."""
        if getattr(self, "_has_warned_of_bytes", False) or not is_array(images):
            return
        if keras.backend.standardize_dtype(images.dtype) != "uint8":
            return
        images = array_values(images)
        if images is not None and images.size and images.max() > 1:
            object.__setattr__(self, "_has_warned_of_bytes", True)
            warnings.warn(
                "Expected images in [-1, 1]; received uint8 images up to "
                f"{images.max()}. Use images / 127.5 - 1.",
                stacklevel=4,
            )

    def _outputs_of_none(self) -> Any:
        """The outputs of a batch without images."""
        return tree.map_structure(
            lambda x: ops.convert_to_numpy(ops.zeros((0, *x.shape[1:]), x.dtype)),
            self.output,
        )
