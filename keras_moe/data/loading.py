"""From the name of a data set to batches that a model can be trained on."""

from typing import Any

import numpy as np

from keras_moe.data import digits
from keras_moe.data.augmentation import build_steps
from keras_moe.data.examples import Share
from keras_moe.data.label_hierarchy import as_hierarchy
from keras_moe.data.labels import make_labels
from keras_moe.data.pipeline import Plan, batches
from keras_moe.data.sources import count_classes, open_source
from keras_moe.data.unreadable import left_out


def load(
    source: str,
    split: str,
    image_shape: tuple[int, int, int] = (224, 224, 3),
    batch_size: int = 64,
    augment: Any = None,
    shuffle: bool | None = None,
    seed: int = 0,
    one_hot: bool = False,
    drop_remainder: bool = False,
    data_dir: str | None = None,
    repeat: bool = False,
    start_batch: int = 0,
    multi_label: bool = False,
    hierarchy: Any = None,
    max_labels: int | None = None,
    shard: tuple[int, int] = (0, 1),
    exclude: Any = (),
    unreadable: str = "raise",
) -> Any:
    """Loads batches of images and labels as a `tf.data.Dataset`, for any backend.

    Images are resized bilinearly, without antialiasing, as the published pipelines
    do. Grey images are repeated over the channels, and RGB becomes luminance where
    `image_shape` has one channel.

    The same arguments give the same batches, together with TensorFlow's global seed
    where one is set. Each pass over the data set has another order and another
    augmentation. Exceptions are layers and callables in `augment` with randomness
    of their own, see there.

    With `repeat` the data set has no end, and batch n of it follows from the arguments
    alone, in any process: `start_batch=n` gives, bit for bit, what comes after n
    batches. Images in memory and in folders begin there at once; of record files the
    records before are read, not decoded.

    Args:
        source: `"digits"`, scikit-learn's handwritten digits; `"tfds:NAME"` for a
            classification data set of TensorFlow Datasets, such as `"tfds:cifar10"`,
            which is downloaded if it is not in `data_dir`; `"tfrecord:GLOB"` for
            TFRecord files, or a folder of such, with a `dataset.json` beside them that
            names the classes, see `write_tfrecords`, and `find_corrupt_files` where
            records cannot be read; or `"folder:PATH"` for images in
            files `PATH/split/class/name.png` (or jpg, bmp, gif; webp from TensorFlow
            2.20 on), also in folders within that of the class, or with several labels
            each in `PATH/split/labels.json`, such as
            `{"name.png": ["cat", "animal"]}`. A warning counts other files, such as
            tif, which TensorFlow does not decode.
        split: `"train"`, `"test"` or `"all"` of the digits; any split of TensorFlow
            Datasets, such as `"train[:90%]"`; a word in the names of TFRecord files,
            such as `train-00000-of-00008.tfrecord`; a folder's name.
        image_shape: (height, width, channels) of the images.
        batch_size: images per batch, those of all shards together.
        augment: what to do to the images at random:

            - None: nothing.
            - `"flip"`: left-right, every second image.
            - `"random_resized_crop"`: `keras_moe.data.RandomResizedCrop`.
            - `"randaugment"`: `keras_moe.data.RandAugment`.
            - `"mixup"`, `"cutmix"`: `keras.layers.MixUp(0.2)`,
              `keras.layers.CutMix()`.
            - `"translation"`, `"rotation"`: by up to a tenth of the image, 0.03 turns.
            - a dict of a name and its options, such as `{"name": "mixup", "alpha":
              0.5}`: `alpha` of mixup; `factor` of cutmix, translation and rotation;
              `num_ops` and `magnitude` of randaugment; `scale` and `ratio` of
              random_resized_crop.
            - a layer of Keras or KerasCV. All pixels are in [0, 255].
            - a callable, from images (TensorFlow) to images. If it has an argument
              `seed`, it gets two integers for `tf.random.stateless_*`. If it has an
              attribute `mixes_labels = True`, it gets and gives a dict of "images"
              and one-hot "labels".
            - a sequence of these, applied in order.

            What comes before the first layer that mixes labels sees single images,
            and the rest sees batches. Layers of Keras draw from seeds per element;
            layers of KerasCV and callables without `seed` use their own random
            state, one call after the other, in the order of the data.
        shuffle: by default True for splits that begin with "train".
        seed: of the order and of the augmentation. The digits' own split into train
            and test does not depend on it.
        one_hot: whether labels are one-hot vectors, or 0-1 vectors with `multi_label`;
            mixing labels makes them so.
        drop_remainder: whether to drop a last batch that is not full.
        data_dir: of TensorFlow Datasets.
        repeat: whether passes follow one another without end. All batches are full:
            what does not fill one at the end of a pass is left out of it.
        start_batch: with `repeat`, the batch to begin with. Layers and callables with
            a random state of their own cannot go on where they were, and there is a
            warning.
        multi_label: whether examples have several labels. They are numbers of classes,
            sorted and padded with -1, for `keras_moe.losses.SparseSigmoidCrossentropy`;
            with `one_hot` they are vectors.
        hierarchy: a `LabelHierarchy`, its dict or its file, with `multi_label`: an
            example has all classes above its own, too. Labels are then those of the
            hierarchy, in which the source's classes are found by their names.
        max_labels: with `multi_label`, how many numbers there are for an example; the
            default is the most that can come, where the source knows.
        shard: (index, count), the part of this host among several. All have equally
            many batches, and see different examples. Images in memory and in folders
            are rows of the batches of one host alone; of record files each host reads
            its own part. With a distribution of Keras set `auto_shard_dataset=False`.
        exclude: indices of examples in the order of the source to leave out, or a JSON
            file of `write_exclusion`, as `keras-moe deduplicate` writes it, or a list
            of such files.
        unreadable: what becomes of images that cannot be read or decoded. `"raise"` is
            an error that names the file, when the image is met; see `reading_errors`
            for its class. `"exclude"` decodes all images once before the first batch,
            warns of those that cannot be read, with their number, and leaves them out
            as `exclude` does: batch n still follows from the arguments, as long as the
            same images are unreadable. `find_unreadable` and `write_exclusion` do it
            once for all runs.

    Returns:
        A `tf.data.Dataset` of (images, labels): float32 (batch, height, width,
        channels) in [-1, 1]; int32 (batch,) or (batch, max_labels), or float32 (batch,
        classes). Layers in `augment` may change the size of the images.

    Raises:
        ValueError: if the source, the split or another argument is not known or out
            of range, or if the data set has not one image and one label per example,
            or several with `multi_label`.
        ImportError: if TensorFlow, TensorFlow Datasets or scikit-learn is needed and
            not installed.

    Example:

    ```python
    shape = (32, 32, 3)
    train = load("digits", "train", shape, augment=["randaugment", "mixup"])
    model.fit(train, validation_data=load("digits", "test", shape, one_hot=True))
    ```
    """
    image_shape = digits.check_image_shape(image_shape)
    if source == "digits":
        digits.check_channels(image_shape)
    batch_size = _check_integer("batch_size", batch_size, minimum=1)
    seed = _check_integer("seed", seed, minimum=0)
    start_batch = _check_integer("start_batch", start_batch, minimum=0)
    if start_batch and not repeat:
        raise ValueError(
            "Expected repeat=True with a batch to start at; "
            f"received: repeat={repeat}, start_batch={start_batch}"
        )
    if max_labels is not None:
        max_labels = _check_integer("max_labels", max_labels, minimum=1)
    index, count = _check_shard(shard, batch_size)
    _check_split(split)
    steps = build_steps(augment, image_shape, seed)
    one_hot = one_hot or any(step.mixes_labels for step in steps)
    if hierarchy is not None:
        hierarchy = as_hierarchy(hierarchy)
    _tensorflow()

    examples = open_source(source, split, data_dir)
    labels = make_labels(
        examples.classes, source, bool(multi_label), hierarchy, max_labels, one_hot
    )
    excluded = left_out(examples, source, split, exclude, unreadable)
    if len(excluded):
        examples = examples.without(excluded)
    full = bool(drop_remainder or repeat)
    rest = examples.count % batch_size
    if (repeat and examples.count < batch_size) or (not full and 0 < rest < count):
        what = "without them" if len(excluded) else f"of {source!r}, split={split!r}"
        raise ValueError(
            "Expected a batch no larger than the examples, and an example of a last "
            f"batch for each shard or drop_remainder=True; there are {examples.count} "
            f"examples {what}; received: batch_size={batch_size}, shard={shard}"
        )
    plan = Plan(
        image_shape=image_shape,
        steps=steps,
        labels=labels,
        share=Share(index, count, batch_size // count),
        shuffle=split.startswith("train") if shuffle is None else bool(shuffle),
        seed=seed,
        drop_remainder=full,
        start_batch=start_batch if repeat else None,
    )
    return batches(examples, plan)


def num_classes(source: str, data_dir: str | None = None) -> int:
    """Number of classes of a source that `load` knows; downloads nothing.

    Args:
        source: as of `load`.
        data_dir: of TensorFlow Datasets.

    Raises:
        ValueError: if the source is not known.

    Example:

    >>> from keras_moe.data import num_classes
    >>> num_classes("digits")
    10
    """
    return count_classes(source, data_dir)


def num_examples(
    source: str,
    split: str,
    data_dir: str | None = None,
    exclude: Any = (),
    unreadable: str = "raise",
) -> int:
    """Number of examples in a split of a source that `load` knows.

    Args:
        source: as of `load`.
        split: as of `load`.
        data_dir: of TensorFlow Datasets.
        exclude: as of `load`; these are not counted.
        unreadable: as of `load`.

    Raises:
        ValueError: if the source or the split is not known.
        ImportError: as `load`.

    Example:

    >>> from keras_moe.data import num_examples
    >>> num_examples("digits", "test")
    450
    """
    _check_split(split)
    _tensorflow()
    examples = open_source(source, split, data_dir)
    return examples.count - len(left_out(examples, source, split, exclude, unreadable))


def _tensorflow() -> Any:
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            'Input pipelines are tf.data: pip install "keras-moe[data]"'
        ) from error
    return tf


def _check_shard(shard: Any, batch_size: int) -> tuple[int, int]:
    try:
        index, count = shard
        index = _check_integer("shard[0]", index, minimum=0)
        count = _check_integer("shard[1]", count, minimum=1)
    except (TypeError, ValueError):
        index, count = 0, 0
    if index >= count or batch_size % count:
        raise ValueError(
            "Expected (index, count) with 0 <= index < count, where count divides "
            f"batch_size; received: shard={shard!r}, batch_size={batch_size}"
        )
    return index, count


def _check_split(split: Any) -> None:
    if not isinstance(split, str):
        raise ValueError(f"Expected the name of a split; received: split={split!r}")


def _check_integer(name: str, value: Any, minimum: int) -> int:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < minimum:
        raise ValueError(
            f"Expected an integer of at least {minimum}; received: {name}={value!r}"
        )
    return int(value)
