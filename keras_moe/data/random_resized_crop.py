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
        """Crops tensors of TensorFlow.

        Args:
            images: (height, width, channels), or a batch of them; each image of a
                batch is cropped differently.
            seed: (2,) integers, the seed of `tf.random.stateless_uniform`.
        """
        import tensorflow as tf

        channels = images.shape[-1]
        if len(images.shape) == 3:
            window = self._draw(tf, tf.shape(images)[:2], 1, seed)[0]
            return self._resized(tf, images, window, channels)
        size = tf.shape(images)
        return tf.map_fn(
            lambda pair: self._resized(tf, *pair, channels),
            (images, self._draw(tf, size[1:3], size[0], seed)),
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

        def part():
            size = tf.image.extract_jpeg_shape(encoded)[:2]
            window = self._draw(tf, size, 1, seed)[0]
            # One more pixel at each side is decoded: at the edge of the decoded part
            # colours are interpolated from fewer pixels than within the image.
            begin = tf.maximum(window[:2] - 1, 0)
            end = tf.minimum(window[:2] + window[2:] + 1, size)
            pixels = tf.io.decode_and_crop_jpeg(
                encoded, tf.concat([begin, end - begin], 0), channels=channels
            )
            moved = tf.concat([window[:2] - begin, window[2:]], 0)
            return self._resized(tf, pixels, moved, channels)

        return tf.cond(
            tf.io.is_jpeg(encoded), part, lambda: self(decode(encoded), seed)
        )

    def _resized(self, tf, image, window, channels):
        """A window (4,) of an image, resized: (height, width, channels)."""
        part = tf.slice(
            image, tf.pad(window[:2], [[0, 1]]), tf.concat([window[2:], [channels]], 0)
        )
        part = tf.image.resize(part, (self.height, self.width))
        return tf.ensure_shape(part, [self.height, self.width, channels])

    def _draw(self, tf, size, count, seed):
        """Crops of images of a size (2,): int32 (count, 4), top, left, height, width.

        The arithmetic has few operations, since each costs more than its numbers.
        """
        limits = tf.cast(size, "float32")
        uniform = tf.random.stateless_uniform([count, self._NUM_DRAWS, 4], seed)
        low = np.array([self.scale[0], np.log(self.ratio[0])], "float32")
        high = np.array([self.scale[1], np.log(self.ratio[1])], "float32")
        share, log_ratio = tf.unstack(low + (high - low) * uniform[..., :2], axis=-1)
        mean = tf.sqrt(share * tf.reduce_prod(limits))
        sides = mean[..., None] * tf.exp(log_ratio[..., None] * [-0.5, 0.5])
        sides = tf.round(sides)
        fits = tf.reduce_all((sides >= 1) & (sides <= limits), axis=-1)
        # The last candidate is taken if no draw fits: a centred crop, as high and as
        # wide as the lowest and the highest ratio permit.
        permitted = limits[::-1] * [1 / self.ratio[0], self.ratio[1]]
        centred = tf.maximum(tf.round(tf.minimum(limits, permitted)), 1.0)
        centred = tf.concat([centred, [0.5, 0.5]], axis=0)
        draws = tf.concat([sides, uniform[..., 2:]], axis=-1)
        draws = tf.concat([draws, tf.tile(centred[None, None], [count, 1, 1])], axis=1)
        # The numbers fall, since argmax promises nothing about equal ones.
        order = tf.range(self._NUM_DRAWS + 1, 0, -1)
        first = tf.argmax(
            tf.where(tf.pad(fits, [[0, 0], [0, 1]], constant_values=True), order, 0),
            axis=1,
        )
        chosen = tf.gather(draws, first, axis=1, batch_dims=1)
        room = limits - chosen[:, :2]
        # A draw is below 1, but its product may round up.
        corner = tf.minimum(tf.floor(chosen[:, 2:] * (room + 1)), room)
        return tf.cast(tf.concat([corner, chosen[:, :2]], axis=1), "int32")
