"""RandAugment: a few of Keras's transformations, drawn anew for every image."""

from typing import Any

import keras

from keras_moe.checks import check_integer
from keras_moe.data.colour_layers import (
    AutoContrast,
    Contrast,
    Equalization,
    ScaledSolarization,
)
from keras_moe.data.seeded_layers import PLAIN, call_with_seed

VALUE_RANGE = (0, 255)


class RandAugment:
    """Applies a few of Keras's transformations, drawn anew for every image.

    The list and the ranges are the paper's, except that colour only fades.
    `keras.layers.RandAugment` may be used instead; it computes all of its
    transformations for every image and keeps the results of those that it drew, which
    takes many times as long, and its default strength rotates by up to 180 degrees.

    Args:
        num_ops: number of transformations that are drawn and applied in turn.
        magnitude: fraction of the paper's highest magnitude, in [0, 1]; each strength
            is uniform up to that.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        *RandAugment: Practical automated data augmentation with a reduced search
        space*, section 3.

    Example:

    ```python
    dataset = load("tfds:cifar10", "train", augment=RandAugment(magnitude=0.5))
    ```
    """

    def __init__(self, num_ops: int = 2, magnitude: float = 1.0):
        check_integer("num_ops", num_ops)
        if not 0 <= magnitude <= 1:
            raise ValueError(
                f"Expected a fraction in [0, 1]; received: magnitude={magnitude}"
            )
        self.num_ops, self.magnitude = num_ops, magnitude
        # The graph of a pipeline cannot make the layers' variables.
        self._layers = _rand_augment_layers(magnitude)

    def __call__(self, images: Any, seed: Any) -> Any:
        """Augments tensors of TensorFlow, inside `tf.data` or a `tf.function`."""
        import tensorflow as tf

        if len(images.shape) == 4:
            seeds = tf.random.experimental.stateless_split(seed, tf.shape(images)[0])
            return tf.map_fn(
                lambda pair: self(*pair),
                (images, seeds),
                fn_output_signature=tf.TensorSpec(images.shape[1:], "float32"),
            )
        images = tf.cast(images, "float32")
        shape = images.shape
        # Only RGB has colour to lose.
        layers = [
            layer
            for layer in self._layers
            if shape[-1] == 3
            or not isinstance(layer, keras.layers.RandomColorDegeneration)
        ]
        chosen = tf.random.stateless_uniform(
            [self.num_ops], seed, 0, len(layers) + 1, "int32"
        )

        def apply(i, images):
            strength = tf.random.experimental.stateless_fold_in(seed, i + 1)

            def branch(layer):
                return lambda: tf.ensure_shape(
                    call_with_seed(layer, images, strength), shape
                )

            # Only the branch that was drawn is computed; the first is the identity.
            branches = [lambda: images, *map(branch, layers)]
            return i + 1, tf.switch_case(chosen[i], branches)

        # A loop in the graph: unrolled, the graph takes several times as long to make.
        return tf.while_loop(lambda i, _: i < self.num_ops, apply, (0, images))[1]


def _rand_augment_layers(magnitude: float) -> list[keras.layers.Layer]:
    """The paper's list without the identity, with its magnitudes at level 10."""
    layers = keras.layers
    # Grey fills the pixels from outside the image, as in the released code.
    geometric = {**PLAIN, "fill_mode": "constant", "fill_value": 128.0}
    colour = {**PLAIN, "value_range": VALUE_RANGE}
    shear, shift, blend = 0.3 * magnitude, 100 / 224 * magnitude, 0.9 * magnitude
    bits = 8 - round(4 * magnitude)
    # One number has another meaning in each layer, hence the pairs. Keras also draws
    # the sign of a shear; contrast is in [1 - first, 1 + second].
    return [
        layers.RandomShear(x_factor=(0.0, shear), y_factor=0.0, **geometric),
        layers.RandomShear(x_factor=0.0, y_factor=(0.0, shear), **geometric),
        layers.RandomTranslation(height_factor=0.0, width_factor=shift, **geometric),
        layers.RandomTranslation(height_factor=shift, width_factor=0.0, **geometric),
        layers.RandomRotation(factor=30 / 360 * magnitude, **geometric),
        layers.RandomBrightness(factor=blend, **colour),
        Contrast(factor=(blend, blend), **colour),
        layers.RandomColorDegeneration(factor=blend, **colour),
        # One half leaves the image as it is.
        layers.RandomSharpness(factor=(0.5 - blend / 2, 0.5 + blend / 2), **colour),
        layers.RandomPosterization(factor=(bits, bits), **colour),
        ScaledSolarization(magnitude, **colour),
        AutoContrast(**colour),
        Equalization(**colour),
    ]
