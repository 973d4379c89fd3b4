"""Pairs in record files: read sequentially, or at their offsets for each caption.

Axes: K captions of an image.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe.data.examples import (
    IndexedExamples,
    RecordExamples,
    RecordFile,
    Share,
    record_place,
)
from keras_moe.data.labels import Classes
from keras_moe.data.pairs.captions import equal_ids
from keras_moe.data.pairs.source import PairSource
from keras_moe.data.reading import attempt, read_or_name, reading_errors
from keras_moe.data.tfrecord import record_offsets

_EXPECTED = "an example with an image, and with captions in UTF-8, none of them empty"


def record_pairs(
    name: str,
    files: Sequence[RecordFile],
    parse: Callable,
    decode: Callable,
    encoded_channels: int,
    every_caption: bool,
) -> PairSource:
    """A source whose captions are read together with the images."""
    import tensorflow as tf

    def texts(record):
        stored, several = parse(record)
        rows = next(iter(several.values()))
        checks = [tf.debugging.Assert(tf.shape(rows)[0] > 0, ["no caption"])]
        if "captions" in several:
            # A caption that is not UTF-8 is an error of TensorFlow's.
            read = tf.strings.unicode_transcode(rows, "UTF-8", "UTF-8", "strict")
            is_text = tf.strings.length(tf.strings.strip(read)) > 0
            checks += [read, tf.debugging.Assert(tf.reduce_all(is_text), ["empty"])]
        with tf.control_dependencies(checks):
            stored = tf.identity(stored)
            ids = {"image_ids": equal_ids(stored), "text_ids": equal_ids(rows)}
        return stored, {**ids, **several}

    examples = RecordExamples(
        files,
        lambda record, place: read_or_name(texts, record, _EXPECTED, place),
        decode,
        Classes(1),
        encoded_channels,
    )
    if not every_caption:
        return PairSource(name, examples)
    return PairSource(name, _indexed(examples), None, _counts(examples, parse))


def read_captions(images: Any, excluded: np.ndarray, skip_faults: bool) -> list:
    """The captions of the images of a source, without decoding an image."""
    import tensorflow as tf

    def captions(item):
        return images.read(item)[1]["captions"]

    def read(_, item):
        if skip_faults:
            return attempt(captions, item, lambda *_: tf.zeros([0], "string"))
        return captions(item)

    examples = images.without(excluded) if len(excluded) else images
    dataset = examples.pass_over(Share(0, 1, 1), None, 0, None)
    if "captions" not in dataset.map(lambda _, x: images.read(x)[1]).element_spec:
        raise ValueError("Expected captions as text; received: stored tokens")
    dataset = dataset.map(read, num_parallel_calls=tf.data.AUTOTUNE)
    with reading_errors():
        return [
            tuple(text.decode() for text in several)
            for several in dataset.as_numpy_iterator()
        ]


def _indexed(examples: RecordExamples) -> IndexedExamples:
    """The same examples with random access, by the offsets of their records."""
    import tensorflow as tf

    paths = tf.constant([file.path for file in examples.files])
    file_of, numbers, offsets = [], [], []
    for index, file in enumerate(examples.files):
        own = range(file.skip, file.skip + file.take)
        offsets += record_offsets(Path(file.path))[own.start : own.stop]
        numbers += own
        file_of += [index] * len(own)
    file_of, numbers, offsets = (
        tf.constant(values, "int64") for values in (file_of, numbers, offsets)
    )

    def read(index):
        path = paths[file_of[index]]
        record = _record_at(path, offsets[index])
        stored, texts = examples.read((record, path, numbers[index]))
        # A number of its own, where a stream has a hash.
        return stored, {**texts, "image_ids": tf.cast(index, "int32")}

    return IndexedExamples(
        len(offsets),
        read,
        examples.decode,
        examples.classes,
        examples.encoded_channels,
        place=lambda index: record_place(paths[file_of[index]], numbers[index]),
    )


def _record_at(path: Any, offset: Any) -> Any:
    """The record that begins at a place in a file, its checksum checked."""
    import tensorflow as tf

    def read(place):
        opened = tf.raw_ops.TFRecordDatasetV2(
            filenames=[place["path"]],
            compression_type="",
            buffer_size=tf.constant(1 << 16, "int64"),
            byte_offsets=[place["offset"]],
        )
        record = tf.TensorSpec([], "string")
        opened = tf.data.experimental.from_variant(opened, record)
        return opened.take(1).get_single_element()

    place = {"path": path, "offset": offset}
    return read_or_name(read, place, "a TFRecord file without corrupt records", path)


def _counts(examples: RecordExamples, parse: Callable) -> np.ndarray:
    """The number of captions of each image, at least 1: none is an error when read."""
    import tensorflow as tf

    def count(_, item):
        def of_record(record):
            return tf.shape(next(iter(parse(record)[1].values())))[0]

        number = attempt(of_record, item[0], lambda *_: tf.constant(1))
        return tf.maximum(number, 1)

    dataset = examples.pass_over(Share(0, 1, 1), None, 0, None)
    dataset = dataset.map(count, num_parallel_calls=tf.data.AUTOTUNE)
    with reading_errors():
        return np.array(list(dataset.as_numpy_iterator()), "int64")
