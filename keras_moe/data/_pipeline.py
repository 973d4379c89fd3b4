"""Batches of examples: passes over the data, decoding, augmentation and batching."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from keras_moe._checks import unfit
from keras_moe._types import Tensor
from keras_moe.data._examples import Examples, Share
from keras_moe.data._packages import tf
from keras_moe.data.augmentation import RandomResizedCrop, Step
from keras_moe.data.reading import map_or_name

# Endless reading is done in runs of full passes with at least this many examples. A run
# in which nothing can be read ends with an error. Starting a run takes milliseconds.
_EXAMPLES_OF_A_RUN = 20_000


class BatchSettings(NamedTuple):
    """How `batches` makes batches of examples; see `load`."""

    # None without images.
    image_shape: tuple[int, int, int] | None
    steps: list[Step]
    # From features and key to what accompanies the images.
    targets: Callable[[dict[str, Any], Any], Any]
    share: Share
    shuffle: bool
    seed: int
    drop_remainder: bool
    # First batch of endless passes; None for a single pass.
    start_batch: int | None

    @property
    def mixes_labels(self) -> bool:
        return any(step.mixes_labels for step in self.steps)


def batches(examples: Examples, settings: BatchSettings) -> Any:
    """Returns a `tf.data.Dataset` of batches (images, targets), images in [-1, 1]."""
    _check_count(examples, settings)
    # From the first step that mixes labels on, augmentation works on batches.
    first_mixer = [step.mixes_labels for step in settings.steps] + [True]
    per_image = list(enumerate(settings.steps))[: first_mixer.index(True)]
    per_batch = list(enumerate(settings.steps))[len(per_image) :]
    # A crop is done while decoding only if it is the first step.
    crop = per_image.pop(0) if per_image and per_image[0][1].crop else None
    # Steps without random state share one map, while the image is in the cache.
    is_stateless = [step.is_stateless for _, step in per_image] + [False]
    at_once = per_image[: is_stateless.index(False)]
    one_by_one = per_image[len(at_once) :]

    def prepare(element, number_of_pass):
        position, item = element
        # All randomness of an example's augmentation follows from this.
        key = tf.stack([number_of_pass, position])
        features = examples.read(item)
        stored = features.pop("image")
        pixels = _pixels(examples, item, stored, key, crop, settings.image_shape)
        targets = settings.targets(features, key)
        for number, step in at_once:
            pixels, targets = step.function(pixels, targets, key_seed(key, number))
        if not one_by_one and not per_batch:
            pixels = scaled(pixels)
        return pixels, targets, key

    def scaled(images):
        if settings.steps:
            images = tf.clip_by_value(images, 0.0, 255.0)
        return images * (1 / 127.5) - 1.0

    if settings.start_batch and not all(step.is_stateless for step in settings.steps):
        warnings.warn(
            "Augmentations with their own random state do not continue where they "
            "were: these batches differ from those of an uninterrupted run",
            stacklevel=3,
        )
    dataset = _prepared(examples, settings, prepare)
    dataset = _augmented(dataset, one_by_one)
    dataset = dataset.batch(
        settings.share.batch_size, drop_remainder=settings.drop_remainder
    )
    dataset = _augmented(dataset, per_batch)
    if one_by_one or per_batch:
        dataset = dataset.map(
            lambda x, y, _: (scaled(x), y), num_parallel_calls=tf.data.AUTOTUNE
        )
    else:
        dataset = dataset.map(lambda x, y, _: (x, y))
    return dataset.prefetch(tf.data.AUTOTUNE)


def feature_batches(examples: Examples, settings: BatchSettings) -> Any:
    """Returns a `tf.data.Dataset` of batches of features, without images."""
    _check_count(examples, settings)
    dataset = _prepared(examples, settings, lambda item, _: examples.read(item[1]))
    return dataset.batch(
        settings.share.batch_size, drop_remainder=settings.drop_remainder
    ).prefetch(tf.data.AUTOTUNE)


def no_targets(features: dict[str, Any], key: Tensor) -> None:
    """Returns nothing that accompanies the images."""


def _check_count(examples: Examples, settings: BatchSettings) -> None:
    share = settings.share
    count, batch_size = examples.count, share.batch_size * share.count
    if (settings.start_batch is not None and count < batch_size) or (
        not settings.drop_remainder and 0 < count % batch_size < share.count
    ):
        raise ValueError(
            "Expected a batch no larger than the examples, and an example of a last "
            f"batch for each shard or drop_remainder=True; there are {count} examples "
            f"of {examples.name!r}; received: batch_size={batch_size}, "
            f"shard={(share.index, share.count)}"
        )


def _pixels(examples, item, stored, key, crop, image_shape):
    """Reads an image at the batch's size, after an optional crop."""
    height, width, channels = image_shape

    def whole():
        pixels = tf.cast(examples.decoded(item, stored), "float32")
        return _to_channels(pixels, channels)

    if crop is None:
        return tf.image.resize(whole(), (height, width))
    number, step = crop
    seed = key_seed(key, number)
    # Subclasses of the crop may override `__call__`, which expects the full image.
    is_plain = type(step.crop).__call__ is RandomResizedCrop.__call__
    stored_channels = examples.encoded_channels
    if is_plain and stored_channels is not None:

        def decode(stored):
            return step.crop.decode(stored, examples.decode, stored_channels, seed)

        pixels = examples.decoded(item, stored, decode)
        pixels = _to_channels(pixels, channels)
    else:
        pixels, _ = step.function(whole(), None, seed)
    return tf.image.resize(pixels, (height, width))


class _Passes:
    """Passes over the examples; elements are ((position, item), pass number)."""

    def __init__(self, examples: Examples, settings: BatchSettings):
        self.examples, self.settings = examples, settings
        share = settings.share
        per_pass, rest = divmod(examples.count, share.batch_size * share.count)
        self.length = per_pass * share.batch_size
        self.endless = settings.start_batch is not None
        if settings.start_batch is not None:
            first, batches_before = divmod(settings.start_batch, per_pass)
            self.first, self.skipped = first, batches_before * share.batch_size
            # Reading from memory cannot fail, so a single run is enough.
            whole = -(-_EXAMPLES_OF_A_RUN // self.length)
            self.passes = 2**40 if examples.location is None else whole
            self.runs = tf.data.Dataset.range(tf.int64.max)
            self.cardinality = tf.data.INFINITE_CARDINALITY
            return
        if not settings.drop_remainder:
            begin, end = share.bounds(rest)
            self.length += end - begin
        # The number differs in every pass over the dataset, but not by process.
        self.runs = tf.data.Dataset.random(
            seed=settings.seed, rerandomize_each_iteration=True
        ).take(1)
        self.cardinality = self.length

    def count(self, run: Tensor) -> Tensor | int:
        if not self.endless:
            return self.length
        return self.passes * self.length - self._skipped(run)

    def elements(self, run: Tensor, start: Tensor) -> Any:
        """Returns the elements of a run from index `start` on."""
        if not self.endless:
            return self._one_pass(run, start)
        start += self._skipped(run)
        begin = self.first + run * self.passes
        current = begin + start // self.length
        numbers = tf.data.Dataset.range(current, begin + self.passes)
        return numbers.flat_map(
            lambda number: self._one_pass(
                number, tf.where(number == current, start % self.length, 0)
            )
        )

    def _skipped(self, run):
        return tf.where(run == 0, tf.constant(self.skipped, "int64"), 0)

    def _one_pass(self, number, start):
        settings = self.settings
        seed = tf.stack([tf.constant(settings.seed, "int64"), number])
        order = seed if settings.shuffle else None
        dataset = self.examples.pass_over(settings.share, order, start, self.length)
        # Zipped, because a map here would not run in parallel.
        number_of_pass = tf.data.Dataset.from_tensors(_mixed(seed)).repeat()
        return tf.data.Dataset.zip((dataset, number_of_pass))


def _prepared(examples: Examples, settings: BatchSettings, prepare: Callable):
    passes = _Passes(examples, settings)

    def elements(run):
        return passes.elements(run, tf.constant(0, "int64"))

    def named(run):
        return map_or_name(
            elements(run), passes.count(run), prepare, lambda n: passes.elements(run, n)
        )

    if examples.location is None:
        dataset = passes.runs.flat_map(elements)
        dataset = dataset.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        dataset = passes.runs.flat_map(named)
    return dataset.apply(tf.data.experimental.assert_cardinality(passes.cardinality))


def _augmented(dataset, steps: list[tuple[int, Step]]):
    """Applies numbered steps to images or to batches."""
    # One map per step, because only those without a random state may run in parallel.
    for number, step in steps:

        def apply(images, targets, key, step=step, number=number):
            # A batch has the key of its first image.
            seed = key_seed(tf.reshape(key, [-1, 2])[0], number)
            return (*step.function(images, targets, seed), key)

        parallel = tf.data.AUTOTUNE if step.is_stateless else None
        dataset = dataset.map(apply, num_parallel_calls=parallel)
    return dataset


def key_seed(key: Tensor, number: int) -> Tensor:
    return tf.stack([_mixed(key, "int32"), number])


def _mixed(seed, dtype="int64"):
    """Combines two random numbers into one."""
    return tf.random.stateless_uniform([], seed, None, None, dtype)


def _to_channels(pixels, channels: int):
    own = pixels.shape[-1]
    if own == channels:
        return pixels
    if own == 1:
        return tf.repeat(pixels, channels, axis=-1)
    if (own, channels) == (3, 1):
        return tf.image.rgb_to_grayscale(pixels)
    expected = "as many channels as the images have, or grey images, or one channel"
    raise unfit(expected, f"image_shape with {channels} channels for images with {own}")
