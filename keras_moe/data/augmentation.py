"""Augmentation inside the input pipeline: which, in what order, and from which seed.

Every augmentation sees float32 pixels in [0, 255], channels last. Those before the
first one that mixes labels work on single images (height, width, channels); it and
those after it work on batches.
"""

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe.checks import check_integer
from keras_moe.compat import (
    flatten_layers,
    has_seed_generator,
    replaced_seed_generator,
)
from keras_moe.data import _keras_layers as fast

# The layers of Keras and KerasCV that mix labels.
LABEL_MIXERS = {"MixUp", "CutMix", "FourierMix"}
# The names of augmentations that are such layers.
LABEL_MIXING_NAMES = ("mixup", "cutmix")
# The layers made here do not follow the policy and the data format of the models:
# bfloat16 has 8 bits, too few for fractions of a pixel value.
PLAIN = {"dtype": "float32", "data_format": "channels_last"}


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
    colour = {**PLAIN, "value_range": (0, 255)}
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
        fast.Contrast(factor=(blend, blend), **colour),
        layers.RandomColorDegeneration(factor=blend, **colour),
        # One half leaves the image as it is.
        layers.RandomSharpness(factor=(0.5 - blend / 2, 0.5 + blend / 2), **colour),
        layers.RandomPosterization(factor=(bits, bits), **colour),
        fast.ScaledSolarization(magnitude, **colour),
        fast.AutoContrast(**colour),
        fast.Equalization(**colour),
    ]


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
        files can be decoded in part; others are decoded whole.

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


class Step(NamedTuple):
    """One augmentation, ready for the pipeline."""

    function: Callable[[Any, Any, Any], tuple[Any, Any]]
    crop: RandomResizedCrop | None
    mixes_labels: bool
    is_stateless: bool
    keeps_range: bool


def build_steps(
    augment: Any, image_shape: tuple[int, int, int], seed: int
) -> list[Step]:
    """Turns the `augment` argument of `load` into steps."""
    if augment is None:
        return []
    if isinstance(augment, (str, dict)) or callable(augment):
        augment = [augment]
    if not isinstance(augment, Sequence):
        raise ValueError(
            "Expected None, the name of an augmentation or a dict of its name and "
            "options, a Keras layer, a callable or a sequence of these; "
            f"received: augment={augment!r}"
        )
    return [
        _build_step(
            _by_name(item, image_shape, seed + i)
            if isinstance(item, (str, dict))
            else item
        )
        for i, item in enumerate(augment)
    ]


def _by_name(
    item: str | dict, image_shape: tuple[int, int, int], seed: int
) -> Callable:
    plain = {**PLAIN, "seed": seed}
    moved = {**plain, "fill_mode": "nearest"}
    layers, (height, width, _) = keras.layers, image_shape
    makers = {
        "flip": fast.RandomFlip,
        "translation": lambda factor=0.1: layers.RandomTranslation(
            factor, factor, **moved
        ),
        "rotation": lambda factor=0.03: layers.RandomRotation(factor, **moved),
        "randaugment": lambda num_ops=2, magnitude=1.0: RandAugment(num_ops, magnitude),
        "mixup": lambda alpha=0.2: layers.MixUp(_positive(alpha), **plain),
        "cutmix": lambda factor=1.0: fast.CutMix(factor, **plain),
        "random_resized_crop": lambda scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3): (
            RandomResizedCrop(height, width, scale, ratio)
        ),
    }
    options = dict(item) if isinstance(item, dict) else {"name": item}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in makers:
        close = difflib.get_close_matches(str(name), makers, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"Expected an augmentation, one of {sorted(makers)}; "
            f"received: augment={item!r}{hint}"
        )
    known = list(inspect.signature(makers[name]).parameters)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"Expected options of {name!r}, any of {known}; received: augment={item!r}"
        )
    try:
        return makers[name](**options)
    except TypeError as error:
        raise ValueError(
            f"Expected numbers as options of {name!r}; received: augment={item!r}"
        ) from error


def _positive(alpha: float) -> float:
    """Refuses an alpha for which Keras would make images of NaN."""
    if not alpha > 0:
        raise ValueError(f"Expected a positive number; received: alpha={alpha}")
    return alpha


def _build_step(item: Any) -> Step:
    if not callable(item) or inspect.isclass(item):
        raise ValueError(
            "Expected a name, a Keras layer or a callable in `augment`; "
            f"received: {item!r}"
        )
    is_layer = isinstance(item, keras.layers.Layer)
    mixes_labels = _mixes_labels(item)
    is_stateless = takes_seeds(item) if is_layer else has_argument(item, "seed")

    def apply(data, seed):
        if is_layer:
            return call_with_seed(item, data, seed if is_stateless else None)
        return item(data, seed=seed) if is_stateless else item(data)

    def function(images, labels, seed):
        import tensorflow as tf

        if mixes_labels:
            mixed = apply({"images": images, "labels": labels}, seed)
            images, labels = mixed["images"], tf.cast(mixed["labels"], "float32")
        else:
            images = apply(images, seed)
        return tf.cast(images, "float32"), labels

    crop = item if isinstance(item, RandomResizedCrop) else None
    keeps_range = type(item) in (fast.RandomFlip, RandomResizedCrop)
    return Step(function, crop, mixes_labels, is_stateless, keeps_range)


def _mixes_labels(item: Any) -> bool:
    if getattr(item, "mixes_labels", False):
        return True
    if any(kind.__name__ in LABEL_MIXERS for kind in type(item).__mro__):
        return True
    # A pipeline of layers mixes labels if one of them does.
    layers = getattr(item, "layers", None)
    return isinstance(layers, (list, tuple)) and any(map(_mixes_labels, layers))


def call_with_seed(layer: keras.layers.Layer, data: Any, seed: Any) -> Any:
    """Calls a Keras layer in training mode, its randomness taken from a seed tensor.

    A layer's own generator is a variable that every call advances: the result for an
    image would depend on the number of images before it, and parallel calls would race
    for the variable. A seed per element makes the result a function of its place.
    """
    options = {"training": True} if has_argument(layer.call, "training") else {}
    with _seeded(layer, seed) if seed is not None else contextlib.nullcontext():
        return layer(data, **options)


@contextlib.contextmanager
def _seeded(layer: keras.layers.Layer, seed: Any) -> Iterator[None]:
    generator = _ElementSeed(seed)
    with contextlib.ExitStack() as replaced:
        for part in flatten_layers(layer):
            if has_seed_generator(part):
                replaced.enter_context(replaced_seed_generator(part, generator))
        yield


class _ElementSeed(keras.random.SeedGenerator):
    """A generator without state: its seeds follow from a tensor and a count."""

    def __init__(self, seed: Any):
        # super().__init__ would make a variable.
        self._seed, self._count = seed, 0

    def next(self, ordered: bool = True) -> Any:
        import tensorflow as tf

        self._count += 1
        return tf.random.experimental.stateless_fold_in(self._seed, self._count)


def takes_seeds(layer: keras.layers.Layer) -> bool:
    """Whether the layer and those inside are Keras's own for `tf.data`."""
    return all(
        has_seed_generator(part)
        or isinstance(part, (keras.layers.Pipeline, keras.Sequential))
        for part in flatten_layers(layer)
    )


def has_argument(function: Callable, name: str) -> bool:
    """Whether a function has an argument of a name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # The function is written in C.
        return False
