"""The options of `load` and `load_pairs`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_moe.checks import check_bool, check_integer, check_one_of
from keras_moe.data._examples import Share


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
            raise ValueError(
                "Expected repeat=True with a batch to start at; received: "
                f"repeat={self.repeat}, start_batch={self.start_batch}"
            )
        check_one_of("unreadable", self.unreadable, ("raise", "exclude"))

    def share_of(self, batch_size: int) -> Share:
        """Returns the host's share of batches of this size."""
        index, count = self.shard
        check_integer("shard[1]", count)
        check_integer("shard[0]", index, 0, count - 1)
        if batch_size % count:
            raise ValueError(
                "Expected shards that divide the batch; received: "
                f"shard={self.shard!r}, batch_size={batch_size}"
            )
        return Share(index, count, batch_size // count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions(_Options):
    """Options of `load` for long runs, several labels, several hosts and bad images.

    Args:
        repeat: whether to repeat the data endlessly. All batches are then full; a pass
            skips remaining examples that do not fill one.
        start_batch: number of the first batch, with `repeat`. Warns about augmentations
            with their own random state, which cannot continue where they were.
        shard: (index, count) of this host. All hosts have equally many batches of
            different examples. For data in memory and folders, a host reads its rows of
            the batches that a single host would have; of record files it reads its own
            part. With a Keras distribution, set `auto_shard_dataset=False`.
        multi_label: whether examples have several labels: class numbers, sorted and
            padded with -1, for `keras_moe.losses.SparseSigmoidCrossentropy`, or vectors
            with `one_hot`.
        hierarchy: a `LabelHierarchy`, its dict or the path of its file, with
            `multi_label`. Adds all ancestors to the labels, which are then class
            numbers of the hierarchy. It must contain the source's classes by name.
        max_labels: number of labels of an example after padding, with `multi_label`. By
            default the maximum, if the source knows it.
        exclude: indices of examples to leave out, in the order of the source; or one or
            more JSON files of `write_exclusion` or `keras-moe deduplicate`.
        unreadable: how to treat images that cannot be read or decoded. `"raise"` raises
            an error that names the file (see `reading_errors` for its class).
            `"exclude"` first decodes all images once, and leaves out those that fail,
            with a warning. To do that once for all runs, use `find_unreadable` and
            `write_exclusion`.

    Example:

    >>> from keras_moe.data import LoadOptions
    >>> LoadOptions(repeat=True, start_batch=100).start_batch
    100
    """

    multi_label: bool = False
    hierarchy: Any = None
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
        repeat: whether to repeat the data endlessly; see `LoadOptions`.
        start_batch: number of the first batch, with `repeat`.
        shard: (index, count) of this host; see `LoadOptions`.
        exclude: images to leave out with all their captions, as in `LoadOptions`; for a
            mixture, a dict by source.
        unreadable: how to treat images that cannot be read, and captions that are
            missing, empty or not UTF-8. `"raise"` raises an error that names the image.
            `"exclude"` first reads all images once, and leaves out those that fail with
            all their captions, with a warning.
        captions: how to use several captions of an image: `"random"` draws one in each
            pass, `"first"` always uses the first, `"all"` makes a pair of each.
        templates: captions for a source of classes, with `{}` for the class name, such
            as `"a photo of a {}."`: a string, a sequence, or the path of a text file
            with one per line. The default is `"{}"`.

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
            raise ValueError(
                f"Expected exclude as a dict of the sources of a mixture, {[*source]}; "
                f"received: exclude={self.exclude!r:.100}"
            )
        return exclude.get(name, ())
