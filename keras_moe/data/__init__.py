"""Input pipelines and augmentation. TensorFlow is imported when a pipeline is built."""

from keras_moe._processes import process_shard
from keras_moe.data.augmentation import RandAugment, RandomResizedCrop
from keras_moe.data.digits import load_digits
from keras_moe.data.emoji import EMOJI_CREDIT, EmojiPairs, load_emoji
from keras_moe.data.loading import (
    LoadOptions,
    PairOptions,
    load,
    load_captions,
    load_pairs,
    load_rows,
    num_examples,
    num_pairs,
)
from keras_moe.data.padding import padded, predictions
from keras_moe.data.reading import reading_errors
from keras_moe.data.record_writing import write_tfrecords
from keras_moe.data.selection import find_unreadable, write_exclusion
from keras_moe.data.sources import class_names, credit, load_texts, num_classes

__all__ = [
    "EMOJI_CREDIT", "EmojiPairs", "LoadOptions", "PairOptions", "RandAugment",
    "RandomResizedCrop", "class_names", "credit", "find_unreadable", "load",
    "load_captions", "load_digits", "load_emoji", "load_pairs", "load_rows",
    "load_texts", "num_classes", "num_examples", "num_pairs", "padded", "predictions",
    "process_shard", "reading_errors", "write_exclusion", "write_tfrecords",
]  # fmt: skip
__dir__ = __all__.copy
