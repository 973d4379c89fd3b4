"""Batches of packed rows of token ids. Axes: B batch, N tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_moe._checks import LARGEST_SEED, check_bool, check_integer
from keras_moe.data._captions import batch_sizes
from keras_moe.data._examples import IndexedExamples
from keras_moe.data._packages import tf
from keras_moe.data._pipeline import BatchSettings, feature_batches
from keras_moe.data.loading import LoadOptions


def load_rows(
    rows: Mapping[str, Any],
    batch_size: int,
    weights: Mapping[str, float] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_remainder: bool = False,
    repeat: bool = False,
    start_batch: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> Any:
    """Makes batches of rows in memory, as a `tf.data.Dataset`, for any backend.

    The order, and what `repeat`, `start_batch` and `shard` do, is that of
    `keras_moe.data.load`.

    Args:
        rows: dict of integer arrays of one length, such as `keras_moe.models.pack`
            returns; or with `weights`, a dict of these by source.
        batch_size: number of rows in a batch, over all shards.
        weights: weight of each source of a mixture: with `{"books": 3, "code": 1}` each
            batch has 3 rows of the books for each row of the code. Needs `repeat`.
        shuffle: whether the order is random, another one in each pass.
        seed: seed of the order.
        drop_remainder: whether to drop an incomplete last batch.
        repeat: whether to repeat the rows endlessly.
        start_batch: number of the first batch, with `repeat`.
        shard: (index, count) of this host.

    Returns: A `tf.data.Dataset` of dicts of int32 (B, ...).

    Example:

    >>> from keras_moe.data import load_rows
    >>> rows = {"token_ids": np.array([[5, 6], [7, 8], [9, 5]])}
    >>> batches = load_rows(rows, batch_size=2, shuffle=False)
    >>> [batch["token_ids"].tolist() for batch in batches.as_numpy_iterator()]
    [[[5, 6], [7, 8]], [[9, 5]]]
    """
    options = LoadOptions(repeat=repeat, start_batch=start_batch, shard=shard)
    check_integer("batch_size", batch_size)
    check_integer("seed", seed, 0, LARGEST_SEED)
    sizes, sources = {"": batch_size}, {"": rows}
    if weights is not None:
        if not repeat or {*weights} != {*rows}:
            raise ValueError(
                "Expected repeat=True with a mixture, and a weight for each source; "
                f"received: repeat={repeat}, weights={dict(weights)}, rows of {[*rows]}"
            )
        sizes, sources = batch_sizes(weights, batch_size, shard[1]), rows
    datasets = []
    for number, (name, size) in enumerate(sizes.items()):
        settings = BatchSettings(
            image_shape=None,
            steps=[],
            targets=None,
            share=options.share_of(size),
            shuffle=check_bool("shuffle", shuffle),
            # Sources of equal length have different orders.
            seed=int(seed) + number,
            drop_remainder=check_bool("drop_remainder", drop_remainder) or repeat,
            start_batch=int(start_batch) if repeat else None,
        )
        datasets.append(feature_batches(_in_memory(sources[name], name), settings))
    if len(datasets) == 1:
        return datasets[0]
    # Rows of one batch in the order of the sources.
    return tf.data.Dataset.zip(tuple(datasets)).map(
        lambda *batches: tf.nest.map_structure(
            lambda *parts: tf.concat(parts, axis=0), *batches
        )
    )


def _in_memory(rows, name):
    arrays = {key: np.asarray(value) for key, value in rows.items()}
    if len({len(array) for array in arrays.values()}) != 1:
        raise ValueError(
            "Expected rows as a dict of arrays of one length; received: "
            f"{ {key: array.shape for key, array in arrays.items()} }"
        )
    for key, array in arrays.items():
        if array.dtype.kind not in "biu" or (
            array.size and not -(2**31) <= array.min() <= array.max() < 2**31
        ):
            raise ValueError(
                f"Expected {key} to be integers of 32 bits; received: "
                f"dtype={array.dtype}, up to {array.max(initial=0)}"
            )
    tensors = {key: tf.constant(array) for key, array in arrays.items()}
    examples = IndexedExamples(
        len(next(iter(arrays.values()))),
        lambda index: {
            key: tf.cast(tensor[index], "int32") for key, tensor in tensors.items()
        },
        decode=None,
    )
    examples.name = name or "the rows"
    return examples
