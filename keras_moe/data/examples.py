"""The examples of a source, in an order that seeds determine.

Every order can be entered anywhere at little cost: a pass over the data is the same
whether it is read from its start or from its middle.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_moe.data.labels import Classes
from keras_moe.data.reading import read_or_name, records_or_name

# The number of encoded examples that shuffling of record files holds: a gigabyte of
# photographs. The files are shuffled, too.
SHUFFLE_BUFFER = 10_000
# The number of files that are read at a time where the order is random, and of records
# in a row from each.
_OPEN_FILES, _RECORDS_IN_A_ROW = 16, 16


class Share(NamedTuple):
    """The part of a data set that one of several hosts reads."""

    index: int
    count: int
    batch_size: int

    def bounds(self, number: int) -> tuple[int, int]:
        """The bounds of the host's part of `number` things in a row."""
        first, last = (number * i // self.count for i in (self.index, self.index + 1))
        return first, last


class Examples:
    """The examples of any source: how they are read, and which of them are left.

    Subclasses define their order, in `pass_over`.
    """

    def __init__(
        self,
        count: int,
        read: Callable,
        decode: Callable,
        classes: Classes,
        encoded_channels: int | None = None,
        place: Callable | None = None,
    ):
        self.count, self.read, self.decode = count, read, decode
        self.classes, self.encoded_channels = classes, encoded_channels
        self.place = place
        # The indices of the examples that are left; None for all.
        self.kept = None

    def decoded(self, item: Any, stored: Any, decode: Callable | None = None) -> Any:
        """The pixels of an example, or an error that names its file."""
        decode = self.decode if decode is None else decode
        if self.place is None:
            return decode(stored)
        return read_or_name(
            decode, stored, "an image that can be decoded", self.place(item)
        )

    def without(self, excluded: np.ndarray) -> "Examples":
        """The examples without those of some indices."""
        examples = copy.copy(self)
        examples.kept = np.delete(np.arange(self.count), excluded)
        examples.count = len(examples.kept)
        return examples


class IndexedExamples(Examples):
    """Examples with random access by their index: arrays in memory, or files.

    The order is a permutation of all indices. Hosts read their rows of common batches,
    so that these are the same for any number of hosts. The arguments are those of
    `Examples`; `read` takes an index, int64.
    """

    def pass_over(self, share: Share, seed: Any, start: Any, length: int | None) -> Any:
        """One pass of a host."""
        import tensorflow as tf

        common = share.batch_size * share.count
        batches, rest = divmod(self.count, common)
        first, last = share.bounds(rest)
        full = batches * share.batch_size
        kept = None if self.kept is None else tf.constant(self.kept, "int64")
        if seed is not None:
            numbers = tf.random.stateless_uniform([2], seed, None, None, "int32")

        def place(own):
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
        return tf.data.Dataset.range(start, length).map(place)


def in_memory(
    images: np.ndarray, labels: np.ndarray, classes: Classes
) -> IndexedExamples:
    """Examples in memory, decoded."""
    import tensorflow as tf

    images, labels = tf.constant(images), tf.constant(labels)
    return IndexedExamples(
        len(labels),
        lambda index: (images[index], labels[index]),
        decode=lambda stored: stored,
        classes=classes,
    )


class RecordFile(NamedTuple):
    """A TFRecord file, or part of one."""

    path: str
    skip: int
    take: int


class RecordExamples(Examples):
    """Examples in TFRecord files, which are read one after the other."""

    def __init__(
        self,
        files: Sequence[RecordFile],
        read: Callable,
        decode: Callable,
        classes: Classes,
        encoded_channels: int | None = None,
    ):
        self.files = list(files)
        count = sum(file.take for file in self.files)
        super().__init__(
            count,
            lambda item: read(item[0], record_place(*item[1:])),
            decode,
            classes,
            encoded_channels,
            place=lambda item: record_place(*item[1:]),
        )

    def pass_over(self, share: Share, seed: Any, start: Any, length: int | None) -> Any:
        """One pass of a host; see `IndexedExamples.pass_over`."""
        import tensorflow as tf

        first, last = share.bounds(self.count)
        if self.kept is None:
            begin, end = first, last
        else:
            begin, end = int(self.kept[first]), int(self.kept[last - 1]) + 1
            is_kept = np.zeros(end - begin, bool)
            is_kept[self.kept[first:last] - begin] = True
            is_kept = tf.constant(is_kept)
        files = _between(self.files, begin, end)
        paths = tf.constant([file.path for file in files])
        skip, take = (
            tf.constant([getattr(file, name) for file in files], "int64")
            for name in ("skip", "take")
        )
        before = tf.cumsum(take, exclusive=True)
        indices = tf.range(len(files))
        if seed is not None:
            # The graph has a global seed of its own, so that the program's does not
            # matter. TensorFlow would compare a 0 with the tensor below.
            tf.random.set_seed(1)
            indices = tf.random.experimental.stateless_shuffle(indices, seed)

        def records(file):
            path = paths[file]
            opened = tf.data.TFRecordDataset(path).skip(skip[file])
            opened = records_or_name(opened, path, take[file])
            # A function here would cost as much as reading.
            path = tf.data.Dataset.from_tensors(path).repeat()
            numbers = tf.data.Dataset.range(skip[file], tf.int64.max)
            opened = tf.data.Dataset.zip((opened, path, numbers))
            if self.kept is not None:
                first_kept = before[file] - skip[file]
                opened = opened.filter(lambda _, __, i: is_kept[first_kept + i])
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


def record_place(path: Any, number: Any) -> Any:
    """The place of a record for errors, a string tensor."""
    import tensorflow as tf

    return tf.strings.join([path, ", record ", tf.strings.as_string(number)])


def _between(files: list[RecordFile], first: int, last: int) -> list[RecordFile]:
    """The parts of files with the records from `first` to `last`, exclusive."""
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
