"""Batches of examples: their order, decoding, augmentation and batching."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from keras_moe.data.augmentation import Step
from keras_moe.data.examples import IndexedExamples, RecordExamples, Share
from keras_moe.data.random_resized_crop import RandomResizedCrop
from keras_moe.data.reading import map_or_name


class BatchSettings(NamedTuple):
    """How `batches` makes batches of examples."""

    image_shape: tuple[int, int, int]
    steps: list[Step]
    labels: Callable[[Any, Any], Any]
    share: Share
    shuffle: bool
    seed: int
    drop_remainder: bool
    start_batch: int | None


def batches(examples: IndexedExamples | RecordExamples, settings: BatchSettings) -> Any:
    """A `tf.data.Dataset` of batches, images in [-1, 1].

    Each example carries a key of two integers: one for the pass over the data, and one
    for its place therein. All randomness of an augmentation follows from the key.
    """
    import tensorflow as tf

    height, width, channels = settings.image_shape
    # Augmentation works on batches from the first step on that mixes labels.
    first_mixer = [step.mixes_labels for step in settings.steps] + [True]
    per_image = list(enumerate(settings.steps))[: first_mixer.index(True)]
    per_batch = list(enumerate(settings.steps))[len(per_image) :]

    # A crop comes first only where it sees the image at its full size.
    crop = per_image.pop(0) if per_image and per_image[0][1].crop else None
    # Steps that need no order are one function: an image is still in the cache.
    is_stateless = [step.is_stateless for _, step in per_image] + [False]
    at_once = per_image[: is_stateless.index(False)]
    one_by_one = per_image[len(at_once) :]

    def read(placed, number_of_pass):
        position, item = placed
        key = tf.stack([number_of_pass, position])
        stored, labels = examples.read(item)
        seed = None if crop is None else key_seed(key, crop[0])
        if crop is not None and _decodes_in_part(examples, crop[1]):
            pixels = examples.decoded(
                item,
                stored,
                lambda stored: crop[1].crop.decode(
                    stored, examples.decode, examples.encoded_channels, seed
                ),
            )
            pixels = _to_channels(tf, pixels, channels)
        else:
            pixels = tf.cast(examples.decoded(item, stored), "float32")
            pixels = _to_channels(tf, pixels, channels)
            if crop is not None:
                pixels, _ = crop[1].function(pixels, None, seed)
        pixels = tf.image.resize(pixels, (height, width))
        return pixels, settings.labels(labels, key), key

    def prepare(pixels, labels, key):
        for number, step in at_once:
            pixels, labels = step.function(pixels, labels, key_seed(key, number))
        if not one_by_one and not per_batch:
            pixels = scaled(pixels)
        return pixels, labels, key

    def scaled(images):
        if not all(step.keeps_range for step in settings.steps):
            images = tf.clip_by_value(images, 0.0, 255.0)
        return images * (1 / 127.5) - 1.0

    parallel = {"num_parallel_calls": tf.data.AUTOTUNE}
    dataset, again = _passes(tf, examples, settings)
    if examples.place is None:
        dataset = dataset.map(lambda x, _: prepare(*read(*x)), **parallel)
    else:
        dataset = map_or_name(dataset, read, prepare, again)
    dataset = _augmented(tf, dataset, one_by_one)
    dataset = dataset.batch(
        settings.share.batch_size, drop_remainder=settings.drop_remainder
    )
    dataset = _augmented(tf, dataset, per_batch)
    if one_by_one or per_batch:
        dataset = dataset.map(lambda x, y, _: (scaled(x), y), **parallel)
    else:
        dataset = dataset.map(lambda x, y, _: (x, y))
    return dataset.prefetch(tf.data.AUTOTUNE)


def _passes(tf, examples, settings: BatchSettings):
    """One pass, or passes without end, and a function that finds an element again.

    The elements are (((position, item), pass), number), where the number is that of
    the pass before it was mixed. The function is of the number of an element and of
    that of its pass, and returns a data set of ((position, item), pass).
    """
    share = settings.share
    rest = examples.count % (share.batch_size * share.count)
    per_pass = examples.count // (share.batch_size * share.count)
    endless = settings.start_batch is not None
    if endless:
        first, skipped = divmod(settings.start_batch, per_pass)
        if settings.start_batch and not all(
            step.is_stateless for step in settings.steps
        ):
            warnings.warn(
                "Augmentations with a random state of their own do not go on where "
                "they were: these batches are not those of a run without a break",
                stacklevel=4,
            )
        numbers = tf.data.Dataset.range(first, tf.int64.max)
    else:
        first, skipped = 0, 0
        # The number differs in every pass over the data set, and not by process.
        numbers = tf.data.Dataset.random(
            seed=settings.seed, rerandomize_each_iteration=True
        ).take(1)
    length = per_pass * share.batch_size
    if not endless and not settings.drop_remainder:
        begin, end = share.bounds(rest)
        length += end - begin
    skipped *= share.batch_size

    def one_pass(number, start):
        seed = tf.stack([tf.constant(settings.seed, "int64"), number])
        dataset = examples.pass_over(
            share,
            seed if settings.shuffle else None,
            tf.cast(start, "int64"),
            length,
        )
        # A function is not needed here, and would not run in parallel.
        number_of_pass = tf.data.Dataset.from_tensors(_mixed(tf, seed)).repeat()
        return tf.data.Dataset.zip((dataset, number_of_pass))

    def with_number(number):
        start = tf.where(number == first, skipped, 0) if skipped else 0
        repeated = tf.data.Dataset.from_tensors(number).repeat()
        return tf.data.Dataset.zip((one_pass(number, start), repeated))

    def again(element, number):
        element += skipped
        if endless:
            number = first + element // length
        return one_pass(number, element % length).take(1)

    count = tf.data.INFINITE_CARDINALITY if endless else length
    dataset = numbers.flat_map(with_number)
    return dataset.apply(tf.data.experimental.assert_cardinality(count)), again


def _augmented(tf, dataset, steps: list[tuple[int, Step]]):
    """Applies steps, given with their numbers, to images or to batches."""
    # Each has a map, since only those without a random state may run in parallel.
    for number, step in steps:

        def apply(images, labels, key, step=step, number=number):
            # A batch has the key of its first image.
            seed = key_seed(tf.reshape(key, [-1, 2])[0], number)
            return (*step.function(images, labels, seed), key)

        parallel = tf.data.AUTOTUNE if step.is_stateless else None
        dataset = dataset.map(apply, num_parallel_calls=parallel)
    return dataset


def key_seed(key: Any, number: int) -> Any:
    """The seed of a step: steps share the key of an image, but not their seeds."""
    import tensorflow as tf

    return tf.stack([_mixed(tf, key, "int32"), number])


def _mixed(tf, seed, dtype="int64"):
    """One random number made from the two of a seed."""
    return tf.random.stateless_uniform([], seed, None, None, dtype)


def _decodes_in_part(examples, step: Step) -> bool:
    """Whether a crop may be decoded by itself: a subclass may have its own call."""
    is_plain = type(step.crop).__call__ is RandomResizedCrop.__call__
    return examples.encoded_channels is not None and is_plain


def _to_channels(tf, pixels, channels: int):
    own = pixels.shape[-1]
    if own == channels:
        return pixels
    if own == 1:
        return tf.repeat(pixels, channels, axis=-1)
    if (own, channels) == (3, 1):
        return tf.image.rgb_to_grayscale(pixels)
    raise ValueError(
        "Expected as many channels as the images have, or grey images, or one channel; "
        f"received: image_shape with {channels} channels for images with {own}"
    )
