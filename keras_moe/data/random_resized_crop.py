"""A random part of an image, of random shape, at the size of the model's images."""

from typing import Any

import numpy as np


class RandomResizedCrop:
    """Crops a random part of random shape, and resizes it bilinearly.

    Keras has no such layer. The fraction of the area and the logarithm of the aspect
    ratio are uniform. The first of ten draws that fits into the image is taken, and if
    none does, the largest centred crop with the nearest permitted aspect ratio. It
    reads the image at its full size where it is the first augmentation of a pipeline.

    Args:
        height: height of the result.
        width: width of the result.
        scale: lowest and highest fraction of the area, in (0, 1].
        ratio: lowest and highest width / height of the crop, positive.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        *Going Deeper with Convolutions*, section 6.

    Example:

    ```python
    crop = RandomResizedCrop(224, 224, scale=(0.2, 1.0))
    dataset = load("tfds:cifar10", "train", augment=[crop, "flip"])
    ```
    """

    _NUM_DRAWS = 10

    def __init__(
        self,
        height: int,
        width: int,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ):
        if height < 1 or width < 1:
            raise ValueError(
                f"Expected a positive size; received: height={height}, width={width}"
            )
        for name, pair in (("scale", scale), ("ratio", ratio)):
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise ValueError(
                    f"Expected the lowest and the highest; received: {name}={pair!r}"
                )
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(
                f"Expected 0 < lowest <= highest <= 1; received: scale={scale}"
            )
        if not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f"Expected 0 < lowest <= highest; received: ratio={ratio}")
        self.height, self.width = int(height), int(width)
        self.scale, self.ratio = tuple(scale), tuple(ratio)

    def __call__(self, images: Any, seed: Any) -> Any:
        """Crops tensors of TensorFlow."""
        import tensorflow as tf

        channels = images.shape[-1]
        if len(images.shape) == 3:
            window = self._draw(tf, tf.shape(images)[:2], [], seed)
            return self._resized(tf, images, *window, channels)
        size = tf.shape(images)
        return tf.map_fn(
            lambda drawn: self._resized(tf, *drawn, channels),
            (images, *self._draw(tf, size[1:3], [size[0]], seed)),
            fn_output_signature=tf.TensorSpec(
                (self.height, self.width, channels), "float32"
            ),
        )

    def decode(self, encoded: Any, decode: Any, channels: int, seed: Any) -> Any:
        """Crops an image file, and decodes no more of it than the crop needs.

        The result is that of `self(decode(encoded), seed)`, bit for bit. Only JPEG
        files can be decoded in part; others are decoded as a whole.

        Args:
            encoded: bytes of a JPEG, PNG, GIF or BMP file.
            decode: function from these to pixels (height, width, channels).
            channels: number of channels that `decode` makes, 1 or 3.
            seed: (2,) integers, the seed of `tf.random.stateless_uniform`.

        Returns:
            float32 (height, width, channels) of the crop.
        """
        import tensorflow as tf

        # A draw needs the size of the image: that of a JPEG file is in its header,
        # and the others are decoded for it.
        is_jpeg = tf.io.is_jpeg(encoded)

        def header():
            size = tf.image.extract_jpeg_shape(encoded)[:2]
            return tf.zeros([0, 0, channels], "uint8"), size

        def pixels_of_others():
            pixels = decode(encoded)
            return pixels, tf.shape(pixels)[:2]

        whole, size = tf.cond(is_jpeg, header, pixels_of_others)
        corner, sides = self._draw(tf, size, [], seed)

        def part():
            # One more pixel at each side is decoded: at the edge of the decoded part
            # colours are interpolated from fewer pixels than within the image.
            begin = tf.maximum(corner - 1, 0)
            end = tf.minimum(corner + sides + 1, size)
            pixels = tf.io.decode_and_crop_jpeg(
                encoded, tf.concat([begin, end - begin], 0), channels=channels
            )
            return pixels, corner - begin

        pixels, corner = tf.cond(is_jpeg, part, lambda: (whole, corner))
        return self._resized(tf, pixels, corner, sides, channels)

    def _resized(self, tf, image, corner, sides, channels):
        """A part of an image, resized: (height, width, channels)."""
        size = tf.pad(sides, [[0, 1]], constant_values=channels)
        part = tf.slice(image, tf.pad(corner, [[0, 1]]), size)
        part = tf.image.resize(part, (self.height, self.width))
        return tf.ensure_shape(part, [self.height, self.width, channels])

    def _draw(self, tf, size, shape, seed):
        """Crops of images of a size (2,): int32 (*shape, 2), top and left, and sides.

        The arithmetic has few operations, since each costs more than its numbers: one
        draw is a row of height, width, and the places of the top and of the left side.
        """
        limits = tf.cast(size, "float32")
        uniform = tf.random.stateless_uniform([*shape, self._NUM_DRAWS, 4], seed)
        low = np.array([self.scale[0], np.log(self.ratio[0]), 0, 0], "float32")
        high = np.array([self.scale[1], np.log(self.ratio[1]), 1, 1], "float32")
        draws = low + (high - low) * uniform
        share, log_ratio, places = tf.split(draws, [1, 1, 2], axis=-1)
        mean = tf.sqrt(share * tf.reduce_prod(limits))
        sides = tf.round(mean * tf.exp(log_ratio * [-0.5, 0.5]))
        # The last candidate is taken if no draw fits: a centred crop, as high and as
        # wide as the lowest and the highest ratio permit.
        permitted = tf.reverse(limits, [0]) * [1 / self.ratio[0], self.ratio[1]]
        centred = tf.maximum(tf.round(tf.minimum(limits, permitted)), 1.0)
        centred = tf.pad(centred, [[0, 2]], constant_values=0.5)
        draws = tf.concat(
            [
                tf.concat([sides, places], axis=-1),
                tf.broadcast_to(centred, [*shape, 1, 4]),
            ],
            axis=-2,
        )
        highest = tf.pad(limits, [[0, 2]], constant_values=1.0)
        fits = tf.reduce_all((draws >= [1.0, 1.0, 0.0, 0.0]) & (draws <= highest), -1)
        # The numbers fall, since argmax promises nothing about equal ones.
        order = np.arange(self._NUM_DRAWS + 1, 0, -1, "int32")
        first = tf.argmax(tf.where(fits, order, 0), axis=-1)
        axis = len(shape)
        chosen = tf.gather(draws, first, axis=axis, batch_dims=axis)
        sides, places = tf.split(chosen, 2, axis=-1)
        room = limits - sides
        # A draw is below 1, but its product may round up.
        corner = tf.minimum(tf.floor(places * (room + 1)), room)
        return tf.cast(corner, "int32"), tf.cast(sides, "int32")
