"""Evaluation of image-text models, and simple baselines.

A model is anything with `encode_images` and `encode_text`, such as a
`ContrastiveModel`. Every image and text is embedded once, and only embeddings stay in
memory. All processes evaluate together, on the same data.

Axes: N images, M texts, P embedding, B batch, T training images, V words.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe._checks import check_integer, check_positive
from keras_moe._templates import Template
from keras_moe.evaluation._features import extract_features, iterate_batches, to_numpy
from keras_moe.evaluation.retrieval import (
    BATCH_SIZE,
    CHUNK_SIZE,
    KS,
    ContrastiveAccuracyResult,
    RetrievalResult,
    contrastive_accuracy,
    retrieval,
)
from keras_moe.evaluation.zero_shot import (
    ClassSubset,
    ZeroShotResult,
    class_embeddings,
    prompts,
    read_class_names,
    read_class_subset,
    read_templates,
    zero_shot,
)

# Number of images that a baseline compares at a time.
_CHUNK = 256
_WORD = re.compile(r"\w+")


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
        self, ks: Sequence[int] = KS, chunk_size: int = CHUNK_SIZE
    ) -> RetrievalResult:
        """Recalls; for COCO's protocol, `_replace(text_ids=None)` first."""
        return retrieval(
            self.images, self.texts, self.image_of_text, ks, chunk_size, self.text_ids
        )

    def contrastive_accuracy(
        self, batch_size: int = BATCH_SIZE
    ) -> ContrastiveAccuracyResult:
        """`contrastive_accuracy` of each image with its first text."""
        _, first = np.unique(self.image_of_text, return_index=True)
        text_ids = None if self.text_ids is None else self.text_ids[first]
        return contrastive_accuracy(
            self.images, self.texts[first], batch_size, text_ids=text_ids
        )


def encode_pairs(model: Any, pairs: Any, batch_size: int = 64) -> PairEmbeddings:
    """Embeds the images and texts of pairs, batch by batch.

    Args:
        model: image-text model.
        pairs: iterable of batches `(inputs, ids)`, such as
            `keras_moe.data.load_pairs(..., captions="all", shuffle=False)`, or one
            tuple of arrays. `inputs` has `"images"` and either `"token_ids"` and
            `"padding_mask"` or `"captions"`; `ids` has integers `"image_ids"` and
            `"text_ids"`, equal for equal images and texts, or is None.
        batch_size: number of images and texts embedded at a time.

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
    indices, owner, text_ids, count = {}, [], [], 0
    if isinstance(pairs, tuple) and len(pairs) == 2 and isinstance(pairs[0], dict):
        pairs = [pairs]
    for batch in iterate_batches("pairs", pairs)[0]:
        inputs, ids = _to_arrays(batch)
        rows = len(inputs["images"])
        own_ids = ids.get("image_ids", np.arange(count, count + rows))
        new = []
        for row, image_id in enumerate(own_ids.tolist()):
            if image_id not in indices:
                indices[image_id] = len(indices)
                new.append(row)
            owner.append(indices[image_id])
        images.add(inputs.pop("images")[new])
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
    images: Any,
    labels: Any,
    class_names: Any,
    templates: Any = "ours",
    ks: Sequence[int] | None = None,
    batch_size: int = 64,
    verbose: int = 0,
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
        verbose: 1 for a progress bar, 2 for one line at its end, 0 for nothing.
        class_subset: `"imagenet_a"` or `"imagenet_r"` to choose only among its classes;
            None for all.

    Example:

    ```python
    digits = keras_moe.data.load("digits", "test", model.backbone.image_shape)
    zero_shot_from_model(model, digits, None, list("0123456789"), "the digit {}")
    ```
    """
    batch_size = check_integer("batch_size", batch_size)
    if class_subset is not None:
        subset = read_class_subset(class_subset)
        class_names = names_in_subset(read_class_names(class_names), subset)
    classes = encode_classes(model, class_names, templates, batch_size)
    size = 0

    def encode(batch):
        # The last batch is padded, so that nothing is compiled for it.
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
    if class_subset is not None:
        labels = subset.labels(labels)
    return zero_shot(embeddings, labels, classes, ks)


def names_in_subset(class_names: Sequence[str], subset: ClassSubset) -> tuple[str, ...]:
    """The names of a subset's classes."""
    if len(class_names) != 1000:
        raise ValueError(
            "Expected names of ImageNet's 1,000 classes for those of "
            f"{subset.name}; received: {len(class_names)} names"
        )
    return tuple(class_names[number] for number in subset.numbers)


def encode_classes(
    model: Any,
    class_names: Any,
    templates: str | Sequence[Template] = "ours",
    batch_size: int = 64,
) -> np.ndarray:
    """Embeds classes for zero-shot classification, as unit vectors (C, P).

    Args:
        model: image-text model whose `encode_text` accepts captions.
        class_names: see `keras_moe.evaluation.read_class_names`.
        templates: see `keras_moe.evaluation.read_templates`.
        batch_size: number of texts embedded at a time.

    Example:

    >>> import numpy as np
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


def retrieval_from_model(
    model: Any,
    pairs: Any,
    ks: Sequence[int] = KS,
    batch_size: int = 64,
    chunk_size: int = CHUNK_SIZE,
) -> RetrievalResult:
    """Recalls of an image-text model; see `keras_moe.evaluation.retrieval`.

    Args:
        model: image-text model.
        pairs: pairs with all captions; see `encode_pairs`.
        ks: values of k.
        batch_size: number of images and texts embedded at a time.
        chunk_size: number of embeddings compared at a time.

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
        model: image-text model.
        pairs: see `encode_pairs`.
        contrastive_batch_size: number of images to compare with each other.
        batch_size: number of images and texts embedded at a time.

    Example:

    ```python
    contrastive_accuracy_from_model(model, pairs).accuracy
    ```
    """
    embeddings = encode_pairs(model, pairs, batch_size)
    return embeddings.contrastive_accuracy(contrastive_batch_size)


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
    """Concatenates rows, padding shorter token ids with zeros."""
    if first.ndim == 2 and first.shape[1] != second.shape[1]:
        length = max(first.shape[1], second.shape[1])
        first, second = (
            np.pad(x, ((0, 0), (0, length - x.shape[1]))) for x in (first, second)
        )
    return np.concatenate([first, second])


def _to_arrays(batch):
    """Images, texts and ids of a batch as NumPy arrays."""
    inputs, ids = batch
    texts = ("captions",) if "captions" in inputs else ("token_ids", "padding_mask")
    inputs = {name: to_numpy(inputs[name]) for name in ("images", *texts)}
    ids = {name: to_numpy(x) for name, x in (ids or {}).items()}
    shapes = {name: x.shape for name, x in {**inputs, **ids}.items()}
    if len({shape[:1] for shape in shapes.values()}) != 1:
        raise ValueError(
            f"Expected one image, text and id for each pair; received: {shapes}"
        )
    if "captions" in inputs:
        # Those of tf.data are bytes.
        captions = [
            x.decode("utf-8") if isinstance(x, bytes) else str(x)
            for x in inputs["captions"]
        ]
        inputs["captions"] = np.array(captions, object)
    return inputs, ids


# Baselines


def nearest_caption_embeddings(
    train_images: Any,
    train_captions: Sequence[str],
    images: Any,
    captions: Sequence[str],
) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of a nearest-neighbour baseline on pixels and words.

    An image is represented by the words of the nearest training image's caption, in
    pixel distance, and a caption by its words. Near duplicates of test images in the
    training set raise its recalls far above chance; compare models with it.

    Args:
        train_images: (T, height, width, channels), of any range.
        train_captions: T strings.
        images: (N, height, width, channels), of the same range.
        captions: M strings.

    Returns:
        Image embeddings (N, V) and text embeddings (M, V), float32 unit vectors.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import nearest_caption_embeddings, retrieval
    >>> train = np.array([0.0, 1.0]).reshape(2, 1, 1, 1)
    >>> test = np.array([0.1, 0.8]).reshape(2, 1, 1, 1)
    >>> embeddings = nearest_caption_embeddings(
    ...     train, ["black cat", "white dog"], test, ["a black cat", "a white dog"]
    ... )
    >>> retrieval(*embeddings, ks=(1,)).image_to_text.tolist()
    [1.0]
    """
    known, pixels = _pixels(train_images, train_captions, images, captions)
    words = [_words(caption) for caption in captions]
    known_words = [_words(caption) for caption in train_captions]
    vocabulary = sorted({word for row in (*known_words, *words) for word in row})
    index = {word: number for number, word in enumerate(vocabulary)}
    # The nearest of the known images, by squared distance.
    norms, nearest = np.sum(np.square(known), axis=1), []
    for first in range(0, len(pixels), _CHUNK):
        products = pixels[first : first + _CHUNK] @ known.T
        nearest.extend(np.argmin(norms - 2 * products, axis=1))
    predicted = [known_words[row] for row in nearest]
    return _vectors(predicted, index), _vectors(words, index)


def kernel_ridge_embeddings(
    train_images: Any,
    train_captions: Sequence[str],
    images: Any,
    captions: Sequence[str],
    width: float = 1.0,
    penalty: float = 0.01,
) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of a kernel ridge regression from pixels to character n-grams.

    A caption's embedding is the TF-IDF vector of its runs of two to four letters, and
    an image's is predicted by `K(X, T) (K(T, T) + penalty I)^-1 Y`, with the training
    captions' vectors `Y` and the kernel `K(a, b) = exp(-|a - b|_1 / (width m))`, m the
    median distance of training images. A strong baseline on small sets. Needs
    scikit-learn.

    Args:
        train_images: (T, height, width, channels), of any range; time grows with T^2.
        train_captions: T strings.
        images: (N, height, width, channels), of the same range.
        captions: M strings.
        width: width of the kernel, as a multiple of the median distance.
        penalty: penalty of the regression.

    Returns:
        Image embeddings (N, V) and text embeddings (M, V), float32.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import kernel_ridge_embeddings, retrieval
    >>> train = np.array([0.0, 1.0]).reshape(2, 1, 1, 1)
    >>> test = np.array([0.1, 0.8]).reshape(2, 1, 1, 1)
    >>> embeddings = kernel_ridge_embeddings(
    ...     train, ["black cat", "white dog"], test, ["a black cat", "a white dog"]
    ... )
    >>> retrieval(*embeddings, ks=(1,)).image_to_text.tolist()
    [1.0]
    """
    # In the extra `digits`.
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.metrics.pairwise import manhattan_distances

    check_positive("width", width)
    check_positive("penalty", penalty)
    known, pixels = _pixels(train_images, train_captions, images, captions)
    vectors = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4))
    # Fitted on all captions: a test caption may share no n-gram with the training
    # captions, and still needs a vector.
    vectors.fit([*train_captions, *captions])
    distances = manhattan_distances(known)
    scale = float(np.median(distances)) * width or 1.0
    kernel = np.exp(-distances / scale)
    kernel[np.diag_indices_from(kernel)] += penalty
    similar = np.exp(-manhattan_distances(pixels, known) / scale)
    weights = np.linalg.solve(kernel, similar.T).T
    predicted = weights @ vectors.transform(train_captions)
    texts = vectors.transform(captions).toarray()
    return predicted.astype("float32"), texts.astype("float32")


def _pixels(train_images, train_captions, images, captions):
    """Rows of pixels of training images and images, after checking them."""
    known, pixels = to_numpy(train_images), to_numpy(images)
    same_shape = known.shape[1:] == pixels.shape[1:]
    if not same_shape or len(known) != len(train_captions) or not len(captions):
        raise ValueError(
            "Expected images of one shape, a caption for each training image, and "
            f"captions; received: train_images.shape={known.shape}, images.shape="
            f"{pixels.shape}, {len(train_captions)} train_captions and {len(captions)} "
            "captions"
        )
    # Wide enough for sums of squares of bytes.
    return (x.reshape(len(x), -1).astype("float32") for x in (known, pixels))


def _words(caption):
    return sorted(set(_WORD.findall(caption.lower())) or {caption})


def _vectors(rows, index):
    vectors = np.zeros((len(rows), len(index)), "float32")
    for vector, words in zip(vectors, rows):
        vector[[index[word] for word in words]] = len(words) ** -0.5
    return vectors
