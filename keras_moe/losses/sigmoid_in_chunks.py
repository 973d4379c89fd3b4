"""The sigmoid contrastive loss in chunks, with a gradient of its own.

Axes: B pairs, C chunk size, D embedding.
"""

from typing import Any

from keras import ops

from keras_moe.losses.chunks import Chunks
from keras_moe.losses.pairs import Pairs, positives
from keras_moe.ops.primitives import custom_gradient


def sigmoid_losses(
    pairs: Pairs, logit_scale: Any, logit_bias: Any, chunk_size: int
) -> Any:
    """The losses of images, float32 (B,).

    Each chunk of the logits is computed for the losses, and again for the gradient: a
    logit's is `-z sigmoid(-z L)`, times the gradient in its image's loss.
    """
    return custom_gradient(
        lambda *inputs: _forward(chunk_size, *inputs),
        lambda kept, upstream: _backward(chunk_size, kept, upstream),
        *(pairs.images, pairs.texts, logit_scale, logit_bias, pairs.counted),
        *pairs.keys,
    )


def _forward(chunk_size, images, texts, logit_scale, logit_bias, counted, *keys):
    chunks = Chunks(ops.shape(images)[0], chunk_size)
    by_text = [chunks.pad(x) for x in (texts, counted, *keys)]

    def step(number, losses):
        part, part_counted, *part_keys = (chunks.part(x, number) for x in by_text)
        similarity = ops.matmul(images, ops.transpose(part))
        logits = logit_scale * similarity + logit_bias
        signed = ops.where(positives(keys, part_keys), -logits, logits)
        return losses + ops.sum(part_counted * ops.softplus(signed), axis=1)

    losses = chunks.loop(step, ops.zeros_like(counted))
    return losses, (images, texts, logit_scale, logit_bias, counted, *keys)


def _backward(chunk_size, kept, upstream):
    images, texts, logit_scale, logit_bias, counted, *keys = kept
    chunks = Chunks(ops.shape(images)[0], chunk_size)
    by_text = [chunks.pad(x) for x in (texts, counted, *keys)]

    def step(number, carry):
        image_gradient, text_gradient, scale_gradient, bias_gradient = carry
        part, part_counted, *part_keys = (chunks.part(x, number) for x in by_text)
        similarity = ops.matmul(images, ops.transpose(part))
        logits = logit_scale * similarity + logit_bias
        sign = ops.where(positives(keys, part_keys), -1.0, 1.0)
        gradient = sign * ops.sigmoid(sign * logits)
        gradient = gradient * part_counted * ops.expand_dims(upstream, 1)
        scale_gradient = scale_gradient + ops.sum(gradient * similarity)
        bias_gradient = bias_gradient + ops.sum(gradient)
        gradient = logit_scale * gradient
        image_gradient = image_gradient + ops.matmul(gradient, part)
        text_gradient = chunks.put(
            text_gradient, number, ops.matmul(ops.transpose(gradient), images)
        )
        return image_gradient, text_gradient, scale_gradient, bias_gradient

    image_gradient, text_gradient, scale_gradient, bias_gradient = chunks.loop(
        step,
        (
            ops.zeros_like(images),
            chunks.zeros(texts.shape[-1]),
            ops.zeros_like(logit_scale),
            ops.zeros_like(logit_bias),
        ),
    )
    gradients = (image_gradient, chunks.unpad(text_gradient), scale_gradient)
    return *gradients, bias_gradient, *(None,) * (1 + len(keys))
