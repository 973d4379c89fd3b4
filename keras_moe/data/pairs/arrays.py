"""Images and captions that are in memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_moe.data.pairs.source import PairSource, indexed_pairs


def read_pairs(
    images: Any, captions: Sequence[Any], name: str = "arrays"
) -> PairSource:
    """The pairs of an array of images."""
    import tensorflow as tf

    images = np.asarray(images)
    if images.ndim != 4 or images.dtype != np.uint8 or images.shape[-1] not in (1, 3):
        raise ValueError(
            "Expected images of uint8 (images, height, width, 1 or 3); received: "
            f"shape={images.shape}, dtype={images.dtype}"
        )
    captions = [captions] if isinstance(captions, (str, bytes)) else list(captions)
    if len(images) != len(captions) or not captions:
        raise ValueError(
            "Expected a caption, or a sequence of captions, for each image; received: "
            f"{len(images)} images, {len(captions)} captions"
        )
    pixels = tf.constant(images)
    return indexed_pairs(
        name, captions, lambda index: pixels[index], decode=lambda stored: stored
    )
