"""The softmax contrastive loss of images and texts (InfoNCE), as CLIP has it.

Axes: B pairs, D embedding.
"""

from typing import Any

from keras import ops

from keras_moe.checks import check_one_of
from keras_moe.losses.pairs import (
    Pairs,
    check_similarity,
    is_empty,
    loss_of_nothing,
    pairs_of,
    positives,
    weighted_mean,
)
from keras_moe.losses.softmax_in_chunks import NEVER, softmax_losses

DIRECTIONS = ("both", "image_to_text", "text_to_image")


def softmax_contrastive_loss(
    image_embeddings: Any,
    text_embeddings: Any,
    logit_scale: Any,
    *,
    direction: str = "both",
    image_ids: Any = None,
    text_ids: Any = None,
    sample_weight: Any = None,
    chunk_size: int | None = None,
    similarity_dtype: str = "float32",
) -> Any:
    """Asks each image to find its text among those of the batch, and vice versa.

    With unit vectors x of images and y of texts, the logits are
    `L_ij = logit_scale * x_i . y_j`. An image's loss is
    `-mean over its positives j of log softmax(L_i)_j`, a text's the same over the
    columns of L. Without ids a pair's own text is the only positive.

    Args:
        image_embeddings: float (B, D). The loss divides them by their norm.
        text_embeddings: float (B, D), likewise.
        logit_scale: scalar, the inverse temperature: the exponential of the learned
            logarithm; see `keras_moe.losses.TEMPERATURES`.
        direction: direction that counts: `"image_to_text"` for the mean over images,
            `"text_to_image"` for that over texts, or `"both"` for the mean of the two.
        image_ids: int (B,), equal where pairs have one image. The texts of these
            pairs are all positives of that image, and none is a negative.
        text_ids: int (B,), equal where pairs have one caption, likewise.
        sample_weight: float (B,), weight of each pair in the mean. A pair of weight 0
            is no negative of the others, either.
        chunk_size: number of texts whose logits are in memory at a time, for all
            images: B x chunk_size of the B x B logits. The loss and its gradient are
            the same; the gradient computes the logits again. None for all at once.
        similarity_dtype: dtype to which the unit vectors are rounded, such as
            `"bfloat16"` in LIMoE. Their products and sums are float32 in any case.

    Returns:
        float32 scalar: the weighted mean over pairs; 0 if no pair counts.

    Raises:
        ValueError: if an argument has another shape or dtype, or is unknown.

    Reference:
        *Learning Transferable Visual Models From Natural Language Supervision*
        (CLIP), figure 3; *CLIP-UP*, equation 1. With several positives: *Supervised
        Contrastive Learning*, equation 2, and *Unified Contrastive Learning in
        Image-Text-Label Space*, equations 3 and 4.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import softmax_contrastive_loss
    >>> images = np.eye(2, dtype="float32")
    >>> round(float(softmax_contrastive_loss(images, images, logit_scale=1.0)), 4)
    0.3133
    >>> round(float(softmax_contrastive_loss(images, images[::-1], 1.0)), 4)
    1.3133
    """
    check_one_of("direction", direction, DIRECTIONS)
    chunk_size = check_similarity(similarity_dtype, chunk_size)
    pairs = pairs_of(
        image_embeddings,
        text_embeddings,
        image_ids,
        text_ids,
        sample_weight,
        similarity_dtype,
    )
    logit_scale = ops.cast(ops.convert_to_tensor(logit_scale), "float32")
    if is_empty(pairs):
        return loss_of_nothing(pairs, logit_scale)
    if chunk_size is None:
        of_images, of_texts = _losses(pairs, logit_scale)
    else:
        of_images, of_texts = softmax_losses(pairs, logit_scale, chunk_size)
    losses = {
        "image_to_text": of_images,
        "text_to_image": of_texts,
        "both": 0.5 * (of_images + of_texts),
    }
    return weighted_mean(losses[direction], pairs.weights)


def _losses(pairs: Pairs, logit_scale: Any) -> tuple[Any, Any]:
    """The losses of images and of texts, float32 (B,) each."""
    logits = logit_scale * ops.matmul(pairs.images, ops.transpose(pairs.texts))
    counted = pairs.counted > 0
    positive = positives(pairs.keys, pairs.keys)
    positive = ops.logical_and(positive, ops.expand_dims(counted, 0))
    positive = ops.logical_and(positive, ops.expand_dims(counted, 1))

    def cross_entropies(logits):
        logits = ops.where(ops.expand_dims(counted, 0), logits, NEVER)
        log_p = ops.where(positive, ops.log_softmax(logits, axis=-1), 0.0)
        count = ops.sum(ops.cast(positive, "float32"), axis=-1)
        return -ops.sum(log_p, axis=-1) / ops.maximum(count, 1.0)

    # `positive` is symmetric: pairs share an image or a caption with each other.
    return cross_entropies(logits), cross_entropies(ops.transpose(logits))
