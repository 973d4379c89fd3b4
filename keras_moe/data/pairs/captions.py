"""Captions of images: their checks, and the choice of one for each pair.

Axes: K captions of an image, N tokens.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from keras_moe.data.pipeline import key_seed

# Names of captions in CSV, JSON and JSONL files, in the order of their precedence.
CAPTION_NAMES = ("captions", "caption", "text")
CHOICES = ("random", "all", "first")
# The number of the draw of a caption, besides those of an augmentation's steps.
_DRAW = -1


class CaptionChoice(NamedTuple):
    """The choice of one caption for each image of a batch.

    Fields:
        is_random: whether it is drawn from the image's key, or else the first.
    """

    is_random: bool

    def __call__(self, texts: dict[str, Any], key: Any) -> dict[str, Any]:
        """The caption of a pair, as tensors of TensorFlow."""
        import tensorflow as tf

        if not self.is_random:
            return select_caption(texts, 0)
        count = tf.shape(texts["text_ids"])[0]
        seed = key_seed(key, _DRAW)
        which = tf.random.stateless_uniform([], seed, 0, count, "int32")
        return select_caption(texts, which)


def select_caption(texts: dict[str, Any], which: Any) -> dict[str, Any]:
    """The texts of an image without their axis K: one caption, or some as a slice."""
    return {
        name: value if name == "image_ids" else value[which]
        for name, value in texts.items()
    }


class CaptionTable:
    """The captions of all images in memory, each caption with its own number."""

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
        """The texts of an image; see `PairSource`."""
        import tensorflow as tf

        some = slice(self._ends[row], self._ends[row + 1])
        return {
            "image_ids": tf.cast(image_id, "int32"),
            "text_ids": self._ids[some],
            "captions": self._flat[some],
        }


def encoded(caption: str) -> bytes:
    """A caption in UTF-8; bytes that were not are as they were read."""
    return caption.encode(errors="surrogateescape")


def checked_captions(captions: Any) -> tuple[tuple[str, ...], str | None]:
    """The captions of an image, and the fault that makes them useless, or None."""
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


def equal_ids(contents: Any) -> Any:
    """Ids that are equal for equal contents, int32, as tensors of TensorFlow.

    Two different contents share an id with probability 1 / 2 ** 31.
    """
    import tensorflow as tf

    if contents.dtype != tf.string:
        texts = tf.strings.as_string(contents)
        contents = tf.strings.reduce_join(texts, axis=-1, separator=",")
    ids = tf.strings.to_hash_bucket_fast(contents, 2**31 - 1)
    return tf.cast(ids, "int32")
