"""Faster versions of Keras's augmentation layers for `tf.data` on CPUs.

On CPUs, TensorFlow is much slower at selecting with a broadcast condition or `tf.where`
than at arithmetic. For the same seed, images equal those of Keras's layers in training.
Remove a class when Keras's layer is as fast.
"""

from typing import Any

import keras

from keras_moe._types import Tensor
from keras_moe.data._packages import tf


class RandomFlip:
    """`keras.layers.RandomFlip("horizontal")` that reverses only the flipped images."""

    def __call__(self, images: Tensor, seed: Tensor) -> Tensor:
        seed = tf.random.experimental.stateless_fold_in(seed, 1)
        if len(images.shape) == 3:
            is_flipped = tf.random.stateless_uniform([], seed) <= 0.5
            return tf.cond(is_flipped, lambda: tf.reverse(images, [1]), lambda: images)
        shape = tf.shape(images)
        is_flipped = tf.random.stateless_uniform([shape[0], 1, 1, 1], seed) <= 0.5
        # TensorFlow is fast at reversing in three dimensions, and at selecting whole
        # images by a vector.
        rows = tf.reshape(images, [-1, shape[2], images.shape[3]])
        return tf.raw_ops.Select(
            condition=tf.reshape(is_flipped, [-1]),
            x=tf.reshape(tf.reverse(rows, [1]), shape),
            y=images,
        )


class CutMix(keras.layers.CutMix):
    """`keras.layers.CutMix` that pastes whole pixels instead of single numbers."""

    def _generate_batch_mask(self, images_shape, box_corners):
        return super()._generate_batch_mask((*images_shape[:3], 1), box_corners)

    def transform_images(self, images, transformation: Any = None, training=True):
        images = tf.cast(images, self.compute_dtype)
        channels = tf.shape(images)[-1]
        others = tf.gather(images, transformation["permutation_order"])
        # TensorFlow is fast at selecting rows by a vector.
        pixels = tf.raw_ops.Select(
            condition=tf.reshape(transformation["batch_masks"][..., 0], [-1]),
            x=tf.reshape(others, [-1, channels]),
            y=tf.reshape(images, [-1, channels]),
        )
        return tf.ensure_shape(tf.reshape(pixels, tf.shape(images)), images.shape)


class Contrast(keras.layers.RandomContrast):
    """`keras.layers.RandomContrast` for pixels in [0, 255], in whole rows."""

    def transform_images(self, images, transformation, training=True):
        factor = transformation["contrast_factor"]
        mean = tf.reduce_mean(images, axis=-3, keepdims=True)
        mean = tf.reduce_mean(mean, axis=-2, keepdims=True)
        mean = _rows(mean, images)
        faded = (_rows(images) - mean) * factor + mean
        return tf.reshape(tf.clip_by_value(faded, 0.0, 255.0), tf.shape(images))


class ScaledSolarization(keras.layers.Solarization):
    """Inverts pixels above a random threshold of at least 256 (1 - magnitude)."""

    def __init__(self, magnitude: float, **kwargs):
        super().__init__(threshold_factor=1.0, **kwargs)
        self.magnitude = magnitude

    def get_random_transformation(self, data, training=True, seed=None):
        drawn: Any = super().get_random_transformation(data, training, seed)
        thresholds = 256 - self.magnitude * (256 - drawn["thresholds"])
        return {**drawn, "thresholds": thresholds}

    def transform_images(self, images, transformation, training=True):
        images = tf.clip_by_value(images + transformation["additions"], 0.0, 255.0)
        is_dark = images < transformation["thresholds"]
        return tf.raw_ops.Select(condition=is_dark, x=images, y=255 - images)


class AutoContrast(keras.layers.AutoContrast):
    """`keras.layers.AutoContrast` in [0, 255], without NaN for flat channels."""

    def transform_images(self, images, transformation=None, training=True):
        rows = _rows(images)

        def extreme(reduce):
            of_columns = tf.reshape(reduce(rows, axis=-3), tf.shape(images[:, 0]))
            return reduce(of_columns, axis=1)[:, None, None]

        low, high = extreme(tf.reduce_min), extreme(tf.reduce_max)
        scale = 255.0 / (high - low)
        offset = -low * scale
        varies = tf.math.is_finite(scale)
        scale, offset = tf.where(varies, scale, 1.0), tf.where(varies, offset, 0.0)
        results = rows * _rows(scale, images) + _rows(offset, images)
        return tf.reshape(tf.clip_by_value(results, 0.0, 255.0), tf.shape(images))


class Equalization(keras.layers.Equalization):
    """`keras.layers.Equalization` in [0, 255], by TensorFlow on every backend."""

    def transform_images(self, images, transformation, training=True):
        # (channels, pixels). Levels are truncated to integers, as in Keras.
        pixels = tf.transpose(tf.reshape(images, [-1, tf.shape(images)[-1]]))
        last = self.bins - 1
        levels = tf.cast(pixels * last / 255.0, "int32")
        counts = tf.math.bincount(
            tf.clip_by_value(levels, 0, last),
            minlength=self.bins,
            maxlength=self.bins,
            axis=-1,
        )
        below = tf.cumsum(counts, axis=-1)
        lowest = tf.where(below > 0, below, below.dtype.max)
        lowest = tf.reduce_min(lowest, axis=-1, keepdims=True)
        others = tf.maximum(below[:, -1:] - lowest, 1)
        table = tf.cast((below - lowest) * 255, "float32") / tf.cast(others, "float32")
        table = tf.clip_by_value(tf.round(table), 0.0, 255.0)
        columns = tf.clip_by_value(pixels / 255.0 * last, 0.0, float(last))
        equalized = tf.gather(table, tf.cast(columns, "int32"), axis=1, batch_dims=1)
        # Channels with a single level stay unchanged.
        several = tf.math.count_nonzero(counts, axis=-1) > 1
        equalized = tf.raw_ops.Select(condition=several, x=equalized, y=pixels)
        return tf.reshape(tf.transpose(equalized), tf.shape(images))


def _rows(values, like=None):
    """Reshapes (..., height, width, channels) to (..., height, 1, width * channels)."""
    shape = tf.shape(values if like is None else like)
    width, channels = shape[-2], shape[-1]
    if like is not None:
        values = tf.repeat(values, width, axis=-2)
    leading = tf.shape(values)[:-2]
    return tf.reshape(values, tf.concat([leading, [1, width * channels]], 0))
