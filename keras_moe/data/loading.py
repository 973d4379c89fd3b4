"""From the name of a data set to batches that a model can be trained on."""

import difflib
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe.data import digits, folders
from keras_moe.data.augmentation import Step, build_steps
from keras_moe.data.tfds import Examples, count_classes, read_examples

# Encoded examples that shuffling holds: a gigabyte of photographs. Files are
# shuffled besides.
_SHUFFLE_BUFFER = 10_000


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
) -> Any:
    """Loads batches of images and labels as a `tf.data.Dataset`, for any backend.

    Images are resized bilinearly, without antialiasing, as the published pipelines
    do. Grey images are repeated over the channels, and RGB becomes luminance where
    `image_shape` has one channel.

    The same arguments give the same batches, together with TensorFlow's global seed
    where one is set. Each pass over the data set has another order and another
    augmentation. Exceptions are layers and callables in `augment` with randomness
    of their own, see there.

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
    height, width, channels = digits.check_image_shape(image_shape)
    batch_size = _check_integer("batch_size", batch_size, minimum=1)
    seed = _check_integer("seed", seed, minimum=0)
    if not isinstance(split, str):
        raise ValueError(f"Expected the name of a split; received: split={split!r}")
    steps = build_steps(augment, (height, width, channels), seed)
    shuffle = split.startswith("train") if shuffle is None else bool(shuffle)
    one_hot = one_hot or any(step.mixes_labels for step in steps)
    depth = num_classes(source, data_dir)
    tf = _tensorflow()

    examples = _open_split(tf, source, split, data_dir, shuffle, seed)
    dataset = examples.dataset
    if shuffle:
        dataset = dataset.shuffle(min(examples.count, _SHUFFLE_BUFFER), seed=seed)

    # From the first that mixes labels on, augmentation works on batches.
    first_mixer = [step.mixes_labels for step in steps] + [True]
    per_image = steps[: first_mixer.index(True)]
    per_batch = steps[len(per_image) :]

    def prepare(stored, label):
        pixels = tf.cast(examples.decode(stored), "float32")
        return _to_channels(tf, pixels, channels), tf.cast(label, "int32")

    def resize(images, labels):
        return tf.image.resize(images, (height, width)), labels

    def finish(images, labels):
        images = tf.clip_by_value(images, 0.0, 255.0) / 127.5 - 1.0
        return images, labels

    dataset = dataset.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    if per_image and per_image[0].reads_full_size:
        dataset = _augmented(tf, dataset, per_image[:1], seed, 0)
        per_image = per_image[1:]
    dataset = dataset.map(resize, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = _augmented(tf, dataset, per_image, seed, len(steps))
    dataset = dataset.batch(batch_size, drop_remainder=drop_remainder)
    if one_hot:
        dataset = dataset.map(lambda images, label: (images, tf.one_hot(label, depth)))
    dataset = _augmented(tf, dataset, per_batch, seed, 2 * len(steps))
    dataset = dataset.map(finish, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.prefetch(tf.data.AUTOTUNE)


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
    if (path := _folder_path(source)) is not None:
        return len(folders.class_names(path))
    name = _tfds_name(source)
    return digits.NUM_CLASSES if name is None else count_classes(name, data_dir)


def _open_split(tf, source, split, data_dir, shuffle, seed) -> Examples:
    if (path := _folder_path(source)) is not None:
        return folders.read_examples(path, split, shuffle, seed)
    name = _tfds_name(source)
    if name is not None:
        return read_examples(name, split, data_dir, shuffle, seed)
    pixels, labels = digits.read_pixels(split)
    dataset = tf.data.Dataset.from_tensor_slices((pixels, labels))
    return Examples(dataset, lambda pixels: pixels, len(labels))


def _folder_path(source: str) -> str | None:
    """The PATH of "folder:PATH", None for other sources."""
    is_folder = isinstance(source, str) and source.startswith("folder:")
    return source.removeprefix("folder:") if is_folder else None


def _tfds_name(source: str) -> str | None:
    """The NAME of "tfds:NAME", None for the digits; raises for anything else."""
    if source == "digits":
        return None
    if isinstance(source, str) and source.startswith("tfds:") and source != "tfds:":
        return source.removeprefix("tfds:")
    hint = ""
    if isinstance(source, str) and source:
        guesses = ["digits"] if difflib.get_close_matches(source, ["digits"]) else []
        kind = "folder" if Path(source).is_dir() else "tfds"
        guesses.append(f"{kind}:{source.split(':')[-1] or 'NAME'}")
        hint = f"; did you mean {' or '.join(map(repr, guesses))}?"
    raise ValueError(
        "Expected 'digits', 'tfds:NAME' or 'folder:PATH'; "
        f"received: source={source!r}{hint}"
    )


def _augmented(tf, dataset, steps: list[Step], seed: int, offset: int):
    """Applies steps to a data set, with a seed for each of its elements."""
    # A map for each: only those without state of their own may run in parallel.
    for index, step in enumerate(steps):
        # Other numbers in every pass over the data set, the same in the next process.
        seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)

        def apply(example, element, step=step, index=offset + index):
            # Steps share the numbers of an element, not the seeds made of them.
            pair = tf.stack([tf.cast(element % (2**31 - 1), "int32"), index])
            return step.function(*example, pair)

        parallel = tf.data.AUTOTUNE if step.is_stateless else None
        dataset = tf.data.Dataset.zip((dataset, seeds)).map(
            apply, num_parallel_calls=parallel
        )
    return dataset


def _to_channels(tf, pixels, channels: int):
    given = pixels.shape[-1]
    if given == channels:
        return pixels
    if given == 1:
        return tf.repeat(pixels, channels, axis=-1)
    if (given, channels) == (3, 1):
        return tf.image.rgb_to_grayscale(pixels)
    raise ValueError(
        "Expected as many channels as the images have, or grey images, or one channel; "
        f"received: image_shape with {channels} channels for images with {given}"
    )


def _tensorflow() -> Any:
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            'Input pipelines are tf.data: pip install "keras-moe[data]"'
        ) from error
    return tf


def _check_integer(name: str, value: Any, minimum: int) -> int:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < minimum:
        raise ValueError(
            f"Expected an integer of at least {minimum}; received: {name}={value!r}"
        )
    return int(value)
