"""Batches: images with labels or captions by the name of a dataset, rows of tokens."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_moe._checks import (
    LARGEST_SEED,
    check_bool,
    check_image_shape,
    check_integer,
    check_one_of,
    unfit,
)
from keras_moe.data import _examples
from keras_moe.data._captions import (
    CaptionOptions,
    batch_sizes,
    every_caption,
    first_caption,
    mixed,
    random_caption,
    stored_captions,
)
from keras_moe.data._packages import tf
from keras_moe.data._pipeline import BatchSettings, batches, feature_batches, no_targets
from keras_moe.data._tokens import TokenRows
from keras_moe.data.augmentation import build_steps
from keras_moe.data.selection import UNREADABLE, left_out, without_captions
from keras_moe.data.sources import open_captioned, open_source


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """Shared options: start, sharding and exclusion."""

    repeat: bool = False
    start_batch: int = 0
    shard: tuple[int, int] = (0, 1)
    exclude: Any = ()
    unreadable: str = "raise"

    def __post_init__(self):
        check_bool("repeat", self.repeat)
        check_integer("start_batch", self.start_batch, minimum=0)
        if self.start_batch and not self.repeat:
            expected = "repeat=True with a batch to start at"
            raise unfit(expected, repeat=self.repeat, start_batch=self.start_batch)
        check_one_of("unreadable", self.unreadable, UNREADABLE)

    def share_of(self, batch_size: int) -> _examples.Share:
        """Returns the host's share of batches of this size."""
        index, count = self.shard
        check_integer("shard[1]", count)
        check_integer("shard[0]", index, 0, count - 1)
        if batch_size % count:
            expected = "shards that divide the batch"
            raise unfit(expected, shard=self.shard, batch_size=batch_size)
        return _examples.Share(index, count, batch_size // count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions(_Options):
    """Options of `load` for long runs, several labels, several hosts and bad images.

    Args:
        repeat: whether to repeat the data endlessly, in full batches only.
        start_batch: number of the first batch, with `repeat`. Warns about augmentations
            with their own random state, which cannot continue where they were.
        shard: (index, count) of this host. All hosts have equally many batches of
            different examples; of record files, a host reads only its part. With a
            Keras distribution, set `auto_shard_dataset=False`.
        multi_label: whether examples have several labels: class numbers, sorted and
            padded with -1, for `SparseSigmoidCrossentropy`, or vectors with `one_hot`.
        max_labels: labels after padding, with `multi_label`; default the known maximum.
        exclude: indices of examples to leave out, in the order of the source; or JSON
            files of `write_exclusion`.
        unreadable: `"raise"` raises an error that names the file (see
            `reading_errors`); `"exclude"` first decodes all images, and leaves out
            those that fail, with a warning. To do that once for all runs, use
            `find_unreadable` and `write_exclusion`.

    Example:

    >>> from keras_moe.data import LoadOptions
    >>> LoadOptions(repeat=True, start_batch=100).start_batch
    100
    """

    multi_label: bool = False
    max_labels: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_bool("multi_label", self.multi_label)
        if self.max_labels is not None:
            check_integer("max_labels", self.max_labels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairOptions(_Options):
    """Options of `load_pairs`.

    Args:
        repeat: see `LoadOptions`, also for `start_batch` and `shard`.
        exclude: images to leave out with all their captions, as in `LoadOptions`; for a
            mixture, a dict by source.
        unreadable: how to treat unreadable images, and captions that are missing, empty
            or not UTF-8; see `LoadOptions`.
        captions: how to use several captions of an image: `"random"` draws one in each
            pass, `"first"` always uses the first, `"all"` makes a pair of each.
        templates: captions for a source of classes, with `{}` for the class name: a
            string, a sequence, or a text file with one per line; by default `"{}"`.

    Example:

    >>> from keras_moe.data import PairOptions
    >>> PairOptions(captions="all").captions
    'all'
    """

    captions: str = "random"
    templates: Any = None

    def __post_init__(self):
        super().__post_init__()
        check_one_of("captions", self.captions, ("random", "all", "first"))

    def exclude_of(self, name: str, source: Any) -> Any:
        """Returns `exclude` for the source `name`, which may be part of a mixture."""
        if not isinstance(source, Mapping):
            return self.exclude
        exclude = self.exclude if len(self.exclude) else {}
        if not isinstance(exclude, Mapping) or {*exclude} - {*source}:
            expected = f"exclude as a dict of the sources of a mixture, {[*source]}"
            raise unfit(expected, f"exclude={self.exclude!r:.100}")
        return exclude.get(name, ())


def _settings(
    options: _Options,
    batch_size: int,
    shuffle: bool,
    seed: int,
    drop_remainder: bool,
    image_shape: tuple[int, int, int] | None = None,
    augment: Any = None,
) -> BatchSettings:
    """Checks the arguments that all functions for batches share."""
    if image_shape is not None:
        image_shape = check_image_shape(image_shape)
    check_integer("batch_size", batch_size)
    check_integer("seed", seed, 0, LARGEST_SEED)
    check_bool("drop_remainder", drop_remainder)
    return BatchSettings(
        image_shape=image_shape,
        steps=build_steps(augment, image_shape, seed) if image_shape else [],
        targets=no_targets,
        share=options.share_of(batch_size),
        shuffle=check_bool("shuffle", shuffle),
        seed=int(seed),
        drop_remainder=drop_remainder or options.repeat,
        start_batch=int(options.start_batch) if options.repeat else None,
    )


def _is_shuffled(shuffle: bool | None, split: str) -> bool:
    return split.startswith("train") if shuffle is None else shuffle


def load(
    source: str,
    split: str,
    image_shape: tuple[int, int, int] = (224, 224, 3),
    batch_size: int = 32,
    augment: Any = None,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    one_hot: bool = False,
    drop_remainder: bool = False,
    data_dir: str | None = None,
    **options: Any,
) -> Any:
    """Loads batches of images and labels as a `tf.data.Dataset`, for any backend.

    Images are resized bilinearly without antialiasing, as in published pipelines. Grey
    images are repeated over the channels, and RGB becomes luminance if `image_shape`
    has one channel.

    Order and augmentation follow from the arguments (and TensorFlow's global seed, if
    set) and differ in each pass. With `repeat`, `start_batch=n` exactly skips the first
    n batches; record files are read, but not decoded, up to there.

    Args:
        source: `"digits"`, `"emoji"`, `"fashion_mnist"`, `"tfds:NAME"`,
            `"tfrecord:GLOB"` or `"folder:PATH"`, such as `PATH/train/cat/1.png`; see
            "Sources" in docs/data.md.
        split: `"train"`, `"test"` or another split of the source, see there.
        image_shape: (height, width, channels) of the images.
        batch_size: number of images in a batch, over all shards.
        augment: an augmentation, or a sequence applied in order: `"flip"`,
            `"random_resized_crop"`, `"randaugment"`, `"mixup"`, `"cutmix"`,
            `"translation"` or `"rotation"`; a dict of a name and options, such as
            `{"name": "mixup", "alpha": 0.5}`; a layer of Keras or KerasCV; or a
            function. See "Augmentation" in docs/data.md.
        shuffle: whether the order is random; None for splits that begin with "train".
        seed: seed of order and augmentation, but not of the splits.
        one_hot: whether labels are one-hot vectors, or 0-1 vectors with `multi_label`;
            always true if labels are mixed.
        drop_remainder: whether to drop an incomplete last batch.
        data_dir: folder of TensorFlow Datasets, or with Fashion-MNIST's files.
        **options: fields of `LoadOptions`: `repeat`, `start_batch`, `shard`,
            `multi_label`, `max_labels`, `exclude`, `unreadable`.

    Returns:
        A `tf.data.Dataset` of (images, labels): float32 (batch, height, width,
        channels) in [-1, 1]; int32 (batch,) or (batch, max_labels), or float32 (batch,
        classes).

    Example:

    ```python
    shape = (32, 32, 3)
    train = load("digits", "train", shape, augment=["randaugment", "mixup"])
    model.fit(train, validation_data=load("digits", "test", shape, one_hot=True))
    ```
    """
    chosen = LoadOptions(**options)
    shuffle = _is_shuffled(shuffle, split)
    settings = _settings(
        chosen, batch_size, shuffle, seed, drop_remainder, image_shape, augment
    )
    examples = open_source(source, split, data_dir)
    dense = check_bool("one_hot", one_hot) or settings.mixes_labels
    labels = _examples.make_labels(
        examples.classes or _examples.Classes(0), source, chosen, dense
    )
    excluded = left_out(examples, split, chosen.exclude, chosen.unreadable)
    return batches(examples.without(excluded), settings._replace(targets=labels))


def load_pairs(
    source: Any,
    split: str,
    image_shape: tuple[int, int, int] = (224, 224, 3),
    batch_size: int = 32,
    tokenizer: Callable[[Any], dict] | None = None,
    *,
    augment: Any = None,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_remainder: bool = False,
    data_dir: str | None = None,
    **options: Any,
) -> Any:
    """Loads batches of images and captions as a `tf.data.Dataset`, for any backend.

    Order, seeds, shards and resumption work as in `keras_moe.data.load`.

    Args:
        source: `"emoji"`, `"folder:PATH"`, `"webdataset:GLOB"`, `"tfrecord:GLOB"`,
            `"tfds:NAME"`, or any source of `load`, whose class names become captions
            by `templates`; see "Sources" in docs/data.md. Or a tuple of images in
            memory, uint8 (images, height, width, channels), and captions, one or more
            strings per image. Or a dict from names to weights, such as
            `{"tfds:coco_captions": 3, "emoji": 1}`: a mixture in which each batch has
            3 pairs of the first source for each pair of the second. Needs `repeat`.
        split: split of the source, see there; ignored for arrays.
        image_shape: (height, width, channels) of the images.
        batch_size: number of pairs in a batch, over all shards.
        tokenizer: function from a string tensor (batch,) to a dict of `"token_ids"` and
            `"padding_mask"`, such as `keras_moe.models.TextTokenizer`; None for
            captions as strings.
        augment: see `load`; must not mix labels. Captions do not change, so a flip
            makes "left" and "right" wrong.
        shuffle: see `load`, also for `drop_remainder` and `data_dir`.
        seed: seed of order, captions and augmentation.
        **options: fields of `PairOptions`: `repeat`, `start_batch`, `shard`, `exclude`,
            `unreadable`, `captions`, `templates`.

    Returns:
        A `tf.data.Dataset` of `(inputs, ids)`. `inputs` has `"images"`, float32 (batch,
        height, width, channels) in [-1, 1], and `"token_ids"`, int32 (batch, tokens),
        with `"padding_mask"`, bool (batch, tokens); or without a tokenizer
        `"captions"`, strings (batch,). `ids` has `"image_ids"` and `"text_ids"`, int32
        (batch,), equal for equal images and captions.

    Example:

    >>> from keras_moe.data import load_pairs
    >>> images = np.zeros((2, 8, 8, 3), "uint8")
    >>> pairs = load_pairs((images, ["a cat", "a dog"]), "test", (8, 8, 3))
    >>> inputs, ids = next(iter(pairs))
    >>> inputs["captions"].numpy().tolist(), ids["text_ids"].numpy().tolist()
    ([b'a cat', b'a dog'], [0, 1])
    """
    chosen = PairOptions(**options)
    shuffle = _is_shuffled(shuffle, split)
    settings = _settings(
        chosen, batch_size, shuffle, seed, drop_remainder, image_shape, augment
    )
    if settings.mixes_labels:
        expected = "augmentation of the images alone, which mixes no labels"
        raise unfit(expected, augment=augment)
    is_mixture = isinstance(source, Mapping)
    if is_mixture and not chosen.repeat:
        expected = "repeat=True with a mixture, whose sources end at different batches"
        raise unfit(expected, f"repeat=False, source={dict(source)}")
    sizes = [batch_size]
    if is_mixture:
        sizes = list(batch_sizes(source, batch_size, settings.share.count).values())
    choice = random_caption if chosen.captions == "random" else first_caption
    datasets = []
    opened = _open_pairs(source, split, chosen, data_dir, settings.image_shape)
    for number, (examples, size) in enumerate(zip(opened, sizes)):
        # Sources of equal length in a mixture have different orders.
        own = settings._replace(
            targets=choice, share=chosen.share_of(size), seed=settings.seed + number
        )
        datasets.append(batches(_pairs(examples, source, split, chosen), own))
    return _tokenized(mixed(datasets) if is_mixture else datasets[0], tokenizer)


def _tokenized(dataset, tokenizer):
    """Returns (inputs, ids) of batches of images and texts."""

    def arranged(images, texts):
        texts = dict(texts)
        ids = {name: texts.pop(name) for name in ("image_ids", "text_ids")}
        if tokenizer is not None:
            texts = tokenizer(texts["captions"])
        return {"images": images, **texts}, ids

    dataset = dataset.map(arranged, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.prefetch(tf.data.AUTOTUNE)


def num_examples(
    source: str,
    split: str,
    data_dir: str | None = None,
    exclude: Any = (),
    unreadable: str = "raise",
) -> int:
    """Counts the examples in a split of a source of `load`.

    Args:
        source: a source of `load`, see there for `split` and `data_dir`.
        exclude: examples not to count; see `LoadOptions`, also for `unreadable`.

    Example:

    >>> from keras_moe.data import num_examples
    >>> num_examples("digits", "test")
    450
    """
    examples = open_source(source, split, data_dir)
    return examples.count - len(left_out(examples, split, exclude, unreadable))


def num_pairs(
    source: Any, split: str, data_dir: str | None = None, **options: Any
) -> int:
    """Counts the images (or captions, with `captions="all"`) in a pass of `load_pairs`.

    Args:
        source: see `load_pairs` for this and the other arguments.

    Example:

    >>> from keras_moe.data import num_pairs
    >>> pairs = np.zeros((2, 8, 8, 3), "uint8"), ["a cat", ["a dog", "a puppy"]]
    >>> num_pairs(pairs, "test"), num_pairs(pairs, "test", captions="all")
    (2, 3)
    """
    chosen = PairOptions(**options)
    opened = _open_pairs(source, split, chosen, data_dir)
    return sum(_pairs(examples, source, split, chosen).count for examples in opened)


def load_captions(
    source: Any, split: str, data_dir: str | None = None, **options: Any
) -> tuple[str, ...]:
    """Loads all captions of a source in order, without images, e.g. for a tokenizer.

    Args:
        source: see `load_pairs` for this and the other arguments. Captions of
            unreadable images are included.

    Example:

    >>> from keras_moe.data import load_captions
    >>> images = np.zeros((2, 8, 8, 3), "uint8")
    >>> load_captions((images, ["a cat", ["a dog", "a puppy"]]), "test")
    ('a cat', 'a dog', 'a puppy')
    """
    chosen = PairOptions(**options)
    captions: list[tuple[str, ...]] = []
    for examples in _open_pairs(source, split, chosen, data_dir):
        exclude = chosen.exclude_of(examples.name, source)
        excluded = without_captions(examples, split, exclude, chosen.unreadable)
        texts = examples.captions.texts
        if texts is None:
            skip = chosen.unreadable == "exclude"
            captions += stored_captions(examples.without(excluded), skip)
        elif examples.captions.of_classes:
            captions += texts
        else:
            kept = np.delete(np.arange(len(texts)), excluded)
            captions += [texts[i] for i in kept.tolist()]
    return tuple(caption for several in captions for caption in several)


def _open_pairs(
    source, split, options, data_dir, image_shape=(32, 32, 3)
) -> list[_examples.Examples]:
    """Opens the sources of pairs; counts and captions need no image size."""
    asked = CaptionOptions(
        image_shape, options.captions == "all", options.templates, data_dir
    )
    return open_captioned(source, split, asked)


def _pairs(examples, source, split, options) -> _examples.Examples:
    """Returns the pairs of a source that are not left out."""
    exclude = options.exclude_of(examples.name, source)
    excluded = left_out(examples, split, exclude, options.unreadable)
    if options.captions == "all":
        return every_caption(examples, excluded)
    return examples.without(excluded)


def load_rows(
    rows: Any,
    batch_size: int,
    weights: Mapping[str, float] | None = None,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_remainder: bool = False,
    repeat: bool = False,
    start_batch: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> Any:
    """Makes batches of rows as a `tf.data.Dataset`, for any backend.

    Args:
        rows: dict of integer arrays of one length, such as `keras_moe.models.pack`
            returns; or with `weights`, a dict of these by source.
        batch_size: number of rows in a batch, over all shards.
        weights: weight of each source of a mixture: with `{"books": 3, "code": 1}` each
            batch has 3 rows of the books for each row of the code. Needs `repeat`.
        shuffle: whether the order is random, another one in each pass.
        seed: seed of the order.
        drop_remainder: whether to drop an incomplete last batch.
        repeat: see `LoadOptions`, also for `start_batch` and `shard`.

    Returns: A `tf.data.Dataset` of dicts of int32 (B, ...).

    Example:

    >>> from keras_moe.data import load_rows
    >>> rows = {"token_ids": np.array([[5, 6], [7, 8], [9, 5]])}
    >>> batches = load_rows(rows, batch_size=2, shuffle=False)
    >>> [batch["token_ids"].tolist() for batch in batches.as_numpy_iterator()]
    [[[5, 6], [7, 8]], [[9, 5]]]
    """
    options = LoadOptions(repeat=repeat, start_batch=start_batch, shard=shard)
    settings = _settings(options, batch_size, shuffle, seed, drop_remainder)
    sizes, sources = {"": batch_size}, {"": rows}
    if weights is not None:
        if not repeat or {*weights} != {*rows}:
            raise ValueError(
                "Expected repeat=True with a mixture, and a weight for each source; "
                f"received: repeat={repeat}, weights={dict(weights)}, rows of {[*rows]}"
            )
        sizes, sources = batch_sizes(weights, batch_size, shard[1]), rows
    datasets = [
        _row_batches(
            sources[name],
            name or "the rows",
            # Sources of equal length have different orders.
            settings._replace(
                share=options.share_of(size), seed=settings.seed + number
            ),
        )
        for number, (name, size) in enumerate(sizes.items())
    ]
    if len(datasets) == 1:
        return datasets[0]
    # Rows of one batch in the order of the sources.
    return tf.data.Dataset.zip(tuple(datasets)).map(
        lambda *batches: tf.nest.map_structure(
            lambda *parts: tf.concat(parts, axis=0), *batches
        )
    )


def _row_batches(rows, name, settings):
    if isinstance(rows, TokenRows):
        return rows.batches(name, settings)
    arrays = {key: np.asarray(value) for key, value in rows.items()}
    if len({len(array) for array in arrays.values()}) != 1:
        expected = "rows as a dict of arrays of one length"
        raise unfit(expected, {key: array.shape for key, array in arrays.items()})
    for key, array in arrays.items():
        if array.dtype.kind not in "biu" or (
            array.size and not -(2**31) <= array.min() <= array.max() < 2**31
        ):
            expected = f"{key} to be integers of 32 bits"
            raise unfit(expected, f"dtype={array.dtype}, up to {array.max(initial=0)}")
    tensors = {key: tf.constant(array) for key, array in arrays.items()}
    examples = _examples.IndexedExamples(
        len(next(iter(arrays.values()))),
        lambda index: {
            key: tf.cast(tensor[index], "int32") for key, tensor in tensors.items()
        },
        decode=_examples.as_stored,
        name=name,
    )
    return feature_batches(examples, settings)
