"""Pads batches for several devices. Axes: B batch, N examples, M with padding."""

from typing import Any

import keras
import numpy as np

from keras_moe._checks import check_integer, unfit
from keras_moe._processes import batch_devices, checked_all_gather, process_count
from keras_moe.data._packages import tf


def padded(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    num_examples: int | None = None,
    model: keras.Model | None = None,
) -> Any:
    """Pads to full batches for `evaluate` and `validation_data`.

    Fills the last batch with copies of its last example of weight 0, so that it divides
    evenly over devices. Keras averages losses over B, so real examples get weight M /
    N, which makes the epoch's loss that of the N examples. `weighted_metrics` that
    average are exact, too, but `TruePositives` and the like count M / N per example.
    Plain `metrics` would count padding: they are rejected if `model` is given. A
    `ContrastiveModel` compares pairs in other batches than without padding.

    Padding changes no prediction, except that with `evaluation="official"` it competes
    for capacity within its group. Batches are `(images, labels, float32 weights)`, or
    `(images,)` without labels.

    Args:
        x: images or a structure of arrays; or a `tf.data.Dataset` of batches `(images,
            labels)` or `(images, labels, sample_weight)` of any size.
        y: labels, if `x` is arrays.
        sample_weight: (N,) weights, if `x` is arrays.
        batch_size: B, a multiple of the number of devices; by default the dataset's, or
            at most 32 for arrays, rounded up to one. Each process gives its own
            examples.
        num_examples: N of a dataset; None reads it once to count.
        model: model whose compiled metrics are checked.

    Example:

    >>> from keras_moe.data import padded
    >>> batches = padded(np.zeros((5, 2, 2, 3)), np.arange(5), batch_size=4)
    >>> _, (images, labels, weights) = batches.as_numpy_iterator()
    >>> images.shape, labels.tolist(), weights.round(2).tolist()
    ((4, 2, 2, 3), [4, 4, 4, 4], [1.600000023841858, 0.0, 0.0, 0.0])
    """
    config: Any = model.get_compile_config() if model else {}
    metrics = config.get("metrics")
    if metrics:
        raise ValueError(
            "Expected a model compiled with weighted_metrics=... instead of "
            "metrics=..., which read no weights and would count padding; received: "
            f"metrics={metrics}"
        )
    return _padded(x, y, sample_weight, batch_size, num_examples)[0]


def predictions(
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    num_examples: int | None = None,
    **kwargs: Any,
) -> Any:
    """Predicts N examples on several devices and removes the padding.

    Args:
        model: any model.
        x: images or dataset; see `padded`.
        batch_size: B; see `padded`.
        num_examples: N; see `padded`.
        **kwargs: arguments of `keras.Model.predict`.

    Example:

    >>> from keras_moe.data import predictions
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    >>> predictions(model, np.ones((5, 2)), batch_size=4, verbose=0).shape
    (5, 3)
    """
    if process_count() > 1:
        raise ValueError(
            "Expected one process: Keras reads outputs that none of several has as a "
            f"whole; received: {process_count()} processes"
        )
    batches, length = _padded(x, None, None, batch_size, num_examples)
    outputs = model.predict(batches, **kwargs)
    return keras.tree.map_structure(lambda output: output[:length], outputs)


def _padded(x, y, sample_weight, batch_size, num_examples):
    """Returns full batches, with padding after all examples, and N."""
    if isinstance(x, tf.data.Dataset):
        if y is not None or sample_weight is not None:
            raise ValueError(
                "Expected neither y nor sample_weight with a dataset, which has its own"
            )
        if x.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise unfit("a dataset with an end", "one that repeats")
        if num_examples is None:
            sizes = x.map(lambda *batch: _size(batch))
            num_examples = int(sizes.reduce(np.int64(0), lambda x, size: x + size))
    else:
        if y is None and sample_weight is not None:
            raise ValueError("Expected y with sample_weight; received: y=None")
        arrays = tuple(part for part in (x, y, sample_weight) if part is not None)
        num_examples = len(keras.tree.flatten(x)[0])
        x = tf.data.Dataset.from_tensor_slices(arrays).batch(32)
    # Each process gives the batches of its own devices.
    devices = max(batch_devices() // process_count(), 1)
    if batch_size is None:
        batch_size = next(int(size) for size in x.map(lambda *b: _size(b)))
        batch_size = -(-batch_size // devices) * devices
    if check_integer("batch_size", batch_size) % devices:
        expected = f"a multiple of the {devices} devices that share a batch"
        raise unfit(expected, batch_size=batch_size)
    return _filled(x, int(batch_size), num_examples), num_examples


def _filled(dataset, batch_size, num_examples):
    own_batches = -(-num_examples // batch_size)
    counts = checked_all_gather(lambda: [own_batches, num_examples])
    # Each process makes as many steps as the one with the most batches.
    num_batches = max(batches for batches, _ in counts)
    total = sum(examples for _, examples in counts)
    scale = num_batches * batch_size * len(counts) / total

    def fill_batch(*batch):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        size = _size(batch)

        def fill(array):
            padding = tf.repeat(array[-1:], batch_size - size, axis=0)
            array = tf.concat([array, padding], axis=0)
            return tf.ensure_shape(array, (batch_size, *array.shape[1:]))

        x = tf.nest.map_structure(fill, x)
        if y is None:
            return (x,)
        weights = tf.ones([size]) if weights is None else tf.cast(weights, "float32")
        is_real = tf.range(batch_size, dtype=tf.int64) < size
        is_real = tf.reshape(is_real, [-1] + [1] * (weights.shape.rank - 1))
        weights = fill(weights) * tf.cast(is_real, "float32") * scale
        return x, tf.nest.map_structure(fill, y), weights

    dataset = dataset.rebatch(batch_size).map(
        fill_batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    if num_batches > own_batches:
        weightless = dataset.take(1).map(
            lambda x, *rest: (x, *rest[:1], *(0.0 * weights for weights in rest[1:]))
        )
        dataset = dataset.concatenate(weightless.repeat(num_batches - own_batches))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(num_batches))
    return dataset.prefetch(tf.data.AUTOTUNE)


def _size(batch):
    return tf.shape(keras.tree.flatten(batch)[0], out_type=tf.int64)[0]
