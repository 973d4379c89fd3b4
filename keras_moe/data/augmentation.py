"""Augmentation inside the input pipeline: which steps, their order and their seeds.

Pixels are float32 in [0, 255], channels last. Steps before the first one that mixes
labels see single images (height, width, channels), the others batches.
"""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_moe import _compat
from keras_moe._checks import check_integer, check_positive, nearest, unfit
from keras_moe._types import Structure, Tensor
from keras_moe.data._packages import tf
from keras_moe.data.reading import needs_pillow

# Layers of Keras and KerasCV that mix labels.
LABEL_MIXERS = {"MixUp", "CutMix", "FourierMix"}
# Names of augmentations that are such layers.
LABEL_MIXING_NAMES = ("mixup", "cutmix")
# These layers ignore the models' dtype policy and data format: 8 bits of bfloat16 are
# too few for fractions of a pixel value.
PLAIN = {"dtype": "float32", "data_format": "channels_last"}


class RandAugment:
    """Applies a few of Keras's transformations, drawn anew for every image.

    Transformations and ranges are the paper's, except that colour only fades. Much
    faster than `keras.layers.RandAugment`, which computes all transformations for every
    image and by default rotates by up to 180 degrees.

    Args:
        num_ops: number of transformations to draw and apply in turn.
        magnitude: fraction of the paper's highest magnitude, in [0, 1]; each strength
            is uniform up to that.

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
            raise unfit("a fraction in [0, 1]", magnitude=magnitude)
        self.num_ops, self.magnitude = num_ops, magnitude
        # The graph of a pipeline cannot create the layers' variables.
        self._layers = _rand_augment_layers(magnitude)

    def __call__(self, images: Tensor, seed: Tensor) -> Tensor:
        """Augments TensorFlow tensors, inside `tf.data` or a `tf.function`."""
        if len(images.shape) == 4:
            return _each(self, images, seed, images.shape[1:])
        images = tf.cast(images, "float32")
        shape = images.shape
        # Only RGB images have colour to lose.
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

            # Only the drawn branch is computed; the first is the identity.
            branches = [lambda: images, *map(branch, layers)]
            return i + 1, tf.switch_case(chosen[i], branches)

        # A loop in the graph, which takes several times as long to build unrolled.
        return tf.while_loop(lambda i, _: i < self.num_ops, apply, (0, images))[1]


def _each(function, images, seed, shape):
    """Augments each image of a batch by a seed of its own."""
    seeds = tf.random.experimental.stateless_split(seed, tf.shape(images)[0])
    signature = tf.TensorSpec(shape, "float32")
    pairs = (images, seeds)
    return tf.map_fn(lambda x: function(*x), pairs, fn_output_signature=signature)


def _rand_augment_layers(magnitude: float) -> list[keras.layers.Layer]:
    """The paper's list without the identity, with its magnitudes at level 10."""
    layers = keras.layers
    # Fills pixels from outside the image with grey, as in the released code.
    geometric = {**PLAIN, "fill_mode": "constant", "fill_value": 128.0}
    colour = {**PLAIN, "value_range": (0, 255)}
    # Keras takes a pair of numbers, too.
    shear: Any = (0.0, 0.3 * magnitude)
    shift, blend = 100 / 224 * magnitude, 0.9 * magnitude
    bits = 8 - round(4 * magnitude)
    # Pairs, because a single number has another meaning in each layer. Keras also draws
    # the sign of a shear; contrast is in [1 - first, 1 + second].
    return [
        layers.RandomShear(x_factor=shear, y_factor=0.0, **geometric),
        layers.RandomShear(x_factor=0.0, y_factor=shear, **geometric),
        layers.RandomTranslation(height_factor=0.0, width_factor=shift, **geometric),
        layers.RandomTranslation(height_factor=shift, width_factor=0.0, **geometric),
        layers.RandomRotation(factor=30 / 360 * magnitude, **geometric),
        layers.RandomBrightness(factor=blend, **colour),
        layers.RandomContrast(factor=(blend, blend), **colour),
        layers.RandomColorDegeneration(factor=blend, **colour),
        # 0.5 leaves the image unchanged.
        layers.RandomSharpness(factor=(0.5 - blend / 2, 0.5 + blend / 2), **colour),
        layers.RandomPosterization(factor=(bits, bits), **colour),
        _ScaledSolarization(magnitude, **colour),
        layers.AutoContrast(**colour),
        layers.Equalization(**colour),
    ]


class _ScaledSolarization(keras.layers.Solarization):
    """Inverts pixels above a random threshold of at least 256 (1 - magnitude)."""

    def __init__(self, magnitude: float, **kwargs):
        super().__init__(threshold_factor=1.0, **kwargs)
        self.magnitude = magnitude

    def get_random_transformation(self, data, training=True, seed=None):
        drawn: Any = super().get_random_transformation(data, training, seed)
        thresholds = 256 - self.magnitude * (256 - drawn["thresholds"])
        return {**drawn, "thresholds": thresholds}


class RandomResizedCrop:
    """Crops a random area with a random aspect ratio and resizes it bilinearly.

    Areas are those of `tf.image.stateless_sample_distorted_bounding_box`, and the whole
    image without a fit in ten draws. As first augmentation of a pipeline, it crops at
    the original size.

    Args:
        height: height of the result.
        width: width of the result.
        scale: lowest and highest fraction of the area, in (0, 1].
        ratio: lowest and highest aspect ratio (width / height), positive.

    Reference: *Going Deeper with Convolutions*, section 6.

    Example:

    ```python
    crop = RandomResizedCrop(224, 224, scale=(0.2, 1.0))
    dataset = load("tfds:cifar10", "train", augment=[crop, "flip"])
    ```
    """

    def __init__(
        self,
        height: int,
        width: int,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ):
        if not (
            0 < scale[0] <= scale[1] <= 1
            and 0 < ratio[0] <= ratio[1]
            and min(height, width) >= 1
        ):
            raise ValueError(
                "Expected 0 < lowest <= highest for scale, at most 1, and ratio, and a "
                f"positive size; received: scale={scale}, ratio={ratio}, "
                f"height={height}, width={width}"
            )
        self.height, self.width = int(height), int(width)
        self.scale, self.ratio = tuple(scale), tuple(ratio)

    def __call__(self, images: Tensor, seed: Tensor) -> Tensor:
        """Crops TensorFlow tensors."""
        if len(images.shape) == 4:
            shape = (self.height, self.width, images.shape[-1])
            return _each(self, images, seed, shape)
        corner, sides = self._draw(tf.shape(images)[:2], seed)
        return self._resized(images, corner, sides, images.shape[-1])

    def decode(
        self, encoded: Tensor, decode: Callable, channels: int, seed: Tensor
    ) -> Tensor:
        """As `self(decode(encoded), seed)`, decoding only what upright JPEGs need."""

        def part_of_jpeg():
            # The header has the size, which a draw needs.
            size = tf.image.extract_jpeg_shape(encoded)[:2]
            corner, sides = self._draw(size, seed)
            # One more pixel on each side is decoded: at the edge of the decoded part,
            # colours are interpolated from fewer pixels than within the image.
            begin = tf.maximum(corner - 1, 0)
            end = tf.minimum(corner + sides + 1, size)
            pixels = tf.io.decode_and_crop_jpeg(
                encoded, tf.concat([begin, end - begin], 0), channels=channels
            )
            return self._resized(pixels, corner - begin, sides, channels)

        return tf.cond(
            tf.logical_and(
                tf.io.is_jpeg(encoded), tf.logical_not(needs_pillow(encoded))
            ),
            part_of_jpeg,
            lambda: self(decode(encoded), seed),
        )

    def _resized(self, image, corner, sides, channels):
        """Resizes a part of an image to (height, width, channels)."""
        size = tf.pad(sides, [[0, 1]], constant_values=channels)
        part = tf.slice(image, tf.pad(corner, [[0, 1]]), size)
        part = tf.image.resize(part, (self.height, self.width))
        return tf.ensure_shape(part, [self.height, self.width, channels])

    def _draw(self, size, seed):
        """Draws corner and sides (2,) of a crop of an image of this size."""
        corner, sides, _ = tf.image.stateless_sample_distorted_bounding_box(
            tf.pad(size, [[0, 1]], constant_values=1),
            tf.zeros([1, 0, 4]),
            seed,
            min_object_covered=0.0,
            aspect_ratio_range=self.ratio,
            area_range=self.scale,
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        return corner[:2], sides[:2]


class Step(NamedTuple):
    """One augmentation step of the pipeline."""

    function: Callable[[Any, Any, Any], tuple[Any, Any]]
    crop: RandomResizedCrop | None
    mixes_labels: bool
    is_stateless: bool


def build_steps(
    augment: Any, image_shape: tuple[int, int, int], seed: int
) -> list[Step]:
    """Turns the `augment` argument of `load` into steps."""
    if augment is None:
        return []
    if isinstance(augment, (str, dict)) or callable(augment):
        augment = [augment]
    return [_build_step(item, image_shape, seed + i) for i, item in enumerate(augment)]


def _by_name(
    item: str | dict, image_shape: tuple[int, int, int], seed: int
) -> Callable:
    plain = {**PLAIN, "seed": seed}
    moved = {**plain, "fill_mode": "nearest"}
    layers, (height, width, _) = keras.layers, image_shape
    makers = {
        "flip": lambda: layers.RandomFlip("horizontal", **plain),
        "translation": lambda factor=0.1: layers.RandomTranslation(
            factor, factor, **moved
        ),
        "rotation": lambda factor=0.03: layers.RandomRotation(factor, **moved),
        "randaugment": lambda num_ops=2, magnitude=1.0: RandAugment(num_ops, magnitude),
        # Of an alpha that is not positive, Keras makes NaN.
        "mixup": lambda alpha=0.2: (
            check_positive("alpha", alpha) and layers.MixUp(alpha, **plain)
        ),
        "cutmix": lambda factor=1.0: layers.CutMix(factor, **plain),
        "random_resized_crop": lambda scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3): (
            RandomResizedCrop(height, width, scale, ratio)
        ),
    }
    options = dict(item) if isinstance(item, dict) else {"name": item}
    name = options.pop("name", None)
    if name not in makers:
        expected = f"an augmentation, one of {sorted(makers)}"
        raise unfit(expected, f"augment={item!r} ({nearest(str(name), makers)})")
    try:
        return makers[name](**options)
    except TypeError as error:
        known = list(inspect.signature(makers[name]).parameters)
        expected = f"numbers as options of {name!r}, any of {known}"
        raise unfit(expected, augment=item) from error


def _build_step(item: Any, image_shape: tuple[int, int, int], seed: int) -> Step:
    if isinstance(item, (str, dict)):
        item = _by_name(item, image_shape, seed)
    if not callable(item) or inspect.isclass(item):
        raise unfit("an augmentation's name, a layer or a function", item)
    is_layer = isinstance(item, keras.layers.Layer)
    mixes_labels = _mixes_labels(item)
    is_stateless = takes_seeds(item) if is_layer else has_argument(item, "seed")

    def apply(data, seed) -> Any:
        if isinstance(item, keras.layers.Layer):
            return call_with_seed(item, data, seed if is_stateless else None)
        return item(data, seed=seed) if is_stateless else item(data)

    def function(images, labels, seed):
        if mixes_labels:
            mixed = apply({"images": images, "labels": labels}, seed)
            images, labels = mixed["images"], tf.cast(mixed["labels"], "float32")
        else:
            images = apply(images, seed)
        return tf.cast(images, "float32"), labels

    crop = item if isinstance(item, RandomResizedCrop) else None
    return Step(function, crop, mixes_labels, is_stateless)


def _mixes_labels(item: object) -> bool:
    kinds = {kind.__name__ for kind in type(item).__mro__}
    if getattr(item, "mixes_labels", False) or kinds & LABEL_MIXERS:
        return True
    # A pipeline of layers mixes labels if one of them does.
    layers = getattr(item, "layers", None)
    return isinstance(layers, (list, tuple)) and any(map(_mixes_labels, layers))


def call_with_seed(
    layer: keras.layers.Layer, data: Structure, seed: Tensor | None
) -> Any:
    """Calls a Keras layer in training mode with randomness from a seed tensor."""
    # The layer's own generator is a variable: results would depend on the number of
    # earlier images, and parallel calls would race for it.
    options = {"training": True} if has_argument(layer.call, "training") else {}
    with contextlib.ExitStack() as replaced:
        if seed is not None:
            generator = _ElementSeed(seed)
            for part in filter(
                _compat.has_seed_generator, _compat.flatten_layers(layer)
            ):
                replaced.enter_context(_compat.replaced_seed_generator(part, generator))
        return layer(data, **options)


class _ElementSeed(keras.random.SeedGenerator):
    """A stateless generator: its seeds follow from a tensor and a count."""

    def __init__(self, seed: Tensor):
        # super().__init__ would create a variable.
        self._seed, self._count = seed, 0

    def next(self, ordered: bool = True) -> Tensor:
        self._count += 1
        return tf.random.experimental.stateless_fold_in(self._seed, self._count)


def takes_seeds(layer: keras.layers.Layer) -> bool:
    """Whether the layer and all layers inside are Keras's own for `tf.data`."""
    return all(
        _compat.has_seed_generator(part)
        or isinstance(part, (keras.layers.Pipeline, keras.Sequential))
        for part in _compat.flatten_layers(layer)
    )


def has_argument(function: Callable, name: str) -> bool:
    """Whether a function has an argument of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # The function is written in C.
        return False
