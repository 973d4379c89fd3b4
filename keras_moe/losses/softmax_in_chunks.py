"""The softmax contrastive loss in chunks, with a gradient of its own.

Axes: B pairs, C chunk size, D embedding.
"""

from typing import Any

from keras import ops

from keras_moe.losses.chunks import Chunks
from keras_moe.losses.pairs import Pairs, positives
from keras_moe.ops.primitives import custom_gradient

# The logit of a pair that does not count. It is finite: infinities less infinities
# would be NaN.
NEVER = -1e30


def softmax_losses(pairs: Pairs, logit_scale: Any, chunk_size: int) -> tuple[Any, Any]:
    """The losses of images and of texts, float32 (B,) each.

    Each chunk of the logits is computed for the losses, and again for the gradient: a
    logit's is `g_i (p_ij - t_ij)`, with p the softmax, t the shares of the positives
    and g the gradient in the loss, for the images' softmax and for the texts'.
    """
    of_images, of_texts, *_ = custom_gradient(
        lambda *inputs: _forward(chunk_size, *inputs),
        lambda kept, *upstream: _backward(chunk_size, kept, *upstream),
        *(pairs.images, pairs.texts, logit_scale, pairs.counted),
        *pairs.keys,
    )
    return of_images, of_texts


def _forward(chunk_size, images, texts, logit_scale, counted, *keys):
    chunks = Chunks(ops.shape(images)[0], chunk_size)
    texts_counted_keys = [chunks.pad(x) for x in (texts, counted, *keys)]

    def step(number, carry):
        top, total, target, num_positives, lse_of_texts, of_texts = carry
        part, part_counted, *part_keys = (
            chunks.part(x, number) for x in texts_counted_keys
        )
        logits = logit_scale * ops.matmul(images, ops.transpose(part))
        positive = _positive(keys, part_keys, counted, part_counted)
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
    top, total, target, num_positives, lse_of_texts, of_texts = chunks.loop(
        step, (zeros + NEVER, zeros, zeros, zeros, chunks.zeros(), chunks.zeros())
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


def _backward(chunk_size, kept, of_images, of_texts, *_):
    images, texts, logit_scale, counted, *keys, lse, lse_of_texts, num_positives = kept
    chunks = Chunks(ops.shape(images)[0], chunk_size)
    # A positive's share of its row, in which there are as many as in its column.
    share = 1.0 / ops.maximum(num_positives, 1.0)
    by_text = [
        chunks.pad(x) for x in (texts, of_texts, lse_of_texts, share, counted, *keys)
    ]

    def step(number, carry):
        image_gradient, text_gradient, scale_gradient = carry
        part, part_of_texts, part_lse, part_share, part_counted, *part_keys = (
            chunks.part(x, number) for x in by_text
        )
        similarity = ops.matmul(images, ops.transpose(part))
        logits = logit_scale * similarity
        positive = _positive(keys, part_keys, counted, part_counted)
        masked = ops.where(part_counted > 0, logits, NEVER)
        p = ops.exp(masked - ops.expand_dims(lse, 1))
        gradient = ops.expand_dims(of_images, 1) * (
            p - positive * ops.expand_dims(share, 1)
        )
        masked = ops.where(ops.expand_dims(counted, 1) > 0, logits, NEVER)
        p = ops.exp(masked - part_lse)
        gradient = gradient + part_of_texts * (p - positive * part_share)
        scale_gradient = scale_gradient + ops.sum(gradient * similarity)
        gradient = logit_scale * gradient
        image_gradient = image_gradient + ops.matmul(gradient, part)
        text_gradient = chunks.put(
            text_gradient, number, ops.matmul(ops.transpose(gradient), images)
        )
        return image_gradient, text_gradient, scale_gradient

    image_gradient, text_gradient, scale_gradient = chunks.loop(
        step,
        (
            ops.zeros_like(images),
            chunks.zeros(texts.shape[-1]),
            ops.zeros_like(logit_scale),
        ),
    )
    nothing = (None,) * (1 + len(keys))
    return image_gradient, chunks.unpad(text_gradient), scale_gradient, *nothing


def _positive(keys, part_keys, counted, part_counted):
    """1 for positives that count, else 0, float32 (B, C)."""
    positive = ops.cast(positives(keys, part_keys), "float32")
    return positive * ops.expand_dims(counted, 1) * part_counted


def _cross_entropy(top, log_total, target, num_positives):
    """`top + log_total - target / num_positives`, or 0 without a positive.

    The largest logit is subtracted first: where it is the target, nothing cancels.
    """
    loss = (top - target / ops.maximum(num_positives, 1.0)) + log_total
    return ops.where(num_positives > 0, loss, 0.0)
