"""The examples of a split in an order set by seeds, and their labels.

A pass over them can start anywhere.
"""

import copy
import dataclasses
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_moe._files import open_regular
from keras_moe._types import Structure, Tensor
from keras_moe.data._packages import tf
from keras_moe.data.reading import read_or_name, reading_errors, records_or_name

# Number of encoded examples in the shuffle buffer of record files: a gigabyte of
# photographs. The order of the files is shuffled, too.
SHUFFLE_BUFFER = 10_000
# Number of images whose sizes stand for those of all.
_SIZES_OF = 64
# Number of files to interleave in random order, and records in a row from each.
_OPEN_FILES, _RECORDS_IN_A_ROW = 16, 16


class Classes(NamedTuple):
    """The classes of a source."""

    count: int
    names: tuple[str, ...] | None = None
    max_labels: int | None = None  # None for single labels, 0 if unknown


def _convert(
    features: dict[str, Any],
    key: Tensor,
    count: int,
    max_labels: int | None = None,
    dense: bool = False,
) -> Tensor:
    """Labels of one of `count` classes, or up to `max_labels`."""
    labels = features["label"]
    if max_labels is None:
        return tf.one_hot(labels, count) if dense else labels
    labels = tf.reshape(labels, [-1])
    labels = tf.boolean_mask(labels, labels >= 0)
    labels = tf.unique(tf.sort(labels)).y
    if dense:
        ones = tf.ones_like(labels, "float32")
        return tf.scatter_nd(labels[:, None], ones, [count])
    size = tf.size(labels)
    enough = tf.debugging.assert_less_equal(
        size,
        max_labels,
        f"Expected at most max_labels={max_labels} labels of an example; received more",
    )
    with tf.control_dependencies([enough]):
        labels = tf.pad(labels, [[0, max_labels - size]], constant_values=-1)
    return tf.ensure_shape(labels, [max_labels])


def make_labels(classes: Classes, source: str, options: Any, dense: bool) -> Callable:
    """Returns a function from an example's features and key to its labels."""
    max_labels = options.max_labels
    if not options.multi_label:
        if (classes.max_labels, max_labels) != (None, None):
            raise ValueError(
                f"Expected multi_label=True with {source!r} of several labels, or "
                "with max_labels; received: multi_label=False"
            )
        return functools.partial(_convert, count=classes.count, dense=dense)
    count, most = classes.count, classes.max_labels
    most = 1 if most is None else most
    if max_labels is None:
        max_labels = min(most, count)
    if not max_labels and not dense:
        raise ValueError(
            f"Expected max_labels, the most labels of an example of {source!r}, which "
            "does not say it, or one_hot=True; received: max_labels=None"
        )
    return functools.partial(_convert, count=count, max_labels=max_labels, dense=dense)


class Share(NamedTuple):
    """The part of a dataset that one of several hosts reads."""

    index: int
    count: int
    batch_size: int

    def bounds(self, number: int) -> tuple[int, int]:
        """Returns the bounds of the host's part of `number` items."""
        first, last = (number * i // self.count for i in (self.index, self.index + 1))
        return first, last


class CaptionInfo(NamedTuple):
    """What is known about a split's captions before its images are read."""

    # Of each image or class; None if the records have them.
    texts: Sequence[tuple[str, ...]] | None = None
    # Number of captions of each image.
    counts: np.ndarray | None = None
    # Descriptions of unusable images or captions, by image index.
    faults: dict[int, str] = {}
    # Whether captions are made from class names.
    of_classes: bool = False


@dataclasses.dataclass
class Examples:
    """The examples of a split, dicts of features; subclasses define the order."""

    count: int
    # From an item of `pass_over` to the features of an example.
    read: Callable
    # From a stored image to pixels (height, width, channels).
    decode: Callable
    classes: Classes | None = None
    captions: CaptionInfo = dataclasses.field(default_factory=CaptionInfo)
    # Channels of the pixels, if images are stored as files.
    encoded_channels: int | None = None
    # From an item to its file and position; None in memory.
    location: Callable | None = None
    # Name of the source, for errors.
    name: str = ""
    # Indices of the examples that are left; None for all.
    kept: np.ndarray | None = None

    def decoded(
        self, item: Structure, stored: Tensor, decode: Callable | None = None
    ) -> Tensor:
        """Decodes a stored image; errors name its file."""
        decode = decode or self.decode
        if self.location is None:
            return decode(stored)
        return read_or_name(
            decode, stored, "an image that can be decoded", self.location(item)
        )

    def without(self, excluded: np.ndarray) -> "Examples":
        if not len(excluded):
            return self
        examples = copy.copy(self)
        examples.kept = np.delete(np.arange(self.count), excluded)
        examples.count = len(examples.kept)
        return examples

    def all_items(self) -> Any:
        """Dataset of (position, item) of all examples in the source's order."""
        return self.pass_over(Share(0, 1, 1), None, 0, None)

    def scan(self, function: Callable) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields batches of `function(position, item)` of all examples, as arrays."""
        dataset = self.all_items().map(function, num_parallel_calls=tf.data.AUTOTUNE)
        with reading_errors():
            yield from dataset.batch(256).prefetch(1).as_numpy_iterator()

    def sizes(self) -> set[tuple[int, int]]:
        """Returns (height, width) of some images as they are stored."""
        items = self.all_items()
        if isinstance(self, IndexedExamples):
            # From all classes; records are read in sequence.
            items = items.shard(max(self.count // _SIZES_OF, 1), 0)

        def size(_, item):
            return tf.shape(self.decoded(item, self.read(item)["image"]))[:2]

        # The run itself names what cannot be read.
        found = items.take(_SIZES_OF).map(size).ignore_errors().as_numpy_iterator()
        return {(int(height), int(width)) for height, width in found}

    def pass_over(
        self, share: Share, seed: Tensor | None, start: Tensor | int, length: int | None
    ) -> Any:
        """Dataset of (position, item): one pass of the host `share`, maybe shuffled."""
        raise NotImplementedError


class IndexedExamples(Examples):
    """Examples with random access by index; batches do not depend on the hosts."""

    def pass_over(
        self, share: Share, seed: Tensor | None, start: Tensor | int, length: int | None
    ) -> Any:
        common = share.batch_size * share.count
        batches, rest = divmod(self.count, common)
        first, last = share.bounds(rest)
        full = batches * share.batch_size
        kept = None if self.kept is None else tf.constant(self.kept, "int64")
        if seed is not None:
            numbers = tf.random.stateless_uniform([2], seed, None, None, "int32")

        def positioned(own):
            position = own
            if share.count > 1:
                batch, row = own // share.batch_size, own % share.batch_size
                position = batch * common + share.index * share.batch_size + row
                position = tf.where(
                    own < full, position, batches * common + first + own - full
                )
            index = position
            if seed is not None:
                index = tf.random.experimental.index_shuffle(
                    position, numbers, self.count - 1
                )
            return position, index if kept is None else tf.gather(kept, index)

        length = full + last - first if length is None else length
        return tf.data.Dataset.range(start, length).map(positioned)


def as_stored(stored: Any) -> Any:
    return stored


def in_memory(
    images: np.ndarray, labels: np.ndarray, classes: Classes
) -> IndexedExamples:
    """Examples from decoded images in memory and their labels."""
    images, labels = tf.constant(images), tf.constant(labels)
    return IndexedExamples(
        len(labels),
        lambda index: {"image": images[index], "label": labels[index]},
        decode=as_stored,
        classes=classes,
    )


class RecordFile(NamedTuple):
    """A TFRecord file, or part of one."""

    path: str
    skip: int
    take: int


class RecordExamples(Examples):
    """Examples in TFRecord files, read in sequence: (record, path, number)."""

    def __init__(
        self,
        files: Sequence[RecordFile],
        read: Callable,
        decode: Callable,
        **known: Any,
    ):
        self.files = list(files)
        super().__init__(
            sum(file.take for file in self.files),
            lambda item: read(item[0], _record_location(*item[1:])),
            decode,
            location=lambda item: _record_location(*item[1:]),
            **known,
        )

    def pass_over(
        self, share: Share, seed: Tensor | None, start: Tensor | int, length: int | None
    ) -> Any:
        first, last = share.bounds(self.count)
        begin, end, is_kept = first, last, None
        if self.kept is not None:
            begin, end = int(self.kept[first]), int(self.kept[last - 1]) + 1
            mask = np.zeros(end - begin, bool)
            mask[self.kept[first:last] - begin] = True
            is_kept = tf.constant(mask)
        files = _between(self.files, begin, end)
        paths = tf.constant([file.path for file in files])
        skip = tf.constant([file.skip for file in files], "int64")
        take = tf.constant([file.take for file in files], "int64")
        before = tf.cumsum(take, exclusive=True)
        indices = tf.range(len(files))
        if seed is not None:
            # The graph's own global seed replaces the program's. Without one,
            # TensorFlow would compare 0 with the tensor below.
            tf.random.set_seed(1)
            indices = tf.random.experimental.stateless_shuffle(indices, seed)

        def records(file):
            path = paths[file]
            opened = tf.data.TFRecordDataset(path).skip(skip[file])
            opened = records_or_name(opened, path, take[file])
            # Zipped, because a map would cost as much as reading.
            path = tf.data.Dataset.from_tensors(path).repeat()
            numbers = tf.data.Dataset.range(skip[file], tf.int64.max)
            opened = tf.data.Dataset.zip((opened, path, numbers))
            if is_kept is not None:
                kept, first_kept = is_kept, before[file] - skip[file]
                opened = opened.filter(lambda _, __, i: kept[first_kept + i])
            return opened

        dataset = tf.data.Dataset.from_tensor_slices(indices)
        if seed is None:
            dataset = dataset.flat_map(records)
        else:
            dataset = dataset.interleave(
                records,
                cycle_length=min(_OPEN_FILES, len(files)),
                block_length=_RECORDS_IN_A_ROW,
                num_parallel_calls=tf.data.AUTOTUNE,
            ).shuffle(
                min(last - first, SHUFFLE_BUFFER),
                seed=tf.random.stateless_uniform([], seed, None, None, "int64"),
                reshuffle_each_iteration=False,
            )
        if length is not None:
            dataset = dataset.take(length)
        return dataset.skip(start).enumerate(tf.cast(start, "int64") + first)

    def indexed(self) -> IndexedExamples:
        """Returns the same examples with random access, by record offset."""
        paths = tf.constant([file.path for file in self.files])
        file_of, numbers, offsets = [], [], []
        for index, file in enumerate(self.files):
            own = range(file.skip, file.skip + file.take)
            offsets += record_offsets(Path(file.path))[own.start : own.stop]
            numbers += own
            file_of += [index] * len(own)
        file_of, numbers, offsets = (
            tf.constant(values, "int64") for values in (file_of, numbers, offsets)
        )

        def read(index):
            path = paths[file_of[index]]
            return self.read((_record_at(path, offsets[index]), path, numbers[index]))

        return IndexedExamples(
            len(offsets),
            read,
            self.decode,
            self.classes,
            self.captions,
            self.encoded_channels,
            location=lambda i: _record_location(paths[file_of[i]], numbers[i]),
        )


def _record_location(path: Tensor, number: Tensor) -> Tensor:
    """Returns the path and number of a record for errors, as a string tensor."""
    return tf.strings.join([path, ", record ", tf.strings.as_string(number)])


def record_offsets(path: Path) -> list[int]:
    """Finds the offsets of a file's records from their lengths alone."""
    size, at, offsets = path.stat().st_size, 0, []
    with open_regular(path) as file:
        while at < size:
            offsets.append(at)
            header = file.read(12)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else size
            # A record is its length, a checksum, its bytes, and a checksum.
            at += 16 + length
            if at > size:
                raise ValueError(
                    f"Expected whole records; received: {path}, whose record "
                    f"{len(offsets) - 1} continues after the end of the file"
                )
            file.seek(at)
    return offsets


def _record_at(path: Tensor, offset: Tensor) -> Tensor:
    """Reads the record at an offset and verifies its checksum."""

    def read(start):
        opened = tf.raw_ops.TFRecordDatasetV2(
            filenames=[start["path"]],
            compression_type="",
            buffer_size=tf.constant(1 << 16, "int64"),
            byte_offsets=[start["offset"]],
        )
        record = tf.TensorSpec([], "string")
        opened = tf.data.experimental.from_variant(opened, record)
        return opened.take(1).get_single_element()

    start = {"path": path, "offset": offset}
    return read_or_name(read, start, "a TFRecord file without corrupt records", path)


def _between(files: list[RecordFile], first: int, last: int) -> list[RecordFile]:
    """Returns the parts of files with the records in [first, last)."""
    ends = np.cumsum([file.take for file in files])
    chosen = []
    for file, end in zip(files, ends.tolist()):
        before = max(first - (end - file.take), 0)
        after = max(end - last, 0)
        if before + after < file.take:
            chosen.append(
                RecordFile(file.path, file.skip + before, file.take - before - after)
            )
    return chosen
