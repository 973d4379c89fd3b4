"""Evaluation of image-text models.

A model is anything with `encode_images` and `encode_text`, such as a
`ContrastiveModel`. Every image and text is embedded once, and only embeddings stay in
memory. All processes evaluate together, on the same data.

Axes: N images, M texts, P embedding, B batch.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_moe._batches import read_iterable
from keras_moe._checks import check_integer, unfit
from keras_moe._templates import Template
from keras_moe.evaluation._features import to_numpy
from keras_moe.evaluation.few_shot import extract_features
from keras_moe.evaluation.retrieval import (
    BATCH_SIZE,
    CHUNK_SIZE,
    ContrastiveAccuracyResult,
    RetrievalResult,
    contrastive_accuracy,
    retrieval,
)
from keras_moe.evaluation.zero_shot import (
    ClassNames,
    ClassSubset,
    ZeroShotResult,
    class_embeddings,
    prompts,
    read_class_names,
    read_class_subset,
    read_templates,
    zero_shot,
)


class PairEmbeddings(NamedTuple):
    """Embeddings of image-text pairs, with each image once.

    Attributes:
        images: (N, P).
        texts: (M, P), one per pair.
        image_of_text: int (M,), index of each text's image.
        text_ids: int (M,), equal for equal texts; or None.
    """

    images: np.ndarray
    texts: np.ndarray
    image_of_text: np.ndarray
    text_ids: np.ndarray | None

    def retrieval(
        self, ks: Sequence[int] | None = None, chunk_size: int = CHUNK_SIZE
    ) -> RetrievalResult:
        """Recalls; for COCO's protocol, `_replace(text_ids=None)` first."""
        own = (self.images, self.texts, self.image_of_text)
        return retrieval(*own, ks, chunk_size=chunk_size, text_ids=self.text_ids)

    def contrastive_accuracy(
        self, contrastive_batch_size: int = BATCH_SIZE
    ) -> ContrastiveAccuracyResult:
        """`contrastive_accuracy` of each image with its first text."""
        _, first = np.unique(self.image_of_text, return_index=True)
        text_ids = None if self.text_ids is None else self.text_ids[first]
        return contrastive_accuracy(
            self.images, self.texts[first], contrastive_batch_size, text_ids=text_ids
        )


def encode_pairs(model: Any, pairs: Any, batch_size: int = 32) -> PairEmbeddings:
    """Embeds the images and texts of pairs, batch by batch.

    Args:
        model: image-text model.
        pairs: iterable of batches `(inputs, ids)`, such as
            `keras_moe.data.load_pairs(..., captions="all", shuffle=False)`, or one
            tuple of arrays. `inputs` has `"images"` (or `"patches"` and `"grids"`),
            and either `"token_ids"` and `"padding_mask"` or `"captions"`; `ids` has
            integers `"image_ids"` and `"text_ids"`, equal for equal images and texts,
            or is None.
        batch_size: number of images and texts embedded at a time.

    Example:

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
    indices, owner, text_ids, count = {}, [], [], 0
    if isinstance(pairs, tuple) and len(pairs) == 2 and isinstance(pairs[0], dict):
        pairs = [pairs]
    for batch in read_iterable(pairs, "pairs")[0]:
        inputs, ids = _to_arrays(batch)
        own = [name for name in inputs if name in ("images", "patches", "grids")]
        pictures = {name: inputs.pop(name) for name in own}
        rows = len(next(iter(pictures.values())))
        own_ids = ids.get("image_ids", np.arange(count, count + rows))
        new = []
        for row, image_id in enumerate(own_ids.tolist()):
            if image_id not in indices:
                indices[image_id] = len(indices)
                new.append(row)
            owner.append(indices[image_id])
        pictures = {name: x[new] for name, x in pictures.items()}
        images.add(pictures.get("images", pictures))
        texts.add(inputs)
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
    images: object,
    labels: ArrayLike | None,
    class_names: ClassNames,
    templates: str | os.PathLike[str] | Sequence[Template] = "ours",
    *,
    ks: Sequence[int] | None = None,
    batch_size: int = 32,
    verbose: str | int = "auto",
    class_subset: str | None = None,
) -> ZeroShotResult:
    """Zero-shot accuracy of an image-text model; see `keras_moe.evaluation.zero_shot`.

    Args:
        model: image-text model whose `encode_text` accepts captions.
        images: (N, height, width, channels); or batches `(images, labels)`, such as
            `keras_moe.data.load`.
        labels: (N,) integers; None if `images` includes them.
        class_names: see `keras_moe.evaluation.read_class_names`.
        templates: see `keras_moe.evaluation.read_templates`.
        ks: values of k; None for 1, and 5 if there are that many classes.
        batch_size: number of images and texts embedded at a time.
        verbose: see `extract_features`.
        class_subset: `"imagenet_a"` or `"imagenet_r"` to choose only among its classes;
            None for all.

    Example:

    ```python
    digits = keras_moe.data.load("digits", "test", model.backbone.image_shape)
    zero_shot_from_model(model, digits, None, list("0123456789"), "the digit {}")
    ```
    """
    if class_subset is not None:
        subset = read_class_subset(class_subset)
        class_names = names_in_subset(read_class_names(class_names), subset)
    classes = encode_classes(model, class_names, templates, batch_size)
    size = 0

    def encode(batch):
        # The last batch is padded, so that nothing is compiled for it.
        nonlocal size
        count = len(keras.tree.flatten(batch)[0])
        size = max(size, count)
        batch = keras.tree.map_structure(
            lambda x: np.concatenate([x, np.repeat(x[-1:], size - count, axis=0)]),
            batch,
        )
        return model.encode_images(batch, batch_size=size)[:count]

    data = images if labels is None else (images, labels)
    embeddings, labels = extract_features(encode, data, batch_size, verbose)
    if class_subset is not None:
        labels = subset.labels(labels)
    return zero_shot(embeddings, labels, classes, ks)


def names_in_subset(class_names: Sequence[str], subset: ClassSubset) -> tuple[str, ...]:
    """The names of a subset's classes."""
    if len(class_names) != 1000:
        expected = f"names of ImageNet's 1,000 classes for those of {subset.name}"
        raise unfit(expected, f"{len(class_names)} names")
    return tuple(class_names[int(number)] for number in subset.numbers)


def encode_classes(
    model: Any,
    class_names: ClassNames,
    templates: str | os.PathLike[str] | Sequence[Template] = "ours",
    batch_size: int = 32,
) -> np.ndarray:
    """Embeds classes for zero-shot classification, as unit vectors (C, P).

    Args:
        model: image-text model whose `encode_text` accepts captions.
        class_names: see `keras_moe.evaluation.read_class_names`.
        templates: see `keras_moe.evaluation.read_templates`.
        batch_size: number of texts embedded at a time.

    Example:

    >>> from keras_moe.evaluation import encode_classes
    >>> class Lengths:
    ...     def encode_text(self, texts, batch_size):
    ...         return np.array([[len(text), 0.0] for text in texts])
    >>> encode_classes(Lengths(), ["cat", "lion"], ["a {}", "two {}s"]).tolist()
    [[1.0, 0.0], [1.0, 0.0]]
    """
    names, templates = read_class_names(class_names), read_templates(templates)
    texts = model.encode_text(prompts(names, templates), batch_size=batch_size)
    return class_embeddings(np.reshape(texts, (len(names), len(templates), -1)))


class _Encoder:
    """Collects rows from batches of any size, and embeds them in full batches."""

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
        if isinstance(batch, dict) and "captions" in batch:
            batch = batch["captions"].tolist()
        output = self._encode(batch, batch_size=self._batch_size)
        self._parts.append(to_numpy(output))


def _joined(first, second):
    """Concatenates rows, padding shorter token ids or patches with zeros."""
    if first.ndim in (2, 3) and first.shape[1] != second.shape[1]:
        length, rest = max(first.shape[1], second.shape[1]), [(0, 0)] * (first.ndim - 2)
        first, second = (
            np.pad(x, ((0, 0), (0, length - x.shape[1]), *rest))
            for x in (first, second)
        )
    return np.concatenate([first, second])


def _to_arrays(batch):
    inputs, ids = batch
    texts = ("captions",) if "captions" in inputs else ("token_ids", "padding_mask")
    images = ("patches", "grids") if "grids" in inputs else ("images",)
    inputs = {name: to_numpy(inputs[name]) for name in (*images, *texts)}
    ids = {name: to_numpy(x) for name, x in (ids or {}).items()}
    shapes = {name: x.shape for name, x in {**inputs, **ids}.items()}
    if len({shape[:1] for shape in shapes.values()}) != 1:
        raise unfit("one image, text and id for each pair", shapes)
    if "captions" in inputs:
        # Those of tf.data are bytes.
        captions = [
            x.decode("utf-8") if isinstance(x, bytes) else str(x)
            for x in inputs["captions"]
        ]
        inputs["captions"] = np.array(captions, object)
    return inputs, ids
