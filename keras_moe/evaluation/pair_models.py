"""Evaluation of models of pairs, whose towers embed images and texts one by one.

Each image and each text is embedded once; nothing but embeddings stays in memory.
A model is anything with `encode_images` and `encode_text`, as
`keras_moe.models.ContrastiveModel`. In several processes all of them evaluate together,
with the same data.

Axes: N images, M texts, P embedding, B batch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe.checks import check_integer
from keras_moe.evaluation.class_subsets import (
    NUM_CLASSES,
    ClassSubset,
    read_class_subset,
)
from keras_moe.evaluation.feature_checks import to_numpy
from keras_moe.evaluation.feature_extraction import extract_features
from keras_moe.evaluation.prompts import prompts, read_class_names, read_templates
from keras_moe.evaluation.retrieval import (
    BATCH_SIZE,
    KS,
    ContrastiveAccuracyResult,
    RetrievalResult,
    contrastive_accuracy,
    retrieval,
)
from keras_moe.evaluation.similarities import CHUNK_SIZE
from keras_moe.evaluation.zero_shot import ZeroShotResult, class_embeddings, zero_shot
from keras_moe.templates import Template

TEXTS = ("token_ids", "padding_mask")


class PairEmbeddings(NamedTuple):
    """Embeddings of pairs, in which each image is there once.

    Fields:
        images: (N, P).
        texts: (M, P), those of all pairs.
        image_of_text: int (M,), index of each text's image.
        text_ids: int (M,), equal for equal texts; or None.
    """

    images: np.ndarray
    texts: np.ndarray
    image_of_text: np.ndarray
    text_ids: np.ndarray | None

    def retrieval(
        self, ks: Sequence[int] = KS, chunk_size: int = CHUNK_SIZE
    ) -> RetrievalResult:
        """Recalls; see `keras_moe.evaluation.retrieval`.

        Equal captions of several images belong to all of these, by `text_ids`. The
        protocol of COCO, where only a caption's own image is a hit, is that of
        `self._replace(text_ids=None)`.
        """
        return retrieval(
            self.images, self.texts, self.image_of_text, ks, chunk_size, self.text_ids
        )

    def contrastive_accuracy(
        self, batch_size: int = BATCH_SIZE
    ) -> ContrastiveAccuracyResult:
        """Accuracies by batch; see `keras_moe.evaluation.contrastive_accuracy`.

        Each image is there once, with the first of its texts: with all of them a batch
        would have fewer images, and be easier.
        """
        _, first = np.unique(self.image_of_text, return_index=True)
        text_ids = None if self.text_ids is None else self.text_ids[first]
        return contrastive_accuracy(
            self.images, self.texts[first], batch_size, text_ids=text_ids
        )


def encode_pairs(model: Any, pairs: Any, batch_size: int = 64) -> PairEmbeddings:
    """Embeds the images and the texts of pairs, batch by batch.

    Args:
        model: model of pairs.
        pairs: an iterable of batches `(inputs, ids)`, such as one pass of
            `keras_moe.data.load_pairs` with `captions="all"` and `shuffle=False`, which
            is read once; or one tuple of arrays. `inputs` is a dict of `"images"` and
            of `"token_ids"` and `"padding_mask"`, or of `"captions"`; `ids` is a dict
            with integers `"image_ids"`, equal for pairs of one image, and `"text_ids"`,
            or None.
        batch_size: number of images and of texts that are embedded at a time.

    Raises:
        ValueError: if there are no pairs, or batches of another kind.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import encode_pairs
    >>> class Colours:
    ...     def encode_images(self, images, batch_size):
    ...         return images.mean(axis=(1, 2))
    ...     def encode_text(self, texts, batch_size):
    ...         return np.array([[x == "red", x != "red"] for x in texts], float)
    >>> images = np.eye(2)[[0, 0, 1], None, None]
    >>> captions = np.array(["red", "rouge", "green"])
    >>> pairs = {"images": images, "captions": captions}, {"image_ids": [5, 5, 9]}
    >>> encode_pairs(Colours(), pairs).image_of_text.tolist()
    [0, 0, 1]
    """
    batch_size = check_integer("batch_size", batch_size)
    images = _Encoder(model.encode_images, batch_size)
    texts = _Encoder(model.encode_text, batch_size)
    places, owner, text_ids, count = {}, [], [], 0
    for batch in _batches(pairs):
        inputs, ids = _check_batch(batch)
        rows = len(inputs["images"])
        own_ids = ids.get("image_ids", np.arange(count, count + rows))
        new = []
        for row, image_id in enumerate(own_ids.tolist()):
            if image_id not in places:
                places[image_id] = len(places)
                new.append(row)
            owner.append(places[image_id])
        images.add(inputs["images"][new])
        texts.add(
            _as_strings(inputs["captions"])
            if "captions" in inputs
            else {name: inputs[name] for name in TEXTS}
        )
        if "text_ids" in ids:
            text_ids.append(ids["text_ids"])
        count += rows
    if not count:
        raise ValueError("Expected at least one pair; received: none")
    text_ids = np.concatenate(text_ids) if text_ids else None
    return PairEmbeddings(
        images.embeddings(), texts.embeddings(), np.array(owner), text_ids
    )


def zero_shot_from_model(
    model: Any,
    images: Any,
    labels: Any,
    class_names: Any,
    templates: Any = "ours",
    ks: Sequence[int] | None = None,
    batch_size: int = 64,
    verbose: int = 0,
    class_subset: str | None = None,
) -> ZeroShotResult:
    """Zero-shot accuracies of a model of pairs; see `keras_moe.evaluation.zero_shot`.

    Args:
        model: model of pairs, whose `encode_text` takes captions.
        images: images (N, height, width, channels); or an iterable of batches
            `(images, labels)`, such as `keras_moe.data.load`, which is read once.
        labels: (N,) integers; None if `images` has them.
        class_names: names, file or set of `keras_moe.evaluation.read_class_names`, in
            the order of the labels.
        templates: templates, file or set of `keras_moe.evaluation.read_templates`.
        ks: values of k; None takes 1, and 5 where there are as many classes.
        batch_size: number of images and of texts that are embedded at a time.
        verbose: 1 for a progress bar, 2 for one line at its end, 0 for nothing.
        class_subset: `"imagenet_a"` or `"imagenet_r"`, the classes of the 1,000 named
            among which the model chooses; see
            `keras_moe.evaluation.read_class_subset`. None takes all classes.

    Raises:
        ValueError: if names, templates, images or labels are of the wrong kind.

    Example:

    ```python
    digits = keras_moe.data.load("digits", "test", model.backbone.image_shape)
    zero_shot_from_model(model, digits, None, list("0123456789"), "the digit {}")
    ```
    """
    batch_size = check_integer("batch_size", batch_size)
    subset = None if class_subset is None else read_class_subset(class_subset)
    if subset is not None:
        class_names = names_in_subset(read_class_names(class_names), subset)
    classes = encode_classes(model, class_names, templates, batch_size)
    size = 0

    def encode(batch):
        # A last batch is filled, so that nothing is compiled for it.
        nonlocal size
        size, count = max(size, len(batch)), len(batch)
        batch = np.concatenate([batch, np.repeat(batch[-1:], size - count, axis=0)])
        return model.encode_images(batch, batch_size=size)[:count]

    embeddings, labels = extract_features(
        "images",
        encode,
        images if labels is None else (images, labels),
        batch_size,
        verbose,
    )
    labels = labels if subset is None else subset.labels(labels)
    return zero_shot(embeddings, labels, classes, ks)


def names_in_subset(class_names: Sequence[str], subset: ClassSubset) -> tuple[str, ...]:
    """The names of a subset's classes."""
    if len(class_names) != NUM_CLASSES:
        raise ValueError(
            f"Expected names of ImageNet's {NUM_CLASSES:,} classes for those of "
            f"{subset.name}; received: {len(class_names)} names"
        )
    return tuple(class_names[number] for number in subset.numbers)


def encode_classes(
    model: Any,
    class_names: Any,
    templates: str | Sequence[Template] = "ours",
    batch_size: int = 64,
) -> np.ndarray:
    """The embeddings of classes by which a model of pairs classifies images.

    Args:
        model: model of pairs, whose `encode_text` takes captions.
        class_names: names of C classes; see `keras_moe.evaluation.read_class_names`.
        templates: templates; see `keras_moe.evaluation.read_templates`.
        batch_size: number of texts that are embedded at a time.

    Returns:
        Unit vectors (C, P); see `keras_moe.evaluation.class_embeddings`.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation.pair_models import encode_classes
    >>> class Lengths:
    ...     def encode_text(self, texts, batch_size):
    ...         return np.array([[len(text), 0.0] for text in texts])
    >>> encode_classes(Lengths(), ["cat", "lion"], ["a {}", "two {}s"]).tolist()
    [[1.0, 0.0], [1.0, 0.0]]
    """
    names, templates = read_class_names(class_names), read_templates(templates)
    texts = model.encode_text(prompts(names, templates), batch_size=batch_size)
    return class_embeddings(np.reshape(texts, (len(names), len(templates), -1)))


def retrieval_from_model(
    model: Any,
    pairs: Any,
    ks: Sequence[int] = KS,
    batch_size: int = 64,
    chunk_size: int = CHUNK_SIZE,
) -> RetrievalResult:
    """Recalls of a model of pairs; see `keras_moe.evaluation.retrieval`.

    Args:
        model: model of pairs.
        pairs: all pairs of all captions; see `encode_pairs`.
        ks: values of k.
        batch_size: number of images and of texts that are embedded at a time.
        chunk_size: number of embeddings that are compared at a time.

    Example:

    ```python
    pairs = keras_moe.data.load_pairs(
        "tfds:coco_captions", "val", model.backbone.image_shape, captions="all",
        shuffle=False, tokenizer=model.preprocessor,
    )
    retrieval_from_model(model, pairs).figures()
    ```
    """
    return encode_pairs(model, pairs, batch_size).retrieval(ks, chunk_size)


def contrastive_accuracy_from_model(
    model: Any,
    pairs: Any,
    contrastive_batch_size: int = BATCH_SIZE,
    batch_size: int = 64,
) -> ContrastiveAccuracyResult:
    """Accuracies by batch; see `keras_moe.evaluation.contrastive_accuracy`.

    Args:
        model: model of pairs.
        pairs: pairs; see `encode_pairs`.
        contrastive_batch_size: number of images that are compared with each other, each
            with its first text.
        batch_size: number of images and of texts that are embedded at a time.

    Example:

    ```python
    contrastive_accuracy_from_model(model, pairs).accuracy
    ```
    """
    embeddings = encode_pairs(model, pairs, batch_size)
    return embeddings.contrastive_accuracy(contrastive_batch_size)


class _Encoder:
    """Collects rows of batches of any sizes, and embeds them in full batches."""

    def __init__(self, encode: Callable, batch_size: int):
        self._encode, self._batch_size = encode, batch_size
        self._waiting, self._parts = None, []

    def add(self, rows: Any) -> None:
        if self._waiting is not None:
            rows = keras.tree.map_structure(_joined, self._waiting, rows)
        number = len(keras.tree.flatten(rows)[0])
        whole = number - number % self._batch_size
        for start in range(0, whole, self._batch_size):
            self._run(rows, slice(start, start + self._batch_size))
        self._waiting = keras.tree.map_structure(lambda x: x[whole:], rows)

    def embeddings(self) -> np.ndarray:
        if len(keras.tree.flatten(self._waiting)[0]):
            self._run(self._waiting, slice(None))
        return np.concatenate(self._parts)

    def _run(self, rows, part):
        batch = keras.tree.map_structure(lambda x: x[part], rows)
        if not isinstance(batch, dict) and batch.dtype == object:
            batch = batch.tolist()
        output = self._encode(batch, batch_size=self._batch_size)
        self._parts.append(to_numpy(output))


def _joined(first, second):
    """Rows of two arrays; token ids of two lengths are padded with zeros."""
    if first.ndim == 2 and first.shape[1] != second.shape[1]:
        length = max(first.shape[1], second.shape[1])
        first, second = (
            np.pad(x, ((0, 0), (0, length - x.shape[1]))) for x in (first, second)
        )
    return np.concatenate([first, second])


def _batches(pairs):
    if isinstance(pairs, tuple) and len(pairs) == 2 and isinstance(pairs[0], dict):
        return iter([pairs])
    if isinstance(pairs, keras.utils.PyDataset):
        return (pairs[i] for i in range(pairs.num_batches))
    if not isinstance(pairs, Iterable):
        raise ValueError(
            "Expected pairs: an iterable of batches (inputs, ids), or a tuple of "
            f"arrays; received: {type(pairs).__name__}"
        )
    if hasattr(pairs, "cardinality") and int(pairs.cardinality()) == -1:
        raise ValueError(
            "Expected pairs with an end; received: a data set that repeats for ever"
        )
    return iter(pairs)


def _check_batch(batch):
    """Inputs and ids of a batch as NumPy arrays."""
    inputs, ids = batch if isinstance(batch, (tuple, list)) else (None, None)
    if not isinstance(inputs, dict) or not (
        "images" in inputs and ("captions" in inputs or set(TEXTS) <= set(inputs))
    ):
        received = sorted(inputs) if isinstance(inputs, dict) else type(batch).__name__
        raise ValueError(
            "Expected batches (inputs, ids), where inputs is a dict of images, and of "
            f"token_ids and padding_mask or captions; received: {received}"
        )
    inputs = {name: to_numpy(x) for name, x in inputs.items()}
    ids = {name: to_numpy(x) for name, x in (ids or {}).items()}
    shapes = {name: x.shape for name, x in {**inputs, **ids}.items()}
    if len({shape[:1] for shape in shapes.values()}) != 1:
        raise ValueError(
            f"Expected one image, text and id for each pair; received: {shapes}"
        )
    return inputs, ids


def _as_strings(captions):
    texts = [x.decode("utf-8") if isinstance(x, bytes) else str(x) for x in captions]
    return np.array(texts, object)
