"""CutMix inside the input pipeline."""

from typing import Any

import keras


class CutMix(keras.layers.CutMix):
    """`keras.layers.CutMix` that pastes whole pixels.

    The images are those of the layer for the same seed. It repeats the mask over the
    channels and selects number by number, which takes three times as long. If Keras
    renames the method of the mask, only the time changes.
    """

    def _generate_batch_mask(self, images_shape, box_corners):
        return super()._generate_batch_mask((*images_shape[:3], 1), box_corners)

    def transform_images(
        self, images: Any, transformation: Any = None, training: bool = True
    ) -> Any:
        import tensorflow as tf

        if not training or transformation is None:
            return super().transform_images(images, transformation, training)
        images = tf.cast(images, self.compute_dtype)
        channels = tf.shape(images)[-1]
        others = tf.gather(images, transformation["permutation_order"])
        # TensorFlow selects rows quickly where the condition is a vector.
        pixels = tf.raw_ops.Select(
            condition=tf.reshape(transformation["batch_masks"][..., 0], [-1]),
            x=tf.reshape(others, [-1, channels]),
            y=tf.reshape(images, [-1, channels]),
        )
        return tf.ensure_shape(tf.reshape(pixels, tf.shape(images)), images.shape)
