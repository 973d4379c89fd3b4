"""Batches of images and captions that a two-tower model can be trained on."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from keras_moe.checks import (
    LARGEST_SEED,
    check_argument_names,
    check_bool,
    check_image_shape,
    check_integer,
    check_one_of,
)
from keras_moe.data.augmentation import build_steps
from keras_moe.data.order_options import (
    OrderOptions,
    check_split,
    check_tensorflow,
)
from keras_moe.data.pairs.captions import CHOICES, CaptionChoice
from keras_moe.data.pairs.mixture import batch_sizes, mixed
from keras_moe.data.pairs.opening import SourceOptions, open_all
from keras_moe.data.pairs.records import read_captions
from keras_moe.data.pipeline import BatchSettings, batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairOptions(OrderOptions):
    """Options of `load_pairs`: its order, its captions, and the sources' own.

    Args:
        repeat: whether passes follow one another without end; see `LoadOptions`.
        start_batch: number of the batch to begin with, if `repeat` is true.
        shard: (index, count), the part of this host among several; see `LoadOptions`.
        exclude: indices of the images to leave out, with all their captions, in the
            order of the source; or files of such; see `LoadOptions`. For a mixture, a
            dict of the sources with theirs.
        unreadable: treatment of images that cannot be read, and of captions that are
            missing, empty or not UTF-8. `"raise"` is an error that names the image.
            `"exclude"` reads all images once before the first batch, warns of the
            others, with their number, and leaves them out with all their captions.
        captions: choice of the captions where an image has several: `"random"` draws
            one in each pass, by seed; `"first"` takes the first one; with `"all"` each
            caption makes a pair of its own, and a pass has every pair once.
        templates: captions of a source of classes, such as `"a photo of a {}."`, or a
            sequence of such, or the path of a text file with one in each line. The
            class's name takes the place of `{}`. The default is `"{}"`.
        style: drawings of the emoji, `"openmoji"` or `"noto"`; None for OpenMoji's.
        language: language of the emoji's names; None for English.
        size: side at which emoji are drawn, before they are resized to `image_shape`;
            None for the size of the images.

    Raises:
        ValueError: if an option is out of range.

    Example:

    >>> from keras_moe.data import PairOptions
    >>> PairOptions(captions="all").captions
    'all'
    """

    captions: str = "random"
    templates: Any = None
    style: str | None = None
    language: str | None = None
    size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_one_of("captions", self.captions, CHOICES)
        if self.size is not None:
            check_integer("size", self.size)

    def source_options(self, image_shape: tuple, data_dir: str | None) -> SourceOptions:
        """The options that decide what a source has."""
        return SourceOptions(
            image_shape,
            self.captions == "all",
            self.templates,
            self.style,
            self.language,
            self.size,
            data_dir,
        )

    def faults_of(self, name: str, source: Any) -> tuple[Any, str]:
        """`exclude` of one source, and `unreadable`.

        Args:
            name: name of the source.
            source: this source, or a mixture that has it.
        """
        if not isinstance(source, Mapping):
            return self.exclude, self.unreadable
        exclude = self.exclude
        if exclude is None or (isinstance(exclude, (tuple, list)) and not exclude):
            exclude = {}
        if not isinstance(exclude, Mapping) or {*exclude} - {*source}:
            raise ValueError(
                f"Expected exclude as a dict of the sources of a mixture, {[*source]}; "
                f"received: exclude={self.exclude!r:.100}"
            )
        return exclude.get(name, ()), self.unreadable


def load_pairs(
    source: Any,
    split: str,
    image_shape: tuple[int, int, int] = (224, 224, 3),
    batch_size: int = 64,
    tokenizer: Callable[[Any], dict] | None = None,
    augment: Any = None,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_remainder: bool = False,
    data_dir: str | None = None,
    **options: Any,
) -> Any:
    """Loads batches of images and captions as a `tf.data.Dataset`, for any backend.

    The order, its seeds, shards and resumption are those of `keras_moe.data.load`:
    with `repeat`, batch n follows from the arguments alone, and `start_batch=n` gives,
    bit for bit, the batches after the first n.

    Args:
        source: pairs to load:

            - `"emoji"`, or `"emoji:noto"`: pictures of emoji with their names; see
              `keras_moe.data.load_emoji`.
            - `"openclipart:PATH"`: drawings of the Debian packages `openclipart-png`
              and `openclipart-svg`, with captions of their titles and keywords.
            - `"folder:PATH"`: images in `PATH/split`, and their captions in
              `captions.csv`, with the columns "image" and "caption", or in
              `captions.jsonl`, with an object `{"image": "a.png", "caption": "a cat"}`
              in each line. An image may have several lines.
            - `"webdataset:GLOB"`: tar files, not compressed, or a folder of such:
              `0007.jpg` with `0007.txt`, or with `0007.json`, which has a "caption".
            - `"tfrecord:GLOB"`: files of `write_pair_tfrecords`, or others with a
              `dataset.json` that names their features.
            - `"tfds:NAME"`: a data set of TensorFlow Datasets with captions, such as
              `"tfds:coco_captions"`.
            - any source of `keras_moe.data.load`, such as `"digits"`: the names of the
              classes are captions, by `templates`.
            - a tuple of images in memory, uint8 (images, height, width, channels), and
              captions: a string, or a sequence of strings, for each image.
            - a dict of such names and their weights, such as `{"tfds:coco_captions": 3,
              "emoji": 1}`: a mixture, in which each batch has 3 pairs of the first
              source for each pair of the second. It needs `repeat`.
        split: split of the source, a word in the names of tar and record files; tar
            files whose names have numbers alone are in every split. Arrays have none,
            and any word will do.
        image_shape: (height, width, channels) of the images.
        batch_size: number of pairs in a batch, those of all shards together.
        tokenizer: callable from a string tensor (batch,) to a dict of `"token_ids"` and
            `"padding_mask"`, such as `keras_moe.models.TextTokenizer`; None for
            captions as strings.
        augment: random changes of the images, which leave the captions as they are; see
            `keras_moe.data.load`. Those that mix labels are refused. A flip makes
            captions with "left" and "right" false.
        shuffle: whether the order is random; None is True for splits that begin with
            "train".
        seed: seed of the order, of the captions and of the augmentation.
        drop_remainder: whether to drop a last batch that is not full.
        data_dir: folder of TensorFlow Datasets.
        **options: fields of `PairOptions`: `repeat`, `start_batch`, `shard`, `exclude`,
            `unreadable`, `captions`, `templates`, `style`, `language`, `size`.

    Returns:
        A `tf.data.Dataset` of `(inputs, ids)`. `inputs` is a dict of `"images"`,
        float32 (batch, height, width, channels) in [-1, 1], and of `"token_ids"`, int32
        (batch, tokens), with `"padding_mask"`, bool (batch, tokens); or without a
        tokenizer of `"captions"`, strings (batch,). `ids` is a dict of `"image_ids"`
        and `"text_ids"`, int32 (batch,), equal where pairs have one image, or one
        caption.

    Raises:
        ValueError: if an argument is not known or out of range, or the source has
            images without captions, or the reverse.

    Example:

    >>> import numpy as np
    >>> from keras_moe.data import load_pairs
    >>> images = np.zeros((2, 8, 8, 3), "uint8")
    >>> pairs = load_pairs((images, ["a cat", "a dog"]), "test", (8, 8, 3))
    >>> inputs, ids = next(iter(pairs))
    >>> inputs["captions"].numpy().tolist(), ids["text_ids"].numpy().tolist()
    ([b'a cat', b'a dog'], [0, 1])
    """
    image_shape = check_image_shape(image_shape)
    check_integer("batch_size", batch_size)
    check_integer("seed", seed, 0, LARGEST_SEED)
    check_bool("drop_remainder", drop_remainder)
    if shuffle is not None:
        check_bool("shuffle", shuffle)
    check_split(split)
    options = _pair_options(options, "load_pairs")
    share = options.share_of(batch_size)
    steps = build_steps(augment, image_shape, seed)
    if any(step.mixes_labels for step in steps):
        raise ValueError(
            "Expected augmentation of the images alone, which mixes no labels; "
            f"received: augment={augment!r}"
        )
    check_tensorflow()

    is_mixture = isinstance(source, Mapping)
    if is_mixture and not options.repeat:
        raise ValueError(
            "Expected repeat=True with a mixture, whose sources end at different "
            f"batches; received: repeat=False, source={dict(source)}"
        )
    if is_mixture:
        sizes = list(batch_sizes(source, batch_size, share.count).values())
    else:
        sizes = [batch_size]
    full = drop_remainder or options.repeat
    datasets = []
    opened = open_all(source, split, options.source_options(image_shape, data_dir))
    for number, (pairs, size) in enumerate(zip(opened, sizes)):
        excluded = pairs.left_out(split, *options.faults_of(pairs.name, source))
        examples = pairs.pairs(excluded, options.captions == "all")
        place = f"of {pairs.name!r}, split={split!r}"
        options.check_count(examples.count, size, full, place)
        settings = BatchSettings(
            image_shape=image_shape,
            steps=steps,
            labels=CaptionChoice(options.captions == "random"),
            share=options.share_of(size),
            shuffle=split.startswith("train") if shuffle is None else shuffle,
            # Sources have orders of their own, also where they have equal numbers.
            seed=int(seed) + number,
            drop_remainder=full,
            start_batch=options.first_batch,
        )
        datasets.append(batches(examples, settings))
    return _tokenized(mixed(datasets) if is_mixture else datasets[0], tokenizer)


def _tokenized(dataset, tokenizer):
    """The inputs and the ids of batches of images and texts."""
    import tensorflow as tf

    if tokenizer is not None and "captions" not in dataset.element_spec[1]:
        raise ValueError(
            "Expected tokenizer=None with stored tokens; received: "
            f"tokenizer={tokenizer!r:.100}"
        )

    def arranged(images, texts):
        texts = dict(texts)
        ids = {name: texts.pop(name) for name in ("image_ids", "text_ids")}
        if tokenizer is not None:
            texts = tokenizer(texts["captions"])
        return {"images": images, **texts}, ids

    dataset = dataset.map(arranged, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.prefetch(tf.data.AUTOTUNE)


def load_captions(
    source: Any, split: str, data_dir: str | None = None, **options: Any
) -> tuple[str, ...]:
    """All captions of a source, without its images, such as to train a tokenizer.

    Args:
        source: source of `load_pairs`.
        split: split of the source.
        data_dir: folder of TensorFlow Datasets.
        **options: fields of `PairOptions`. Images are not decoded: captions of images
            that cannot be read count.

    Returns:
        Captions in the order of the source, one after the other where an image has
        several. For a source of classes, those of each class once.

    Raises:
        ValueError: if an argument is not known or out of range.

    Example:

    >>> import numpy as np
    >>> from keras_moe.data import load_captions
    >>> images = np.zeros((2, 8, 8, 3), "uint8")
    >>> load_captions((images, ["a cat", ["a dog", "a puppy"]]), "test")
    ('a cat', 'a dog', 'a puppy')
    """
    options, opened = _open(source, split, data_dir, options, "load_captions")
    captions: list[tuple[str, ...]] = []
    for pairs in opened:
        exclude, unreadable = options.faults_of(pairs.name, source)
        excluded = pairs.without_text(split, exclude, unreadable)
        if pairs.captions is None:
            skip = unreadable == "exclude"
            captions += read_captions(pairs.images, excluded, skip)
        elif pairs.has_classes:
            captions += pairs.captions
        else:
            left_out = {*excluded.tolist()}
            captions += [x for i, x in enumerate(pairs.captions) if i not in left_out]
    return tuple(caption for several in captions for caption in several)


def num_pairs(
    source: Any, split: str, data_dir: str | None = None, **options: Any
) -> int:
    """The number of pairs in a pass of `load_pairs`.

    Args:
        source: source of `load_pairs`.
        split: split of the source.
        data_dir: folder of TensorFlow Datasets.
        **options: fields of `PairOptions`.

    Returns:
        The number of images, or with `captions="all"` of all captions.

    Raises:
        ValueError: if an argument is not known or out of range.

    Example:

    >>> import numpy as np
    >>> from keras_moe.data import num_pairs
    >>> pairs = np.zeros((2, 8, 8, 3), "uint8"), ["a cat", ["a dog", "a puppy"]]
    >>> num_pairs(pairs, "test"), num_pairs(pairs, "test", captions="all")
    (2, 3)
    """
    options, opened = _open(source, split, data_dir, options, "num_pairs")
    number = 0
    for pairs in opened:
        excluded = pairs.left_out(split, *options.faults_of(pairs.name, source))
        number += pairs.pairs(excluded, options.captions == "all").count
    return number


def _open(source, split, data_dir, options, owner):
    """The options, and the sources at a size that matters to no number or caption."""
    check_split(split)
    options = _pair_options(options, owner)
    check_tensorflow()
    shape = SourceOptions().image_shape
    return options, open_all(source, split, options.source_options(shape, data_dir))


def _pair_options(options: dict[str, Any], owner: str) -> PairOptions:
    known = [field.name for field in dataclasses.fields(PairOptions)]
    check_argument_names(options, known, owner)
    return PairOptions(**options)
