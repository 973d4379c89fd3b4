"""The sigmoid contrastive loss of images and texts, as SigLIP has it.

Axes: B pairs, D embedding.
"""

from typing import Any

from keras import ops

from keras_moe.losses.pairs import (
    Pairs,
    check_similarity,
    is_empty,
    loss_of_nothing,
    pairs_of,
    positives,
    weighted_mean,
)
from keras_moe.losses.sigmoid_in_chunks import sigmoid_losses


def sigmoid_contrastive_loss(
    image_embeddings: Any,
    text_embeddings: Any,
    logit_scale: Any,
    logit_bias: Any = 0.0,
    *,
    image_ids: Any = None,
    text_ids: Any = None,
    sample_weight: Any = None,
    chunk_size: int | None = None,
    similarity_dtype: str = "float32",
) -> Any:
    """Asks of each image and each text of the batch whether they are a pair.

    With unit vectors x of images and y of texts, the logits are
    `L_ij = logit_scale * x_i . y_j + logit_bias`. An image's loss is
    `-sum over texts j of log sigmoid(z_ij L_ij)`, with z = 1 for its positives and -1
    for all others. Without ids a pair's own text is the only positive.

    Args:
        image_embeddings: float (B, D). The loss divides them by their norm.
        text_embeddings: float (B, D), likewise.
        logit_scale: scalar, the inverse temperature: the exponential of the learned
            logarithm; see `keras_moe.losses.TEMPERATURES`.
        logit_bias: scalar, the learned bias.
        image_ids: int (B,), equal where pairs have one image. The texts of these
            pairs are all positives of that image, and none is a negative.
        text_ids: int (B,), equal where pairs have one caption, likewise.
        sample_weight: float (B,), weight of each pair's image in the mean. The text of
            a pair of weight 0 is no negative of the others, either.
        chunk_size: number of texts whose logits are in memory at a time, for all
            images: B x chunk_size of the B x B logits. The loss and its gradient are
            the same; the gradient computes the logits again. None for all at once.
        similarity_dtype: dtype to which the unit vectors are rounded, such as
            `"bfloat16"`. Their products and sums are float32 in any case.

    Returns:
        float32 scalar: the weighted mean over images, summed over texts; 0 if no pair
        counts.

    Raises:
        ValueError: if an argument has another shape or dtype, or is unknown.

    Reference:
        *Sigmoid Loss for Language Image Pre-Training* (SigLIP), section 3.2 and
        Algorithm 1.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import sigmoid_contrastive_loss
    >>> images = np.eye(2, dtype="float32")
    >>> loss = sigmoid_contrastive_loss(images, images, 2.0, logit_bias=-1.0)
    >>> round(float(loss), 4)  # softplus(-1) for the positive and for the negative
    0.6265
    """
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
    logit_bias = ops.cast(ops.convert_to_tensor(logit_bias), "float32")
    if is_empty(pairs):
        return loss_of_nothing(pairs, logit_scale)
    if chunk_size is None:
        losses = _losses(pairs, logit_scale, logit_bias)
    else:
        losses = sigmoid_losses(pairs, logit_scale, logit_bias, chunk_size)
    return weighted_mean(losses, pairs.weights)


def _losses(pairs: Pairs, logit_scale: Any, logit_bias: Any) -> Any:
    """The losses of images, float32 (B,)."""
    similarity = ops.matmul(pairs.images, ops.transpose(pairs.texts))
    logits = logit_scale * similarity + logit_bias
    # softplus(-z L) is -log sigmoid(z L).
    signed = ops.where(positives(pairs.keys, pairs.keys), -logits, logits)
    return ops.sum(pairs.counted * ops.softplus(signed), axis=-1)
