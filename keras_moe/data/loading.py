"""Batches that a model can be trained on, from the name of a data set."""

import dataclasses
from typing import Any

from keras_moe.checks import (
    LARGEST_SEED,
    check_argument_names,
    check_bool,
    check_image_shape,
    check_integer,
)
from keras_moe.data import digits
from keras_moe.data.augmentation import build_steps
from keras_moe.data.examples import Examples
from keras_moe.data.label_hierarchy import as_hierarchy
from keras_moe.data.labels import Labels, make_labels
from keras_moe.data.order_options import (
    OrderOptions,
    check_split,
    check_tensorflow,
)
from keras_moe.data.pipeline import BatchSettings, batches
from keras_moe.data.sources import count_classes, open_source
from keras_moe.data.unreadable import left_out


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions(OrderOptions):
    """Options of `load` for long runs, several labels, several hosts and bad images.

    Args:
        repeat: whether passes follow one another without end. All batches are full:
            the examples that do not fill one at the end of a pass are left out of it.
        start_batch: number of the batch to begin with, if `repeat` is true. Layers and
            callables with a random state of their own cannot go on where they were,
            and there is a warning.
        shard: (index, count), the part of this host among several. All hosts have
            equally many batches, and see different examples. With images in memory and
            in folders, a host has rows of the batches of one host alone; with record
            files each host reads its own part. With a distribution of Keras set
            `auto_shard_dataset=False`.
        multi_label: whether examples have several labels. They are numbers of classes,
            sorted and padded with -1, for `keras_moe.losses.SparseSigmoidCrossentropy`;
            with `one_hot` they are vectors.
        hierarchy: a `LabelHierarchy`, its dict or the path of its file, if
            `multi_label` is true: an example has all classes above its own, too. Labels
            are then those of the hierarchy, which has the source's classes by their
            names.
        max_labels: number of labels of an example after padding, if `multi_label` is
            true; the default is the largest number there can be, where the source
            knows it.
        exclude: indices of the examples to leave out, in the order of the source; or
            the path of a JSON file of `write_exclusion` or `keras-moe deduplicate`; or
            a list of such paths.
        unreadable: treatment of images that cannot be read or decoded. `"raise"` is
            an error that names the file, when the image is met; see `reading_errors`
            for its class. `"exclude"` decodes all images once before the first batch,
            warns of those that cannot be read, with their number, and leaves them out
            as `exclude` does: batch n still follows from the arguments, as long as the
            same images are unreadable. `find_unreadable` and `write_exclusion` do it
            once for all runs.

    Raises:
        ValueError: if an option is out of range.

    Example:

    >>> from keras_moe.data import LoadOptions
    >>> LoadOptions(repeat=True, start_batch=100).start_batch
    100
    """

    multi_label: bool = False
    hierarchy: Any = None
    max_labels: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_bool("multi_label", self.multi_label)
        if self.max_labels is not None:
            check_integer("max_labels", self.max_labels)

    def labels_of(self, examples: Examples, source: str, one_hot: bool) -> Labels:
        """The labels that the options ask for, of the examples of a source."""
        hierarchy = self.hierarchy
        return make_labels(
            examples.classes,
            source,
            self.multi_label,
            None if hierarchy is None else as_hierarchy(hierarchy),
            self.max_labels,
            one_hot,
        )


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
    **options: Any,
) -> Any:
    """Loads batches of images and labels as a `tf.data.Dataset`, for any backend.

    Images are resized bilinearly, without antialiasing, as in the published pipelines.
    Grey images are repeated over the channels, and RGB becomes luminance where
    `image_shape` has one channel.

    The same arguments give the same batches, together with TensorFlow's global seed
    where one is set. Each pass over the data set has another order and another
    augmentation. Exceptions are layers and callables in `augment` with a random state
    of their own; see there.

    With `repeat` the data set has no end, and its batch n follows from the arguments
    alone, in any process: `start_batch=n` gives, bit for bit, the batches after the
    first n. Images in memory and in folders begin there at once; in record files the
    records before are read, and not decoded.

    Args:
        source: name of the data set: `"digits"`, scikit-learn's handwritten digits;
            `"emoji"` or `"emoji:noto"`, OpenMoji's or Noto's drawings with Unicode's
            subgroups as classes (see `load_emoji`); `"fashion_mnist"`, the files of
            the Debian package `dataset-fashion-mnist` or in `data_dir`, else TensorFlow
            Datasets'; `"openclipart:PATH"`, the drawings of the Debian packages
            `openclipart-png` and `openclipart-svg`, with their categories as classes;
            `"tfds:NAME"` for a classification data set of TensorFlow Datasets, such as
            `"tfds:cifar10"`, which is downloaded if it is not in `data_dir`;
            `"tfrecord:GLOB"` for TFRecord files, or a folder of such, with a
            `dataset.json` beside them that names the classes (see `write_tfrecords`,
            and `find_corrupt_files` where records cannot be read); or `"folder:PATH"`
            for images in files `PATH/split/class/name.png` (or jpg, bmp, gif; webp
            from TensorFlow 2.20 on), also in folders below that of the class, or with
            several labels each in `PATH/split/labels.json`, such as
            `{"name.png": ["cat", "animal"]}`. A warning counts other files, such as
            tif, which TensorFlow does not decode.
        split: `"train"`, `"test"` or `"all"` of the digits and Fashion-MNIST;
            a split of `load_emoji`; any split of TensorFlow Datasets, such as
            `"train[:90%]"`; a word in the names of TFRecord files, such as
            `train-00000-of-00008.tfrecord`; a folder's name.
        image_shape: (height, width, channels) of the images.
        batch_size: number of images in a batch, those of all shards together.
        augment: random changes of the images:

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
              attribute `mixes_labels = True`, it takes and returns a dict of "images"
              and one-hot "labels".
            - a sequence of these, applied in order.

            Steps before the first one that mixes labels see single images, and the
            others see batches. Layers of Keras draw from seeds per element; layers of
            KerasCV and callables without `seed` use their own random state, one call
            after the other, in the order of the data.
        shuffle: whether the order is random; None is True for splits that begin with
            "train".
        seed: seed of the order and of the augmentation. The digits' and the emoji's
            own splits do not depend on it.
        one_hot: whether labels are one-hot vectors, or 0-1 vectors with `multi_label`;
            mixing labels makes them so.
        drop_remainder: whether to drop a last batch that is not full.
        data_dir: folder of TensorFlow Datasets, or with Fashion-MNIST's files.
        **options: fields of `LoadOptions`: `repeat`, `start_batch`, `shard`,
            `multi_label`, `hierarchy`, `max_labels`, `exclude`, `unreadable`.

    Returns:
        A `tf.data.Dataset` of (images, labels): float32 (batch, height, width,
        channels) in [-1, 1]; int32 (batch,) or (batch, max_labels), or float32 (batch,
        classes). Layers in `augment` may change the size of the images.

    Raises:
        ValueError: if the source, the split or another argument is not known or out
            of range, or if the data set has not one image and one label per example,
            or several with `multi_label`.
        ImportError: if TensorFlow, TensorFlow Datasets, scikit-learn or a package of
            `keras-moe[emoji]` is needed and not installed.

    Example:

    ```python
    shape = (32, 32, 3)
    train = load("digits", "train", shape, augment=["randaugment", "mixup"])
    model.fit(train, validation_data=load("digits", "test", shape, one_hot=True))
    ```
    """
    image_shape = check_image_shape(image_shape)
    if source == "digits":
        digits.check_channels(image_shape)
    check_integer("batch_size", batch_size)
    check_integer("seed", seed, 0, LARGEST_SEED)
    check_bool("one_hot", one_hot)
    check_bool("drop_remainder", drop_remainder)
    if shuffle is not None:
        check_bool("shuffle", shuffle)
    check_split(split)
    known = [field.name for field in dataclasses.fields(LoadOptions)]
    check_argument_names(options, known, "load")
    options = LoadOptions(**options)
    share = options.share_of(batch_size)
    steps = build_steps(augment, image_shape, seed)
    one_hot = one_hot or any(step.mixes_labels for step in steps)
    check_tensorflow()

    examples = open_source(source, split, data_dir)
    labels = options.labels_of(examples, source, one_hot)
    excluded = left_out(examples, source, split, options.exclude, options.unreadable)
    if len(excluded):
        examples = examples.without(excluded)
    full = drop_remainder or options.repeat
    options.check_count(
        examples.count,
        batch_size,
        full,
        "without them" if len(excluded) else f"of {source!r}, split={split!r}",
    )
    return batches(
        examples,
        BatchSettings(
            image_shape=image_shape,
            steps=steps,
            labels=labels,
            share=share,
            shuffle=split.startswith("train") if shuffle is None else shuffle,
            seed=int(seed),
            drop_remainder=full,
            start_batch=options.first_batch,
        ),
    )


def num_classes(source: str, data_dir: str | None = None) -> int:
    """Number of classes of a source that `load` knows; downloads nothing.

    Args:
        source: name of a source of `load`.
        data_dir: folder of TensorFlow Datasets.

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
        source: name of a source of `load`.
        split: name of a split of `load`.
        data_dir: folder of TensorFlow Datasets.
        exclude: examples that are not counted; see `LoadOptions`.
        unreadable: treatment of images that cannot be read; see `LoadOptions`.

    Raises:
        ValueError: if the source or the split is not known.
        ImportError: if TensorFlow, TensorFlow Datasets, scikit-learn or a package of
            `keras-moe[emoji]` is needed and not installed.

    Example:

    >>> from keras_moe.data import num_examples
    >>> num_examples("digits", "test")
    450
    """
    check_split(split)
    check_tensorflow()
    examples = open_source(source, split, data_dir)
    return examples.count - len(left_out(examples, source, split, exclude, unreadable))
