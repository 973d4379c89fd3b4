"""Images that carry their number in each pixel, and batches of pairs as rows."""

from types import SimpleNamespace

import numpy as np
import pytest

from keras_moe.data import reading_errors

SHAPE = (4, 4, 3)


def png(number):
    """A PNG file of one grey level."""
    import tensorflow as tf

    return tf.io.encode_png(np.full(SHAPE, number, "uint8")).numpy()


def rows(dataset, take=None):
    """The (image, caption, image id, text id) of each pair, in batches."""
    batches = []
    with reading_errors():
        dataset = dataset.take(-1 if take is None else take)
        for inputs, ids in dataset.as_numpy_iterator():
            pixels = np.round((inputs["images"][:, 0, 0, 0] + 1) * 127.5).astype(int)
            captions = [caption.decode() for caption in inputs["captions"]]
            image_ids, text_ids = ids["image_ids"].tolist(), ids["text_ids"].tolist()
            batches.append(list(zip(pixels.tolist(), captions, image_ids, text_ids)))
    return batches


@pytest.fixture(scope="session")
def pair_tools():
    return SimpleNamespace(shape=SHAPE, png=png, rows=rows)
