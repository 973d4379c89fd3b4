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

from keras_moe.data.random_resized_crop import RandomResizedCrop

VALUE_RANGE = (0, 255)
# Keras's, and those of KerasCV besides.
LABEL_MIXERS = {"MixUp", "CutMix", "FourierMix"}
# The layers made here do not follow the policy and the data format of the models:
# bfloat16 has 8 bits, too few for fractions of a pixel value.
_PLAIN = {"dtype": "float32"}
_CHANNELS_LAST = {"data_format": "channels_last"}


class RandAugment:
    """Applies a few of Keras's transformations, drawn anew for every image.

    The list and the ranges are the paper's, except that colour only fades.
    `keras.layers.RandAugment` may be used instead; it computes all of its
    transformations for every image and keeps the result of those it drew, which takes
    many times as long, and its default strength turns images by up to 180 degrees.

    Args:
        num_ops: how many are drawn and applied one after the other.
        magnitude: share of the paper's highest magnitude, in [0, 1]; each strength
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
        if not isinstance(num_ops, int) or num_ops < 1:
            raise ValueError(
                f"Expected an integer of at least 1; received: num_ops={num_ops!r}"
            )
        if not 0 <= magnitude <= 1:
            raise ValueError(
                f"Expected a share in [0, 1]; received: magnitude={magnitude}"
            )
        self.num_ops, self.magnitude = num_ops, magnitude
        # Here, since variables cannot be made inside the graph of a pipeline.
        self._layers = _rand_augment_layers(magnitude)

    def __call__(self, images: Any, seed: Any) -> Any:
        """Augments tensors of TensorFlow, inside `tf.data` or a `tf.function`.

        Args:
            images: (height, width, channels) in [0, 255], or a batch of them.
            seed: (2,) integers, as those of `tf.random.stateless_uniform`.
        """
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

            # Only the branch that was drawn is computed. The one more is the identity.
            branches = [lambda: images, *map(branch, layers)]
            return i + 1, tf.switch_case(chosen[i], branches)

        # A loop in the graph, whose making would else take several times as long.
        return tf.while_loop(lambda i, _: i < self.num_ops, apply, (0, images))[1]


class Step(NamedTuple):
    """One augmentation, ready for the pipeline.

    Fields:
        function: (images, labels, seed) -> (images, labels).
        crop: the `RandomResizedCrop` that it is, which as the first step takes images
            of any size, or None.
        mixes_labels: whether it needs a batch and one-hot labels.
        is_stateless: whether all its randomness comes from the seed, so that
            calls may run in parallel and in any order.
    """

    function: Callable[[Any, Any, Any], tuple[Any, Any]]
    crop: RandomResizedCrop | None
    mixes_labels: bool
    is_stateless: bool


def build_steps(
    augment: Any, image_shape: tuple[int, int, int], seed: int
) -> list[Step]:
    """Turns the `augment` argument of `load` into steps.

    Raises:
        ValueError: if something in it is neither a known name nor callable.
    """
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
    plain = {**_PLAIN, **_CHANNELS_LAST, "seed": seed}
    moved = {**plain, "fill_mode": "nearest"}
    layers, (height, width, _) = keras.layers, image_shape
    makers = {
        "flip": lambda: layers.RandomFlip("horizontal", **plain),
        "translation": lambda factor=0.1: layers.RandomTranslation(
            factor, factor, **moved
        ),
        "rotation": lambda factor=0.03: layers.RandomRotation(factor, **moved),
        "randaugment": lambda num_ops=2, magnitude=1.0: RandAugment(num_ops, magnitude),
        "mixup": lambda alpha=0.2: layers.MixUp(_positive(alpha), **plain),
        "cutmix": lambda factor=1.0: layers.CutMix(factor, **plain),
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
    """Keras takes any, and gives images that are not numbers."""
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
    is_stateless = _takes_seeds(item) if is_layer else _has_argument(item, "seed")

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
    return Step(function, crop, mixes_labels, is_stateless)


def call_with_seed(layer: keras.layers.Layer, data: Any, seed: Any) -> Any:
    """Calls a Keras layer in training mode, its randomness taken from a seed tensor.

    A layer's own generator is a variable that every call advances: what an image
    becomes would depend on how many were taken before it, and calls in parallel would
    race for it. A seed per element makes the result a function of the element's place.

    Args:
        layer: of which `_takes_seeds` is true if a seed is given.
        data: images, or a dict of images and labels; tensors of TensorFlow.
        seed: (2,) int32, or None for the layer's own generator.
    """
    options = {"training": True} if _has_argument(layer.call, "training") else {}
    with _seeded(layer, seed) if seed is not None else contextlib.nullcontext():
        return layer(data, **options)


@contextlib.contextmanager
def _seeded(layer: keras.layers.Layer, seed: Any) -> Iterator[None]:
    generator = _ElementSeed(seed)
    inner = [part for part in _parts(layer) if hasattr(part, "_get_seed_generator")]
    # Every Keras layer for `tf.data` asks this method for its generator. Set in the
    # instance's dict, so that Keras does not take it for state to track.
    for part in inner:
        part.__dict__["_get_seed_generator"] = lambda backend=None: generator
    try:
        yield
    finally:
        for part in inner:
            part.__dict__.pop("_get_seed_generator", None)


class _ElementSeed(keras.random.SeedGenerator):
    """A generator without state: its seeds follow from a tensor and a count."""

    def __init__(self, seed: Any):
        # Without super().__init__, which would make a variable.
        self._seed, self._count = seed, 0

    def next(self, ordered: bool = True) -> Any:
        import tensorflow as tf

        self._count += 1
        return tf.random.experimental.stateless_fold_in(self._seed, self._count)


def _parts(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    return list(layer._flatten_layers())


def _takes_seeds(layer: keras.layers.Layer) -> bool:
    """Whether the layer and those inside are Keras's own for `tf.data`."""
    return all(
        hasattr(part, "_get_seed_generator")
        or isinstance(part, (keras.layers.Pipeline, keras.Sequential))
        for part in _parts(layer)
    )


def _mixes_labels(item: Any) -> bool:
    if getattr(item, "mixes_labels", False):
        return True
    if any(kind.__name__ in LABEL_MIXERS for kind in type(item).__mro__):
        return True
    # Of a pipeline of layers.
    layers = getattr(item, "layers", None)
    return isinstance(layers, (list, tuple)) and any(map(_mixes_labels, layers))


def _has_argument(function: Callable, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return False


class CountedEqualization(keras.layers.Equalization):
    """Counts a histogram with one operation.

    Keras chooses how to count by the backend of the models, not of the pipeline: with
    JAX it makes a graph of 256 comparisons per channel, 40 times as slow. If Keras
    renames the method, this class changes nothing.
    """

    def _custom_histogram_fixed_width(self, values, value_range, nbins):
        import tensorflow as tf

        # Truncated to whole levels, as Keras does.
        levels = tf.cast(
            tf.reshape(values, [-1]) * (nbins - 1) / value_range[1], "int32"
        )
        return tf.math.bincount(
            tf.clip_by_value(levels, 0, nbins - 1), minlength=nbins, maxlength=nbins
        )


class ScaledSolarization(keras.layers.Solarization):
    """Inverts the pixels from a threshold on, which is at least 256 (1 - magnitude).

    Keras's own lower bound is not on the scale of its upper bound.
    """

    def __init__(self, magnitude: float, **kwargs):
        super().__init__(threshold_factor=1.0, **kwargs)
        self.magnitude = magnitude

    def get_random_transformation(self, data, training=True, seed=None):
        drawn = super().get_random_transformation(data, training, seed)
        thresholds = 256 - self.magnitude * (256 - drawn["thresholds"])
        return {**drawn, "thresholds": thresholds}


def _rand_augment_layers(magnitude: float) -> list[keras.layers.Layer]:
    """The paper's list but for the identity, with its magnitudes at level 10."""
    layers = keras.layers
    plain = {**_PLAIN, **_CHANNELS_LAST}
    # As in the released code, grey fills what comes from outside the image.
    geometric = {**plain, "fill_mode": "constant", "fill_value": 128.0}
    colour = {**plain, "value_range": VALUE_RANGE}
    shear, shift, blend = 0.3 * magnitude, 100 / 224 * magnitude, 0.9 * magnitude
    bits = 8 - round(4 * magnitude)
    # What one number means differs from layer to layer, hence the pairs. Of shear,
    # Keras draws the sign besides; contrast is in [1 - first, 1 + second].
    return [
        layers.RandomShear(x_factor=(0.0, shear), y_factor=0.0, **geometric),
        layers.RandomShear(x_factor=0.0, y_factor=(0.0, shear), **geometric),
        layers.RandomTranslation(height_factor=0.0, width_factor=shift, **geometric),
        layers.RandomTranslation(height_factor=shift, width_factor=0.0, **geometric),
        layers.RandomRotation(factor=30 / 360 * magnitude, **geometric),
        layers.RandomBrightness(factor=blend, **colour),
        layers.RandomContrast(factor=(blend, blend), **colour),
        layers.RandomColorDegeneration(factor=blend, **colour),
        # One half leaves the image as it is.
        layers.RandomSharpness(factor=(0.5 - blend / 2, 0.5 + blend / 2), **colour),
        layers.RandomPosterization(factor=(bits, bits), **colour),
        ScaledSolarization(magnitude, **colour),
        layers.AutoContrast(**colour),
        CountedEqualization(**colour),
    ]
