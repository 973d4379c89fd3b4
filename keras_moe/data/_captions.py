"""Captions of images: validation, ids, and choosing one caption per pair.

Features of an example with K captions: "image_ids", int32 (), and "text_ids", int32
(K,), equal for equal images and captions; and either "captions", string (K,), or stored
"token_ids", int32 (K, N), with "padding_mask", bool (K, N).
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from keras_moe.checks import check_positive
from keras_moe.data._examples import (
    CaptionInfo,
    Examples,
    IndexedExamples,
    RecordExamples,
    RecordFile,
)
from keras_moe.data._pipeline import key_seed
from keras_moe.data.reading import attempt, read_or_name, reading_errors
from keras_moe.templates import PLACE, fill, read_templates

# Keys of captions in CSV, JSON and JSONL files, in order of precedence.
CAPTION_NAMES = ("captions", "caption", "text")
CHOICES = ("random", "all", "first")
# Seed number of the caption draw, different from those of augmentation steps.
_DRAW = -1
_EXPECTED = "an example with an image, and with captions in UTF-8, none of them empty"


class CaptionOptions(NamedTuple):
    """Options of a source with captions.

    Fields:
        image_shape: shape of the images in the batches.
        every_caption: whether each caption becomes a pair.
        templates: caption templates for a source of classes, or None.
        data_dir: folder of TensorFlow Datasets.
    """

    image_shape: tuple[int, int, int] = (32, 32, 3)
    every_caption: bool = False
    templates: Any = None
    data_dir: str | None = None


class CaptionChoice(NamedTuple):
    """Chooses one caption per image: drawn by the image's key, or the first."""

    is_random: bool

    def __call__(self, texts: dict[str, Any], key: Any) -> dict[str, Any]:
        """Returns the caption of a pair as TensorFlow tensors."""
        import tensorflow as tf

        if not self.is_random:
            return select_caption(texts, 0)
        count = tf.shape(texts["text_ids"])[0]
        seed = key_seed(key, _DRAW)
        which = tf.random.stateless_uniform([], seed, 0, count, "int32")
        return select_caption(texts, which)


def select_caption(texts: dict[str, Any], which: Any) -> dict[str, Any]:
    """Indexes the caption axis K of all text features."""
    return {
        name: value if name in ("image", "image_ids") else value[which]
        for name, value in texts.items()
    }


class _CaptionTable:
    """All captions in memory; equal captions share an id."""

    def __init__(self, captions: Iterable[tuple[str, ...]]):
        import tensorflow as tf

        captions = list(captions)
        self.counts = np.array([len(several) for several in captions], "int64")
        flat = [caption for several in captions for caption in several]
        numbers: dict[str, int] = {}
        ids = [numbers.setdefault(caption, len(numbers)) for caption in flat]
        self._flat = tf.constant([encoded(caption) for caption in flat], "string")
        self._ids = tf.constant(ids, "int32")
        self._ends = tf.constant(np.concatenate([[0], np.cumsum(self.counts)]), "int64")

    def texts(self, row: Any, image_id: Any) -> dict[str, Any]:
        """Returns the caption features of a row."""
        import tensorflow as tf

        some = slice(self._ends[row], self._ends[row + 1])
        return {
            "image_ids": tf.cast(image_id, "int32"),
            "text_ids": self._ids[some],
            "captions": self._flat[some],
        }


def encoded(caption: str) -> bytes:
    """Encodes a caption as UTF-8 and keeps undecodable bytes."""
    return caption.encode(errors="surrogateescape")


def checked_captions(captions: Any) -> tuple[tuple[str, ...], str | None]:
    """Returns the captions of an image, and None or why they are unusable."""
    if not isinstance(captions, (list, tuple, np.ndarray)):
        captions = [captions]
    texts = []
    for caption in captions:
        if caption is None:
            return ("",), "no caption"
        if isinstance(caption, bytes):
            caption = caption.decode(errors="surrogateescape")
        if not isinstance(caption, str):
            return ("",), f"no string for a caption: {caption!r:.50}"
        try:
            caption.encode()
        except UnicodeEncodeError:
            return ("",), f"a caption that is not UTF-8: {caption!r:.50}"
        if not caption.strip():
            return ("",), "an empty caption"
        texts.append(str(caption).strip())
    return (tuple(texts), None) if texts else (("",), "no caption")


def _equal_ids(contents: Any) -> Any:
    """Hashes contents to int32 ids that are equal for equal contents.

    Two different contents collide with probability 1 / 2 ** 31.
    """
    import tensorflow as tf

    if contents.dtype != tf.string:
        texts = tf.strings.as_string(contents)
        contents = tf.strings.reduce_join(texts, axis=-1, separator=",")
    ids = tf.strings.to_hash_bucket_fast(contents, 2**31 - 1)
    return tf.cast(ids, "int32")


def captioned(
    captions: Sequence[Any],
    read: Callable,
    decode: Callable,
    place: Callable | None = None,
    places: Sequence[str] | None = None,
    faults: dict[int, str] | None = None,
) -> IndexedExamples:
    """Examples with captions in memory and images from `read`.

    With `place`, images are files, which are decoded to three channels.
    """
    checked, faults = [], dict(faults or {})
    for index, several in enumerate(captions):
        texts, fault = checked_captions(several)
        checked.append(texts)
        if fault is not None and index not in faults:
            image = f"image {index}" if places is None else places[index]
            faults[index] = f"{image} has {fault}"
    table = _CaptionTable(checked)
    return IndexedExamples(
        len(checked),
        lambda index: {"image": read(index), **table.texts(index, index)},
        decode,
        captions=CaptionInfo(checked, table.counts, faults),
        encoded_channels=None if place is None else 3,
        place=place,
    )


def captioned_arrays(images: Any, captions: Sequence[Any]) -> IndexedExamples:
    """Examples from an array of images with one or more captions each."""
    import tensorflow as tf

    images = np.asarray(images)
    if images.ndim != 4 or images.dtype != np.uint8 or images.shape[-1] not in (1, 3):
        raise ValueError(
            "Expected images of uint8 (images, height, width, 1 or 3); received: "
            f"shape={images.shape}, dtype={images.dtype}"
        )
    captions = [captions] if isinstance(captions, (str, bytes)) else list(captions)
    if len(images) != len(captions) or not captions:
        raise ValueError(
            "Expected a caption, or a sequence of captions, for each image; received: "
            f"{len(images)} images, {len(captions)} captions"
        )
    pixels = tf.constant(images)
    return captioned(captions, lambda index: pixels[index], lambda stored: stored)


def captioned_records(
    files: Sequence[RecordFile],
    parse: Callable,
    decode: Callable,
    encoded_channels: int,
    every_caption: bool,
) -> Examples:
    """Examples from record files that hold images with captions or tokens.

    `parse` maps a record to a stored image and a dict of "captions" or tokens.
    """
    import tensorflow as tf

    def features(record):
        stored, several = parse(record)
        rows = next(iter(several.values()))
        checks = [tf.debugging.Assert(tf.shape(rows)[0] > 0, ["no caption"])]
        if "captions" in several:
            # TensorFlow raises an error for captions that are not UTF-8.
            read = tf.strings.unicode_transcode(rows, "UTF-8", "UTF-8", "strict")
            is_text = tf.strings.length(tf.strings.strip(read)) > 0
            checks += [read, tf.debugging.Assert(tf.reduce_all(is_text), ["empty"])]
        with tf.control_dependencies(checks):
            stored = tf.identity(stored)
            ids = {"image_ids": _equal_ids(stored), "text_ids": _equal_ids(rows)}
        return {"image": stored, **ids, **several}

    examples = RecordExamples(
        files,
        lambda record, place: read_or_name(features, record, _EXPECTED, place),
        decode,
        captions=CaptionInfo(),
        encoded_channels=encoded_channels,
    )
    if not every_caption:
        return examples
    indexed = examples.indexed()
    indexed.captions = CaptionInfo(counts=_counts(examples, parse))
    # The number of the record instead of the hash that streams use.
    return _with_features(
        indexed, lambda index, read: {**read, "image_ids": tf.cast(index, "int32")}
    )


def _counts(examples: RecordExamples, parse: Callable) -> np.ndarray:
    """Counts each image's captions as at least 1: reading none is an error."""
    import tensorflow as tf

    def count(_, item):
        def of_record(record):
            return tf.shape(next(iter(parse(record)[1].values())))[0]

        number = attempt(of_record, item[0], lambda *_: tf.constant(1))
        return tf.maximum(number, 1)

    dataset = examples.all_items()
    dataset = dataset.map(count, num_parallel_calls=tf.data.AUTOTUNE)
    with reading_errors():
        return np.array(list(dataset.as_numpy_iterator()), "int64")


def captions_of_classes(examples: Examples, options: CaptionOptions) -> Examples:
    """Turns class names into captions by templates.

    Reference: *Multimodal Contrastive Learning with LIMoE*, appendix A.3.
    """
    templates = options.templates
    templates = read_templates(PLACE if templates is None else templates)
    names = _class_names(examples)
    captions = [tuple(fill(template, name) for template in templates) for name in names]
    indexed = isinstance(examples, IndexedExamples)
    if options.every_caption and not indexed:
        raise ValueError(
            'Expected captions="random" or "first" with classes in record files; '
            f'received: source={examples.name!r}, captions="all"'
        )
    table = _CaptionTable(captions)

    def texts(item, features):
        image = features["image"]
        image_id = item if indexed else _equal_ids(image)
        return {"image": image, **table.texts(features["label"], image_id)}

    counts = np.full(examples.count, len(templates))
    examples = _with_features(examples, texts)
    examples.captions = CaptionInfo(captions, counts, of_classes=True)
    return examples


def _class_names(examples: Examples) -> tuple[str, ...]:
    """Returns the class names without duplicates."""
    classes, source = examples.classes, examples.name
    if classes.max_labels is not None:
        raise ValueError(
            "Expected one label for each image, whose class's name is the caption; "
            f"received: source={source!r} with several"
        )
    if classes.names is None:
        raise ValueError(
            "Expected classes with names, which become captions; received: "
            f"source={source!r} with {classes.count} classes without"
        )
    first: dict[str, int] = {}
    for number, name in enumerate(classes.names):
        _, fault = checked_captions(name)
        if fault is not None:
            raise ValueError(
                f"Expected a name of each class of {source!r}; received: {fault} for "
                f"class {number}"
            )
        if first.setdefault(name, number) != number:
            raise ValueError(
                f"Expected each class's name once in {source!r}; received: {name!r} "
                f"for classes {first[name]} and {number}"
            )
    return classes.names


def _with_features(examples: Examples, function: Callable) -> Examples:
    """Replaces the features of examples by a function of item and features."""
    changed = copy.copy(examples)
    changed.read = lambda item: function(item, examples.read(item))
    return changed


def every_caption(examples: Examples, excluded: np.ndarray) -> IndexedExamples:
    """Returns one example per caption of the images that are not excluded."""
    import tensorflow as tf

    kept = np.delete(np.arange(examples.count), excluded)
    counts = examples.captions.counts[kept]
    rows = np.repeat(np.arange(len(kept)), counts)
    which = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    image_of = tf.constant(kept[rows], "int64")
    which = tf.constant(which, "int64")

    def read(pair):
        features = examples.read(image_of[pair])
        return select_caption(features, slice(which[pair], which[pair] + 1))

    place = examples.place
    return IndexedExamples(
        len(rows),
        read,
        examples.decode,
        encoded_channels=examples.encoded_channels,
        place=None if place is None else lambda pair: place(image_of[pair]),
    )


def stored_captions(examples: Examples, skip_faults: bool) -> list[tuple[str, ...]]:
    """Reads the captions from records without decoding images."""
    import tensorflow as tf

    def captions(item):
        return examples.read(item)["captions"]

    def read(_, item):
        if skip_faults:
            return attempt(captions, item, lambda *_: tf.zeros([0], "string"))
        return captions(item)

    dataset = examples.all_items()
    if "captions" not in dataset.map(lambda _, item: examples.read(item)).element_spec:
        raise ValueError("Expected captions as text; received: stored tokens")
    dataset = dataset.map(read, num_parallel_calls=tf.data.AUTOTUNE)
    with reading_errors():
        return [
            tuple(text.decode() for text in several)
            for several in dataset.as_numpy_iterator()
        ]


def batch_sizes(
    sources: Mapping[str, float], batch_size: int, shards: int
) -> dict[str, int]:
    """Divides a batch among the sources of a mixture by weight.

    If the weights do not divide a host's batch, the remaining pairs go to the largest
    remainders, the first of equal ones. Every share is within one pair per host of its
    weight.

    Reference: *Multimodal Contrastive Learning with LIMoE*, appendix A.1.
    """
    if not sources:
        raise ValueError("Expected sources with their weights; received: none")
    weights = {}
    for source, weight in sources.items():
        check_positive(f"source[{source!r}]", weight)
        weights[source] = Fraction(float(weight))
    total, own = sum(weights.values()), batch_size // shards
    shares = {name: own * weight / total for name, weight in weights.items()}
    sizes = {name: int(share) for name, share in shares.items()}
    left = own - sum(sizes.values())
    # Stable sort keeps the order of equal remainders.
    for name in sorted(shares, key=lambda name: sizes[name] - shares[name])[:left]:
        sizes[name] += 1
    if not all(sizes.values()):
        raise ValueError(
            "Expected a batch in which each host has pairs of each source; received: "
            f"batch_size={batch_size} for {shards} hosts, source={dict(sources)}"
        )
    return {name: size * shards for name, size in sizes.items()}


def mixed(datasets: list) -> Any:
    """Concatenates batches of several sources, in the order of the sources."""
    import tensorflow as tf

    keys = [sorted(dataset.element_spec[1]) for dataset in datasets]
    if any(other != keys[0] for other in keys):
        raise ValueError(
            "Expected captions in all sources of a mixture, or stored tokens in all; "
            f"received: {keys}"
        )

    def join(*batches):
        images = tf.concat([images for images, _ in batches], axis=0)
        texts = {
            key: tf.concat([texts[key] for _, texts in batches], axis=0)
            for key in keys[0]
        }
        # Offsets ids, which different sources may share.
        numbers = tf.concat(
            [
                tf.cast(texts["image_ids"], "int64") * len(batches) + number
                for number, (_, texts) in enumerate(batches)
            ],
            axis=0,
        )
        texts["image_ids"] = _equal_ids(tf.strings.as_string(numbers))
        several = texts["captions" if "captions" in texts else "token_ids"]
        texts["text_ids"] = _equal_ids(several)
        return images, texts

    return tf.data.Dataset.zip(tuple(datasets)).map(
        join, num_parallel_calls=tf.data.AUTOTUNE
    )
