"""A batch of pairs of images and texts, as the contrastive losses read it.

Axes: B pairs, D embedding.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_moe.checks import check_integer, check_one_of

SIMILARITY_DTYPES = ("float32", "bfloat16", "float16")
# The smallest norm of an embedding: padding may be zeros.
SMALLEST_NORM = 1e-12


class Pairs(NamedTuple):
    """The part of a batch that the losses read."""

    images: Any
    texts: Any
    weights: Any
    counted: Any
    keys: tuple


def check_similarity(similarity_dtype: str, chunk_size: int | None) -> int | None:
    """Checks how the losses compute similarities."""
    check_one_of("similarity_dtype", similarity_dtype, SIMILARITY_DTYPES)
    return None if chunk_size is None else check_integer("chunk_size", chunk_size)


def pairs_of(
    image_embeddings: Any,
    text_embeddings: Any,
    image_ids: Any = None,
    text_ids: Any = None,
    sample_weight: Any = None,
    similarity_dtype: str = "float32",
) -> Pairs:
    """Checks the arguments that the losses share, and prepares them."""
    images = ops.convert_to_tensor(image_embeddings)
    texts = ops.convert_to_tensor(text_embeddings)
    if len(images.shape) != 2 or not _same_shape(images, texts):
        raise ValueError(
            "Expected image and text embeddings of one shape (batch, dim); received: "
            f"image_embeddings.shape={tuple(images.shape)}, "
            f"text_embeddings.shape={tuple(texts.shape)}"
        )
    numbers = ops.arange(ops.shape(images)[0], dtype="int32")
    keys = [numbers]
    for name, ids in (("image_ids", image_ids), ("text_ids", text_ids)):
        if ids is not None:
            keys.append(_checked_ids(name, ids, images))
    if sample_weight is None:
        weights = ops.ones_like(images[:, 0], dtype="float32")
    else:
        weights = ops.cast(ops.convert_to_tensor(sample_weight), "float32")
        _check_per_pair("sample_weight", weights, images)
    is_counted = weights > 0
    return Pairs(
        _rounded(_unit(images, is_counted), similarity_dtype),
        _rounded(_unit(texts, is_counted), similarity_dtype),
        weights,
        ops.cast(is_counted, "float32"),
        tuple(keys),
    )


def positives(keys: tuple, other_keys: tuple) -> Any:
    """Whether each of B images and each of C texts are positives, boolean (B, C)."""
    positive = False
    for key, other in zip(keys, other_keys):
        same = ops.equal(ops.expand_dims(key, 1), ops.expand_dims(other, 0))
        positive = same if positive is False else ops.logical_or(positive, same)
    return positive


def weighted_mean(losses: Any, weights: Any) -> Any:
    """The mean of losses (B,) over the pairs that count, 0 if none does."""
    total = ops.sum(weights)
    return ops.sum(weights * losses) / ops.where(total > 0, total, 1.0)


def is_empty(pairs: Pairs) -> bool:
    """Whether a batch is known to have no pairs."""
    return pairs.images.shape[0] == 0


def loss_of_nothing(pairs: Pairs, logit_scale: Any) -> Any:
    """The loss of a batch without pairs: 0, which has a gradient of 0."""
    return logit_scale * (ops.sum(pairs.images) + ops.sum(pairs.texts))


def _unit(embeddings, is_counted):
    # Padding may hold anything, and 0 times NaN is NaN.
    is_counted = ops.expand_dims(is_counted, 1)
    return unit_vectors(ops.where(is_counted, ops.cast(embeddings, "float32"), 0.0))


def unit_vectors(embeddings: Any) -> Any:
    """Embeddings (B, D) scaled to unit length, float32; zeros stay zeros."""
    embeddings = ops.cast(embeddings, "float32")
    squared = ops.sum(ops.square(embeddings), axis=-1, keepdims=True)
    return embeddings / ops.sqrt(ops.maximum(squared, SMALLEST_NORM**2))


def _rounded(x, dtype):
    """`x` rounded to the dtype, as float32, with the gradient of `x`."""
    if dtype == "float32":
        return x
    rounded = ops.cast(ops.cast(x, dtype), "float32")
    # Exact: the difference of a number and its rounding is a float32.
    return x + ops.stop_gradient(rounded - x)


def _checked_ids(name, ids, images):
    ids = ops.convert_to_tensor(ids)
    if "int" not in str(ids.dtype):
        raise ValueError(f"Expected {name} of integers; received: dtype={ids.dtype}")
    _check_per_pair(name, ids, images)
    return ids


def _check_per_pair(name, x, images):
    if len(x.shape) != 1 or not _same_shape(x, images[:, 0]):
        raise ValueError(
            f"Expected {name} with one number per pair; received: "
            f"{name}.shape={tuple(x.shape)}, "
            f"image_embeddings.shape={tuple(images.shape)}"
        )


def _same_shape(x, y):
    """Whether shapes are equal as far as they are known."""
    return len(x.shape) == len(y.shape) and all(
        a is None or b is None or a == b for a, b in zip(x.shape, y.shape)
    )
