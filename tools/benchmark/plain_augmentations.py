"""Augmentations written by hand with TensorFlow's own operations, as papers' code is.

Pixels are in [0, 255]. RandAugment follows TensorFlow's released form: an operation is
drawn for each image and layer, and it works on integers where that form does.
"""

import math

import tensorflow as tf

GREY = 128.0


class RandAugment:
    """RandAugment of one image, with the list and magnitudes of `keras_moe.data`'s.

    Args:
        num_ops: number of operations that are drawn.
    """

    def __init__(self, num_ops: int = 2):
        self.num_ops = num_ops

    def __call__(self, image, label, seed):
        shape = image.shape
        chosen = tf.random.stateless_uniform([self.num_ops], seed, 0, 14, "int32")
        levels = tf.random.stateless_uniform([self.num_ops], seed + 1, -1.0, 1.0)
        for number in range(self.num_ops):
            image = tf.switch_case(chosen[number], operations(image, levels[number]))
            image = tf.ensure_shape(image, shape)
        return image, label


def operations(image, level):
    """Functions without arguments: the operations at a level in [-1, 1]."""
    size = image.shape[0]
    shift = level * size * 100 / 224
    angle = level * math.radians(30)
    cos, sin = tf.cos(angle), tf.sin(angle)
    middle = (size - 1) / 2
    right = middle - cos * middle + sin * middle
    down = middle - sin * middle - cos * middle
    return (
        lambda: image,
        lambda: moved(image, 1.0, 0.3 * level, 0.0, 0.0, 1.0, 0.0),
        lambda: moved(image, 1.0, 0.0, 0.0, 0.3 * level, 1.0, 0.0),
        lambda: moved(image, 1.0, 0.0, shift, 0.0, 1.0, 0.0),
        lambda: moved(image, 1.0, 0.0, 0.0, 0.0, 1.0, shift),
        lambda: moved(image, cos, -sin, right, sin, cos, down),
        lambda: clipped(image + 255 * 0.9 * level),
        lambda: clipped(tf.image.adjust_contrast(image, 1 + 0.9 * level)),
        lambda: blended(tf.image.rgb_to_grayscale(image), image, level),
        lambda: sharpness(image, level),
        lambda: posterized(image, 4),
        lambda: tf.where(image < 256 * (1 - abs(level)), image, 255 - image),
        lambda: auto_contrast(image),
        lambda: equalized(image),
    )


def clipped(image):
    return tf.clip_by_value(image, 0.0, 255.0)


def blended(first, second, level):
    return clipped(first + (1 + 0.9 * level) * (second - first))


def moved(image, *transform):
    rows = tf.stack([*map(tf.convert_to_tensor, transform), 0.0, 0.0])
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=rows[None],
        output_shape=tf.shape(image)[:2],
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
        fill_value=GREY,
    )[0]


def sharpness(image, level):
    kernel = tf.constant([[1, 1, 1], [1, 5, 1], [1, 1, 1]], "float32") / 13
    kernel = tf.tile(kernel[..., None, None], [1, 1, 3, 1])
    smooth = tf.nn.depthwise_conv2d(image[None], kernel, [1, 1, 1, 1], "VALID")[0]
    smooth = tf.pad(smooth, [[1, 1], [1, 1], [0, 0]])
    inner = tf.pad(tf.ones_like(smooth[1:-1, 1:-1]), [[1, 1], [1, 1], [0, 0]])
    return blended(tf.where(inner == 1, smooth, image), image, level)


def posterized(image, bits):
    image = tf.cast(image, "uint8")
    shift = tf.constant(8 - bits, "uint8")
    shifted = tf.bitwise.right_shift(image, shift)
    return tf.cast(tf.bitwise.left_shift(shifted, shift), "float32")


def auto_contrast(image):
    def of_channel(channel):
        low, high = tf.reduce_min(channel), tf.reduce_max(channel)
        scale = 255.0 / (high - low)
        return tf.cond(
            high > low, lambda: clipped((channel - low) * scale), lambda: channel
        )

    return tf.stack([of_channel(image[..., index]) for index in range(3)], 2)


def equalized(image):
    def of_channel(channel):
        levels = tf.cast(channel, "int32")
        counts = tf.histogram_fixed_width(levels, [0, 255], nbins=256)
        filled = tf.gather(counts, tf.reshape(tf.where(counts != 0), [-1]))
        step = (tf.reduce_sum(filled) - filled[-1]) // 255

        def by_table():
            table = (tf.cumsum(counts) + step // 2) // step
            table = tf.clip_by_value(tf.concat([[0], table[:-1]], 0), 0, 255)
            return tf.gather(table, levels)

        return tf.cond(step == 0, lambda: levels, by_table)

    channels = [of_channel(image[..., index]) for index in range(3)]
    return tf.cast(tf.stack(channels, 2), "float32")


def mixup(images, labels, seed):
    """MixUp with a ratio for each image, of Beta(0.2, 0.2)."""
    count = tf.shape(images)[0]
    order = tf.random.experimental.stateless_shuffle(tf.range(count), seed)
    gammas = tf.random.stateless_gamma([2, count], seed + 1, 0.2)
    ratio = gammas[0] / (gammas[0] + gammas[1])
    pixels, share = ratio[:, None, None, None], ratio[:, None]
    mixed = pixels * images + (1 - pixels) * tf.gather(images, order)
    return mixed, share * labels + (1 - share) * tf.gather(labels, order)


def cutmix(images, labels, seed):
    """CutMix with a box for each image, of an area of Beta(1, 1)."""
    shape = tf.shape(images)
    count, limits = shape[0], tf.cast(shape[1:3], "float32")
    order = tf.random.experimental.stateless_shuffle(tf.range(count), seed)
    drawn = tf.random.stateless_uniform([3, count], seed + 1)
    half = tf.sqrt(1 - drawn[0])[:, None] * limits / 2
    centre = tf.transpose(drawn[1:]) * limits
    low = tf.round(tf.maximum(centre - half, 0.0))
    high = tf.round(tf.minimum(centre + half, limits))
    rows, columns = tf.range(limits[0]), tf.range(limits[1])
    inside = (rows >= low[:, :1]) & (rows < high[:, :1])
    across = (columns >= low[:, 1:]) & (columns < high[:, 1:])
    inside = inside[:, :, None, None] & across[:, None, :, None]
    share = 1 - tf.reduce_prod(high - low, 1, keepdims=True) / tf.reduce_prod(limits)
    mixed = tf.where(inside, tf.gather(images, order), images)
    return mixed, share * labels + (1 - share) * tf.gather(labels, order)
