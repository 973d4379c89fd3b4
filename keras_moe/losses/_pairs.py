"""A batch of image-text pairs as the contrastive losses read it, whole or in chunks.

In chunks only B x C of the B x B logits exist at a time, and the gradient recomputes
them. The loop is over texts, so that each of several devices keeps its own images.

Axes: B pairs, C texts of a chunk, D embedding, P texts with padding to full chunks.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from keras import ops

from keras_moe._checks import check_ids, check_integer, check_one_of, fits_shape, unfit
from keras_moe._types import Size, Tensor
from keras_moe.ops._primitives import custom_gradient

SIMILARITY_DTYPES = ("float32", "bfloat16", "float16")
# The smallest norm of an embedding: padding may be zeros.
SMALLEST_NORM = 1e-12
# The logit of a pair that does not count. It is finite: infinities less infinities
# would be NaN.
NEVER = -1e30


class Pairs(NamedTuple):
    """Unit vectors, float32 (B, D), and weights of pairs, float32 (B,)."""

    images: Tensor
    texts: Tensor
    weights: Tensor
    counted: Tensor  # float32 (B,), 0 for pairs of weight 0
    keys: tuple[Tensor, ...]  # int (B,); positives have one that is equal


def check_similarity(similarity_dtype: str, chunk_size: int | None) -> int | None:
    check_one_of("similarity_dtype", similarity_dtype, SIMILARITY_DTYPES)
    return check_integer("chunk_size", chunk_size, optional=True)


def pairs_of(
    image_embeddings: Tensor,
    text_embeddings: Tensor,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    sample_weight: Tensor | None = None,
    similarity_dtype: str = "float32",
) -> Pairs:
    """Checks the arguments that the losses share, and prepares them."""
    images = ops.convert_to_tensor(image_embeddings)
    texts = ops.convert_to_tensor(text_embeddings)
    if len(images.shape) != 2 or not fits_shape(texts.shape, images.shape):
        shapes = f"shapes {tuple(images.shape)} and {tuple(texts.shape)}"
        raise unfit("image and text embeddings of one shape (batch, dim)", shapes)
    keys = [ops.arange(ops.shape(images)[0], dtype="int32")]
    for name, ids in (("image_ids", image_ids), ("text_ids", text_ids)):
        if ids is not None:
            check_ids(name, ids, images.shape[:1])
            keys.append(ops.convert_to_tensor(ids))
    weights = ops.ones_like(images[:, 0], dtype="float32")
    if sample_weight is not None:
        weights = ops.cast(ops.convert_to_tensor(sample_weight), "float32")
    if not fits_shape(weights.shape, images.shape[:1]):
        expected = f"sample_weight of shape {tuple(images.shape[:1])}"
        raise unfit(expected, f"sample_weight.shape={tuple(weights.shape)}")
    is_counted = weights > 0
    return Pairs(
        _rounded(_unit(images, is_counted), similarity_dtype),
        _rounded(_unit(texts, is_counted), similarity_dtype),
        weights,
        ops.cast(is_counted, "float32"),
        tuple(keys),
    )


def positives(keys: Sequence[Tensor], other_keys: Sequence[Tensor]) -> Tensor:
    """Whether each of B images and each of C texts are positives, boolean (B, C)."""
    same = [
        ops.equal(ops.expand_dims(key, 1), ops.expand_dims(other, 0))
        for key, other in zip(keys, other_keys)
    ]
    return functools.reduce(ops.logical_or, same)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """The mean of losses (B,) over the pairs that count, 0 if none does."""
    total = ops.sum(weights)
    return ops.sum(weights * losses) / ops.where(total > 0, total, 1.0)


def _unit(embeddings, is_counted):
    # Padding may hold anything, and 0 times NaN is NaN.
    is_counted = ops.expand_dims(is_counted, 1)
    return unit_vectors(ops.where(is_counted, ops.cast(embeddings, "float32"), 0.0))


def unit_vectors(embeddings: Tensor) -> Tensor:
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


class Chunks:
    """The chunks of a batch, whose last one is padded."""

    def __init__(self, batch: Size, size: int):
        # A batch that is smaller than a chunk needs no padding.
        self.size = max(1, min(size, batch)) if isinstance(batch, int) else size
        self.count = (batch + self.size - 1) // self.size
        self.padding = self.count * self.size - batch
        self.batch = batch

    def pad(self, x: Tensor) -> Tensor:
        """(B, ...) padded with zeros: (P, ...)."""
        if isinstance(self.padding, int) and self.padding == 0:
            return x
        zeros = ops.zeros((self.padding, *x.shape[1:]), x.dtype)
        return ops.concatenate([x, zeros], axis=0)

    def zeros(self, *shape: int) -> Tensor:
        """float32 zeros (P, *shape)."""
        return ops.zeros((self.count * self.size, *shape), "float32")

    def part(self, x: Tensor, number: Size) -> Tensor:
        """The rows of a chunk of (P, ...): (C, ...)."""
        shape = tuple(x.shape[1:])
        return ops.slice(x, self._start(number, shape), (self.size, *shape))

    def put(self, x: Tensor, number: Size, rows: Tensor) -> Tensor:
        """(P, ...) with the rows of a chunk replaced."""
        return ops.slice_update(x, self._start(number, tuple(x.shape[1:])), rows)

    def unpad(self, x: Tensor) -> Tensor:
        """(P, ...) without its padding: (B, ...)."""
        return x[: self.batch]

    def _start(self, number, shape):
        return (number * self.size, *(0 for _ in shape))


def sigmoid_losses(
    pairs: Pairs,
    logit_scale: Tensor,
    logit_bias: Tensor,
    chunk_size: int,
) -> Tensor:
    """The sigmoid losses of images in chunks, float32 (B,)."""

    def forward(images, texts, logit_scale, logit_bias, counted, *keys):
        chunks = Chunks(ops.shape(images)[0], chunk_size)
        by_text = [chunks.pad(x) for x in (texts, counted, *keys)]

        def step(number, losses):
            part, part_counted, *part_keys = (chunks.part(x, number) for x in by_text)
            similarity = ops.matmul(images, ops.transpose(part))
            logits = logit_scale * similarity + logit_bias
            signed = ops.where(positives(keys, part_keys), -logits, logits)
            return losses + ops.sum(part_counted * ops.softplus(signed), axis=1)

        losses = ops.fori_loop(0, chunks.count, step, ops.zeros_like(counted))
        return losses, (images, texts, logit_scale, logit_bias, counted, *keys)

    def backward(residuals, upstream):
        images, texts, logit_scale, logit_bias, counted, *keys = residuals
        chunks = Chunks(ops.shape(images)[0], chunk_size)

        def gradient_of_logits(similarity, part_counted, *part_keys):
            # d softplus(-z L) / dL = -z sigmoid(-z L)
            logits = logit_scale * similarity + logit_bias
            sign = ops.where(positives(keys, part_keys), -1.0, 1.0)
            gradient = sign * ops.sigmoid(sign * logits)
            return gradient * part_counted * ops.expand_dims(upstream, 1)

        gradients = _gradients(
            chunks, images, texts, logit_scale, gradient_of_logits, counted, *keys
        )
        return *gradients, *(None,) * (1 + len(keys))

    return custom_gradient(
        forward,
        backward,
        *(pairs.images, pairs.texts, logit_scale, logit_bias, pairs.counted),
        *pairs.keys,
    )


def softmax_losses(
    pairs: Pairs, logit_scale: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """The softmax losses of images and of texts in chunks, float32 (B,) each."""
    of_images, of_texts, *_ = custom_gradient(
        lambda *inputs: _softmax_forward(chunk_size, *inputs),
        lambda residuals, *upstream: _softmax_backward(
            chunk_size, residuals, *upstream
        ),
        *(pairs.images, pairs.texts, logit_scale, pairs.counted),
        *pairs.keys,
    )
    return of_images, of_texts


def _softmax_forward(chunk_size, images, texts, logit_scale, counted, *keys):
    chunks = Chunks(ops.shape(images)[0], chunk_size)
    texts_counted_keys = [chunks.pad(x) for x in (texts, counted, *keys)]

    def step(number, carry):
        top, total, target, num_positives, lse_of_texts, of_texts = carry
        part, part_counted, *part_keys = (
            chunks.part(x, number) for x in texts_counted_keys
        )
        logits = logit_scale * ops.matmul(images, ops.transpose(part))
        positive = _counted_positives(keys, part_keys, counted, part_counted)
        positive_logits = ops.where(positive > 0, logits, 0.0)
        # An image's softmax goes on over all chunks.
        masked = ops.where(part_counted > 0, logits, NEVER)
        new_top = ops.maximum(top, ops.max(masked, axis=1))
        exponentials = ops.exp(masked - ops.expand_dims(new_top, 1))
        total = total * ops.exp(top - new_top) + ops.sum(exponentials, axis=1)
        target = target + ops.sum(positive_logits, axis=1)
        num_positives = num_positives + ops.sum(positive, axis=1)
        # A text's softmax is over the images, which are all here.
        masked = ops.where(ops.expand_dims(counted, 1) > 0, logits, NEVER)
        part_top = ops.max(masked, axis=0)
        part_total = ops.log(ops.sum(ops.exp(masked - part_top), axis=0))
        part_target = ops.sum(positive_logits, axis=0)
        part_positives = ops.sum(positive, axis=0)
        lse_of_texts = chunks.put(lse_of_texts, number, part_top + part_total)
        of_texts = chunks.put(
            of_texts,
            number,
            _cross_entropy(part_top, part_total, part_target, part_positives),
        )
        return new_top, total, target, num_positives, lse_of_texts, of_texts

    zeros = ops.zeros_like(counted)
    top, total, target, num_positives, lse_of_texts, of_texts = ops.fori_loop(
        0,
        chunks.count,
        step,
        (zeros + NEVER, zeros, zeros, zeros, chunks.zeros(), chunks.zeros()),
    )
    log_total = ops.log(total)
    outputs = (
        _cross_entropy(top, log_total, target, num_positives),
        chunks.unpad(of_texts),
        top + log_total,
        chunks.unpad(lse_of_texts),
        num_positives,
    )
    return outputs, (images, texts, logit_scale, counted, *keys, *outputs[2:])


def _softmax_backward(chunk_size, residuals, of_images, of_texts, *_):
    images, texts, logit_scale, counted, *keys, lse, lse_of_texts, num_positives = (
        residuals
    )
    chunks = Chunks(ops.shape(images)[0], chunk_size)
    # A positive's share of its row, in which there are as many as in its column.
    share = 1.0 / ops.maximum(num_positives, 1.0)

    def gradient_of_logits(
        similarity, part_of_texts, part_lse, part_share, part_counted, *part_keys
    ):
        # g_i (p_ij - t_ij), with p the softmax, t the shares of the positives and g the
        # gradient in the loss, for the images' softmax and for the texts'.
        logits = logit_scale * similarity
        positive = _counted_positives(keys, part_keys, counted, part_counted)
        masked = ops.where(part_counted > 0, logits, NEVER)
        p = ops.exp(masked - ops.expand_dims(lse, 1))
        gradient = ops.expand_dims(of_images, 1) * (
            p - positive * ops.expand_dims(share, 1)
        )
        masked = ops.where(ops.expand_dims(counted, 1) > 0, logits, NEVER)
        p = ops.exp(masked - part_lse)
        return gradient + part_of_texts * (p - positive * part_share)

    *gradients, _ = _gradients(
        chunks,
        *(images, texts, logit_scale, gradient_of_logits),
        *(of_texts, lse_of_texts, share, counted, *keys),
    )
    return *gradients, *(None,) * (1 + len(keys))


def _gradients(chunks, images, texts, logit_scale, gradient_of_logits, *by_text):
    """Gradients in images, texts, scale and bias by chunk, from those in the logits."""
    by_text = [chunks.pad(x) for x in (texts, *by_text)]

    def step(number, carry):
        image_gradient, text_gradient, scale_gradient, bias_gradient = carry
        part, *parts = (chunks.part(x, number) for x in by_text)
        similarity = ops.matmul(images, ops.transpose(part))
        gradient = gradient_of_logits(similarity, *parts)
        scale_gradient = scale_gradient + ops.sum(gradient * similarity)
        bias_gradient = bias_gradient + ops.sum(gradient)
        gradient = logit_scale * gradient
        image_gradient = image_gradient + ops.matmul(gradient, part)
        text_gradient = chunks.put(
            text_gradient, number, ops.matmul(ops.transpose(gradient), images)
        )
        return image_gradient, text_gradient, scale_gradient, bias_gradient

    zero = ops.zeros_like(logit_scale)
    carry = ops.zeros_like(images), chunks.zeros(texts.shape[-1]), zero, zero
    image_gradient, text_gradient, *others = ops.fori_loop(0, chunks.count, step, carry)
    return image_gradient, chunks.unpad(text_gradient), *others


def _counted_positives(keys, part_keys, counted, part_counted):
    """1 for positives that count, else 0, float32 (B, C)."""
    positive = ops.cast(positives(keys, part_keys), "float32")
    return positive * ops.expand_dims(counted, 1) * part_counted


def _cross_entropy(top, log_total, target, num_positives):
    """`top - target / num_positives + log_total`, or 0 without a positive."""
    # The largest logit comes first: where it is the target, nothing cancels.
    loss = (top - target / ops.maximum(num_positives, 1.0)) + log_total
    return ops.where(num_positives > 0, loss, 0.0)
