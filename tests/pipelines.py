"""Images that carry their number in each pixel, and batches read back."""

from itertools import chain

import keras
import numpy as np

SHAPE = (4, 4, 3)


def picture(number, shape=SHAPE):
    """An image of one grey level."""
    return np.full(shape, number, "uint8")


def png(number):
    """A PNG file of one grey level."""
    import tensorflow as tf

    return tf.io.encode_png(picture(number)).numpy()


def save(path, number):
    """Writes an image of one grey level, in the format of the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    keras.utils.save_img(path, picture(number), scale=False)


def levels(images):
    """The numbers of images in [-1, 1]."""
    return np.round((images[:, 0, 0, 0] + 1) * 127.5).astype(int).tolist()


def numbers(dataset):
    """The numbers of the images of labelled batches, in batches."""
    return [levels(images) for images, _ in dataset.as_numpy_iterator()]


def arrays(dataset):
    """All images and labels of one pass."""
    images, labels = zip(*dataset.as_numpy_iterator())
    return np.concatenate(images), np.concatenate(labels)


def same(first, second):
    """Whether two sequences of arrays are equal."""
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def rows(dataset, take=-1):
    """The (image, caption, image id, text id) of each pair, in batches."""
    from keras_moe.data import reading_errors

    batches = []
    with reading_errors():
        for inputs, ids in dataset.take(take).as_numpy_iterator():
            captions = [caption.decode() for caption in inputs["captions"]]
            columns = (ids["image_ids"].tolist(), ids["text_ids"].tolist())
            batches.append(list(zip(levels(inputs["images"]), captions, *columns)))
    return batches


def in_pipeline(function, images, seed=0):
    """`function(image, seed)` of each image inside `tf.data`."""
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(images).enumerate()
    dataset = dataset.map(
        lambda i, image: function(image, tf.stack([tf.cast(i, "int32"), seed]))
    )
    return np.stack(list(dataset.as_numpy_iterator()))


def check_resumption(read, take=7, starts=(5,), shards=2):
    """Checks that `read(take, **options)` goes on anywhere, and in shards of rows."""
    whole = read(take)
    for start in starts:
        assert read(take - start, start_batch=start) == whole[start:]
    parts = [read(take, shard=(index, shards)) for index in range(shards)]
    assert [list(chain(*several)) for several in zip(*parts)] == whole
    return whole
