"""Images with their captions: sources, order and batches for two-tower models."""

from keras_moe.data.pairs.loading import (
    PairOptions,
    load_captions,
    load_pairs,
    num_pairs,
)
from keras_moe.data.pairs.tfrecord import write_pair_tfrecords

__all__ = [
    "PairOptions",
    "load_captions",
    "load_pairs",
    "num_pairs",
    "write_pair_tfrecords",
]
