"""Left-right flips inside the input pipeline."""

from typing import Any


class RandomFlip:
    """Flips every second image from left to right, drawn for each.

    The images are those of `keras.layers.RandomFlip("horizontal")` for the same seed.
    That layer reverses every image and then selects with a broadcast condition, which
    takes many times as long.
    """

    def __call__(self, images: Any, seed: Any) -> Any:
        import tensorflow as tf

        seed = tf.random.experimental.stateless_fold_in(seed, 1)
        if len(images.shape) == 3:
            is_flipped = tf.random.stateless_uniform([], seed) <= 0.5
            return tf.cond(is_flipped, lambda: tf.reverse(images, [1]), lambda: images)
        shape = tf.shape(images)
        is_flipped = tf.random.stateless_uniform([shape[0], 1, 1, 1], seed) <= 0.5
        # TensorFlow reverses quickly in three dimensions, and selects whole images
        # quickly where the condition is a vector.
        rows = tf.reshape(images, [-1, shape[2], images.shape[3]])
        return tf.raw_ops.Select(
            condition=tf.reshape(is_flipped, [-1]),
            x=tf.reshape(tf.reverse(rows, [1]), shape),
            y=images,
        )
