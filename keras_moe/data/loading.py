"""From the name of a data set to batches that a model can be trained on."""

from typing import Any

import numpy as np

from keras_moe.data import digits
from keras_moe.data.augmentation import build_steps
from keras_moe.data.examples import Share
from keras_moe.data.pipeline import Plan, batches
from keras_moe.data.sources import count_classes, open_source


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
            which is downloaded if it is not in `data_dir`; or `"folder:PATH"` for
            images in files `PATH/split/class/name.png` (or jpg, bmp, gif).
        split: `"train"`, `"test"` or `"all"` of the digits; any split of TensorFlow
            Datasets, such as `"train[:90%]"`; a folder's name.
        image_shape: (height, width, channels) of the images.
        batch_size: images per batch.
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
        one_hot: whether labels are one-hot vectors; mixing labels makes them so.
        drop_remainder: whether to drop a last batch that is not full.
        data_dir: of TensorFlow Datasets.
        repeat: whether passes follow one another without end. All batches are full:
            what does not fill one at the end of a pass is left out of it.
        start_batch: with `repeat`, the batch to begin with. Layers and callables with
            a random state of their own cannot go on where they were, and there is a
            warning.

    Returns:
        A `tf.data.Dataset` of (images, labels): float32 (batch, height, width,
        channels) in [-1, 1]; int32 (batch,), or float32 (batch, classes). Layers in
        `augment` may change the size of the images.

    Raises:
        ValueError: if the source, the split or another argument is not known or out
            of range, or if the data set has not one image and one label per example.
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
    batch_size = _check_integer("batch_size", batch_size, minimum=1)
    seed = _check_integer("seed", seed, minimum=0)
    start_batch = _check_integer("start_batch", start_batch, minimum=0)
    if start_batch and not repeat:
        raise ValueError(
            "Expected repeat=True with a batch to start at; "
            f"received: repeat={repeat}, start_batch={start_batch}"
        )
    _check_split(split)
    steps = build_steps(augment, image_shape, seed)
    one_hot = one_hot or any(step.mixes_labels for step in steps)
    depth = num_classes(source, data_dir)
    _tensorflow()

    examples = open_source(source, split, data_dir)
    if repeat and examples.count < batch_size:
        raise ValueError(
            f"Expected a batch no larger than the {examples.count} examples of "
            f"{source!r}, split={split!r}; received: batch_size={batch_size}"
        )
    plan = Plan(
        image_shape=image_shape,
        steps=steps,
        num_classes=depth if one_hot else None,
        share=Share(0, 1, batch_size),
        shuffle=split.startswith("train") if shuffle is None else bool(shuffle),
        seed=seed,
        drop_remainder=bool(drop_remainder or repeat),
        start_batch=start_batch if repeat else None,
    )
    return batches(examples, plan)


def num_classes(source: str, data_dir: str | None = None) -> int:
    """Number of classes of a source that `load` knows; downloads nothing.

    Args:
        source: `"digits"`, `"tfds:NAME"` or `"folder:PATH"`.
        data_dir: of TensorFlow Datasets.

    Raises:
        ValueError: if the source is not known.

    Example:

    >>> from keras_moe.data import num_classes
    >>> num_classes("digits")
    10
    """
    return count_classes(source, data_dir)


def num_examples(source: str, split: str, data_dir: str | None = None) -> int:
    """Number of examples in a split of a source that `load` knows.

    Args:
        source: as of `load`.
        split: as of `load`.
        data_dir: of TensorFlow Datasets.

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
    return open_source(source, split, data_dir).count


def _tensorflow() -> Any:
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            'Input pipelines are tf.data: pip install "keras-moe[data]"'
        ) from error
    return tf


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
