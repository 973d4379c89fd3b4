"""Options of loading that images with labels and images with captions share."""

import dataclasses
from typing import Any

from keras_moe.checks import check_bool, check_integer
from keras_moe.data.examples import Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderOptions:
    """Where batches begin, which host reads what, and what is left out.

    Subclasses document the fields.
    """

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

    @property
    def first_batch(self) -> int | None:
        """The number of the first batch; None for a single pass."""
        return int(self.start_batch) if self.repeat else None

    def share_of(self, batch_size: int) -> Share:
        """The host's share of batches of a size."""
        try:
            index, count = self.shard
            index = check_integer("shard[0]", index, minimum=0)
            count = check_integer("shard[1]", count)
        except (TypeError, ValueError):
            index, count = 0, 0
        if index >= count or batch_size % count:
            raise ValueError(
                "Expected (index, count) with 0 <= index < count, where count divides "
                f"batch_size; received: shard={self.shard!r}, batch_size={batch_size}"
            )
        return Share(index, count, batch_size // count)

    def check_count(
        self, count: int, batch_size: int, drop_remainder: bool, place: str
    ) -> None:
        """Raises ValueError unless the examples fill batches of all hosts."""
        rest = count % batch_size
        if (self.repeat and count < batch_size) or (
            not drop_remainder and 0 < rest < self.share_of(batch_size).count
        ):
            raise ValueError(
                "Expected a batch no larger than the examples, and an example of a "
                "last batch for each shard or drop_remainder=True; there are "
                f"{count} examples {place}; "
                f"received: batch_size={batch_size}, shard={self.shard}"
            )


def check_tensorflow() -> Any:
    """TensorFlow, or an ImportError that names the extra."""
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            'Input pipelines are tf.data: pip install "keras-moe[data]"'
        ) from error
    return tf


def check_split(split: Any) -> None:
    """Raises ValueError unless the name of a split is a string."""
    if not isinstance(split, str):
        raise ValueError(f"Expected the name of a split; received: split={split!r}")
