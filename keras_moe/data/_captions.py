"""Captions of images: validation, ids, and choosing one caption per pair.

Features of an example with K captions: "captions", string (K,), "image_ids", int32 (),
and "text_ids", int32 (K,), equal for equal images and captions.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from keras_moe._checks import check_positive, unfit
from keras_moe._templates import PLACE, fill, read_templates
from keras_moe._types import Tensor
from keras_moe.data._examples import (
    CaptionInfo,
    Examples,
    IndexedExamples,
    RecordExamples,
    RecordFile,
)
from keras_moe.data._packages import tf
from keras_moe.data._pipeline import key_seed
from keras_moe.data.reading import attempt, read_or_name, reading_errors

# Keys of captions in CSV, JSON and JSONL files, in order of precedence.
CAPTION_NAMES = ("captions", "caption", "text")
# Seed number of the caption draw, different from those of augmentation steps.
_DRAW = -1
_EXPECTED = "an example with an image, and with captions in UTF-8, none of them empty"


class CaptionOptions(NamedTuple):
    """Options of a source with captions; see `load_pairs`."""

    image_shape: tuple[int, int, int] = (32, 32, 3)
    # Whether each caption becomes a pair.
    every_caption: bool = False
    templates: Any = None
    data_dir: str | None = None


def random_caption(texts: dict[str, Any], key: Tensor) -> dict[str, Any]:
    """Draws one of the captions of an image by the image's key."""
    count = tf.shape(texts["text_ids"])[0]
    seed = key_seed(key, _DRAW)
    which = tf.random.stateless_uniform([], seed, 0, count, "int32")
    return select_caption(texts, which)


def first_caption(texts: dict[str, Any], key: Tensor) -> dict[str, Any]:
    return select_caption(texts, 0)


def select_caption(
    texts: dict[str, Any], which: Tensor | slice | int
) -> dict[str, Any]:
    """Indexes the caption axis K of all text features."""
    return {
        name: value if name in ("image", "image_ids") else value[which]
        for name, value in texts.items()
    }


def _caption_table(captions: Iterable[tuple[str, ...]]) -> tuple[Callable, np.ndarray]:
    """Returns (row, image id) -> caption features, and the captions per row."""
    captions = list(captions)
    counts = np.array([len(several) for several in captions], "int64")
    flat = [caption for several in captions for caption in several]
    numbers: dict[str, int] = {}
    ids = [numbers.setdefault(caption, len(numbers)) for caption in flat]
    flat = tf.constant([caption.encode() for caption in flat], "string")
    ids = tf.constant(ids, "int32")
    ends = tf.constant(np.concatenate([[0], np.cumsum(counts)]), "int64")

    def texts(row, image_id):
        some = slice(ends[row], ends[row + 1])
        return {
            "image_ids": tf.cast(image_id, "int32"),
            "text_ids": ids[some],
            "captions": flat[some],
        }

    return texts, counts


def checked_captions(captions: Any) -> tuple[tuple[str, ...], str | None]:
    """Returns the captions of an image, and None or why they are unusable."""
    if not isinstance(captions, (list, tuple, np.ndarray)):
        captions = [captions]
    texts = []
    for caption in captions:
        if isinstance(caption, bytes):
            caption = caption.decode(errors="surrogateescape")
        if caption is None or (isinstance(caption, str) and not caption.strip()):
            return ("",), "no caption"
        try:
            caption.encode()
        except (AttributeError, UnicodeEncodeError):
            return ("",), f"a caption that is not text in UTF-8: {caption!r:.50}"
        texts.append(str(caption).strip())
    return (tuple(texts), None) if texts else (("",), "no caption")


def _equal_ids(contents: Tensor) -> Tensor:
    """int32 hashes of contents; different ones collide with probability 2 ** -31."""
    if contents.dtype != tf.string:
        texts = tf.strings.as_string(contents)
        contents = tf.strings.reduce_join(texts, axis=-1, separator=",")
    ids = tf.strings.to_hash_bucket_fast(contents, 2**31 - 1)
    return tf.cast(ids, "int32")


def captioned(
    captions: Sequence[Any],
    names: Iterable[str],
    faults: dict[int, str],
    read: Callable,
    decode: Callable,
    location: Callable | None = None,
) -> IndexedExamples:
    """Examples with captions in memory, images from `read` and faults by index."""
    checked, faults = [], dict(faults)
    for index, (name, several) in enumerate(zip(names, captions)):
        texts, fault = checked_captions(several)
        checked.append(texts)
        if fault is not None:
            faults.setdefault(index, f"{name} has {fault}")
    texts_of, counts = _caption_table(checked)
    return IndexedExamples(
        len(checked),
        lambda index: {"image": read(index), **texts_of(index, index)},
        decode,
        captions=CaptionInfo(checked, counts, faults),
        encoded_channels=None if location is None else 3,
        location=location,
    )


def captioned_arrays(images: Any, captions: Sequence[Any]) -> IndexedExamples:
    """Examples from an array of images with one or more captions each."""
    images = np.asarray(images)
    if images.ndim != 4 or images.dtype != np.uint8 or images.shape[-1] not in (1, 3):
        expected = "images of uint8 (images, height, width, 1 or 3)"
        raise unfit(expected, f"shape={images.shape}, dtype={images.dtype}")
    captions = [captions] if isinstance(captions, (str, bytes)) else captions
    if len(images) != len(captions):
        expected = "a caption, or a sequence of captions, for each image"
        raise unfit(expected, f"{len(images)} images, {len(captions)} captions")
    pixels = tf.constant(images)
    names = [f"image {index}" for index in range(len(images))]
    return captioned(captions, names, {}, lambda index: pixels[index], lambda x: x)


def captioned_records(
    files: Sequence[RecordFile],
    parse: Callable,
    decode: Callable,
    encoded_channels: int,
    every_caption: bool,
) -> Examples:
    """Examples from records; `parse` returns an image and its captions."""

    def features(record):
        stored, captions = parse(record)
        # TensorFlow raises an error for captions that are not UTF-8.
        read = tf.strings.unicode_transcode(captions, "UTF-8", "UTF-8", "strict")
        is_text = tf.strings.length(tf.strings.strip(read)) > 0
        checks = [
            tf.debugging.Assert(tf.shape(captions)[0] > 0, ["no caption"]),
            tf.debugging.Assert(tf.reduce_all(is_text), ["empty"]),
        ]
        with tf.control_dependencies([read, *checks]):
            stored = tf.identity(stored)
            ids = {"image_ids": _equal_ids(stored), "text_ids": _equal_ids(captions)}
        return {"image": stored, **ids, "captions": captions}

    examples = RecordExamples(
        files,
        lambda record, location: read_or_name(features, record, _EXPECTED, location),
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

    def of_record(record):
        return tf.shape(parse(record)[1])[0]

    def count(item):
        return tf.maximum(attempt(of_record, item[0], lambda *_: tf.constant(1)), 1)

    return np.array(_read_all(examples, count), "int64")


def captions_of_classes(examples: Examples, options: CaptionOptions) -> Examples:
    """Turns class names into captions by templates (LIMoE, appendix A.3)."""
    classes = examples.classes
    if classes is None or classes.max_labels is not None or classes.names is None:
        raise ValueError(
            "Expected one class of each image, with a name that becomes the caption; "
            f"received: source={examples.name!r} with several, or without names"
        )
    templates = PLACE if options.templates is None else options.templates
    templates = read_templates(templates)
    captions = [tuple(fill(x, name) for x in templates) for name in classes.names]
    if options.every_caption and isinstance(examples, RecordExamples):
        examples = examples.indexed()
    indexed = isinstance(examples, IndexedExamples)
    texts_of, _ = _caption_table(captions)

    def texts(item, features):
        image = features["image"]
        image_id = item if indexed else _equal_ids(image)
        return {"image": image, **texts_of(features["label"], image_id)}

    counts = np.full(examples.count, len(templates))
    examples = _with_features(examples, texts)
    examples.captions = CaptionInfo(captions, counts, of_classes=True)
    return examples


def _with_features(examples: Examples, function: Callable) -> Examples:
    changed = copy.copy(examples)
    changed.read = lambda item: function(item, examples.read(item))
    return changed


def every_caption(examples: Examples, excluded: np.ndarray) -> IndexedExamples:
    """Returns one example per caption of the images that are not excluded."""
    kept = np.delete(np.arange(examples.count), excluded)
    counts = np.asarray(examples.captions.counts)[kept]
    rows = np.repeat(np.arange(len(kept)), counts)
    which = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    image_of = tf.constant(kept[rows], "int64")
    which = tf.constant(which, "int64")

    def read(pair):
        features = examples.read(image_of[pair])
        return select_caption(features, slice(which[pair], which[pair] + 1))

    location = examples.location
    return IndexedExamples(
        len(rows),
        read,
        examples.decode,
        encoded_channels=examples.encoded_channels,
        location=None if location is None else lambda pair: location(image_of[pair]),
        name=examples.name,
    )


def stored_captions(examples: Examples, skip_faults: bool) -> list[tuple[str, ...]]:
    """Reads the captions from records without decoding images."""

    def captions(item):
        return examples.read(item)["captions"]

    def read(item):
        if skip_faults:
            return attempt(captions, item, lambda *_: tf.zeros([0], "string"))
        return captions(item)

    found = _read_all(examples, read)
    return [tuple(text.decode() for text in several) for several in found]


def _read_all(examples: Examples, read: Callable) -> list[Any]:
    """Returns `read(item)` of all examples as arrays, which may differ in shape."""
    dataset = examples.all_items().map(
        lambda _, item: read(item), num_parallel_calls=tf.data.AUTOTUNE
    )
    with reading_errors():
        return list(dataset.as_numpy_iterator())


def batch_sizes(
    sources: Mapping[str, float], batch_size: int, shards: int
) -> dict[str, int]:
    """Divides a batch among sources by weight (LIMoE, appendix A.1)."""
    # Remaining pairs go to the largest remainders, the first of equal ones.
    weights = {
        source: Fraction(check_positive(f"source[{source!r}]", weight))
        for source, weight in sources.items()
    }
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

    def join(*batches):
        images = tf.concat([images for images, _ in batches], axis=0)
        texts = {
            key: tf.concat([texts[key] for _, texts in batches], axis=0)
            for key in batches[0][1]
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
        texts["text_ids"] = _equal_ids(texts["captions"])
        return images, texts

    return tf.data.Dataset.zip(tuple(datasets)).map(
        join, num_parallel_calls=tf.data.AUTOTUNE
    )
