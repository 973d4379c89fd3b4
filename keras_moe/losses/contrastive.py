"""Contrastive losses of images and texts, and their learned temperatures.

Axes: B pairs, D embedding.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_moe import _checks
from keras_moe._types import Tensor
from keras_moe.losses import _pairs

DIRECTIONS = ("both", "image_to_text", "text_to_image")
IDS = ("image_ids", "text_ids")


def softmax_contrastive_loss(
    image_embeddings: Tensor,
    text_embeddings: Tensor,
    logit_scale: float | Tensor,
    *,
    direction: str = "both",
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    sample_weight: Tensor | None = None,
    chunk_size: int | None = None,
    similarity_dtype: str = "float32",
) -> Tensor:
    """The loss of CLIP (InfoNCE): each image must find its text, and vice versa.

    With unit vectors x of images and y of texts, the logits are
    `L_ij = logit_scale * x_i . y_j`. An image's loss is
    `-mean over its positives j of log softmax(L_i)_j`, a text's the same over
    the columns of L. Without ids a pair's own text is the only positive.

    Args:
        image_embeddings: float (B, D), which the loss normalises.
        text_embeddings: float (B, D), likewise.
        logit_scale: scalar, the inverse temperature itself, not its logarithm.
        direction: `"image_to_text"`, `"text_to_image"`, or `"both"` for their mean.
        image_ids: int (B,), equal for pairs with the same image, which are positives.
        text_ids: int (B,), equal for pairs with the same caption, likewise.
        sample_weight: float (B,), weight of each pair; at 0 it is no negative, either.
        chunk_size: number of texts per chunk of logits, to save memory; None for all.
        similarity_dtype: dtype to which the unit vectors are rounded, such as
            `"bfloat16"` in LIMoE. Their products and sums are float32 in any case.

    Returns: float32 scalar: the weighted mean over pairs; 0 if no pair counts.

    Reference: *Learning Transferable Visual Models From Natural Language Supervision*
    (CLIP), figure 3; *CLIP-UP*, equation 1. With several positives: *Supervised
    Contrastive Learning*, equation 2, and *Unified Contrastive Learning in
    Image-Text-Label Space*, equations 3 and 4.

    Example:

    >>> from keras_moe.losses import softmax_contrastive_loss
    >>> images = np.eye(2, dtype="float32")
    >>> round(float(softmax_contrastive_loss(images, images, logit_scale=1.0)), 4)
    0.3133
    >>> round(float(softmax_contrastive_loss(images, images[::-1], 1.0)), 4)
    1.3133
    """
    _checks.check_one_of("direction", direction, DIRECTIONS)
    chunk_size = _pairs.check_similarity(similarity_dtype, chunk_size)
    ids_and_weights = image_ids, text_ids, sample_weight
    pairs = _pairs.pairs_of(
        image_embeddings, text_embeddings, *ids_and_weights, similarity_dtype
    )
    logit_scale = ops.cast(ops.convert_to_tensor(logit_scale), "float32")
    if pairs.images.shape[0] == 0:
        return _loss_of_nothing(pairs, logit_scale)
    if chunk_size is None:
        of_images, of_texts = _softmax_losses(pairs, logit_scale)
    else:
        of_images, of_texts = _pairs.softmax_losses(pairs, logit_scale, chunk_size)
    losses = {
        "image_to_text": of_images,
        "text_to_image": of_texts,
        "both": 0.5 * (of_images + of_texts),
    }
    return _pairs.weighted_mean(losses[direction], pairs.weights)


def _loss_of_nothing(pairs, logit_scale):
    """The loss of a batch without pairs: 0, with a gradient of 0."""
    return logit_scale * (ops.sum(pairs.images) + ops.sum(pairs.texts))


def _softmax_losses(pairs, logit_scale):
    """The losses of images and of texts, float32 (B,) each."""
    logits = logit_scale * ops.matmul(pairs.images, ops.transpose(pairs.texts))
    counted = pairs.counted > 0
    positive = _pairs.positives(pairs.keys, pairs.keys)
    positive = ops.logical_and(positive, ops.expand_dims(counted, 0))
    positive = ops.logical_and(positive, ops.expand_dims(counted, 1))

    def cross_entropies(logits):
        logits = ops.where(ops.expand_dims(counted, 0), logits, _pairs.NEVER)
        log_p = ops.where(positive, ops.log_softmax(logits, axis=-1), 0.0)
        count = ops.sum(ops.cast(positive, "float32"), axis=-1)
        return -ops.sum(log_p, axis=-1) / ops.maximum(count, 1.0)

    # `positive` is symmetric: pairs share an image or a caption with each other.
    return cross_entropies(logits), cross_entropies(ops.transpose(logits))


def sigmoid_contrastive_loss(
    image_embeddings: Tensor,
    text_embeddings: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor = 0.0,
    *,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    sample_weight: Tensor | None = None,
    chunk_size: int | None = None,
    similarity_dtype: str = "float32",
) -> Tensor:
    """The loss of SigLIP: is each image a pair with each text of the batch, or not?

    With unit vectors x of images and y of texts, the logits are
    `L_ij = logit_scale * x_i . y_j + logit_bias`. An image's loss is
    `-sum over texts j of log sigmoid(z_ij L_ij)`, with z = 1 for its positives and -1
    for all others. Without ids a pair's own text is the only positive.

    Args:
        logit_bias: scalar, the learned bias.
        sample_weight: float (B,), weight of each image; at 0 its text is no negative.
            All other arguments are those of `softmax_contrastive_loss`.

    Returns: float32 scalar: the weighted mean over images, summed over texts; 0 if no
    pair counts.

    Reference: *Sigmoid Loss for Language Image Pre-Training* (SigLIP), section 3.2.

    Example:

    >>> from keras_moe.losses import sigmoid_contrastive_loss
    >>> images = np.eye(2, dtype="float32")
    >>> loss = sigmoid_contrastive_loss(images, images, 2.0, logit_bias=-1.0)
    >>> round(float(loss), 4)  # softplus(-1) for the positive and for the negative
    0.6265
    """
    chunk_size = _pairs.check_similarity(similarity_dtype, chunk_size)
    ids_and_weights = image_ids, text_ids, sample_weight
    pairs = _pairs.pairs_of(
        image_embeddings, text_embeddings, *ids_and_weights, similarity_dtype
    )
    logit_scale = ops.cast(ops.convert_to_tensor(logit_scale), "float32")
    logit_bias = ops.cast(ops.convert_to_tensor(logit_bias), "float32")
    if pairs.images.shape[0] == 0:
        return _loss_of_nothing(pairs, logit_scale)
    if chunk_size is None:
        similarity = ops.matmul(pairs.images, ops.transpose(pairs.texts))
        logits = logit_scale * similarity + logit_bias
        # softplus(-z L) is -log sigmoid(z L).
        signed = ops.where(_pairs.positives(pairs.keys, pairs.keys), -logits, logits)
        losses = ops.sum(pairs.counted * ops.softplus(signed), axis=-1)
    else:
        losses = _pairs.sigmoid_losses(pairs, logit_scale, logit_bias, chunk_size)
    return _pairs.weighted_mean(losses, pairs.weights)


class ContrastiveLoss(keras.losses.Loss):
    """A loss of the embeddings of image-text pairs, which needs no labels.

    A model passes all its outputs to the loss in its `compute_loss`, as
    `keras_moe.models.ContrastiveModel` does. `fit` then takes `x` alone, or ids of
    images and captions as `y`. Padded pairs have `sample_weight` 0: the loss is the
    weighted mean over pairs. A loss of your own overrides `call`, which returns a
    scalar or a loss for each pair, (B,).

    Args:
        multi_positive: whether pairs with an equal id are positives, not negatives.
        chunk_size: number of texts whose logits are in memory at a time, None for all.
        similarity_dtype: dtype to which the unit vectors are rounded.
        name: name of the loss.

    Call arguments:
        y_true: None, or a dict with `"image_ids"`, `"text_ids"` or both, int (B,).
        y_pred: dict with `"image_embeddings"` and `"text_embeddings"`, float (B, D),
            the scalar `"logit_scale"` and, for the sigmoid loss, `"logit_bias"`.
        sample_weight: None, or float (B,), weight of each pair.

    Example:

    >>> from keras import ops
    >>> from keras_moe.losses import ContrastiveLoss
    >>> class Distance(ContrastiveLoss):
    ...     def call(self, y_true, y_pred):
    ...         images, texts = y_pred["image_embeddings"], y_pred["text_embeddings"]
    ...         return ops.sum(ops.square(images - texts), axis=-1)
    >>> x = np.eye(2, dtype="float32")
    >>> outputs = {"image_embeddings": x, "text_embeddings": x[::-1]}
    >>> float(Distance()(None, outputs, [1.0, 0.0]))
    2.0
    """

    # What the loss reads of a model's logits, and its name.
    parameters: tuple[str, ...] = ()
    default_name: str | None = None

    def __init__(
        self,
        multi_positive: bool = False,
        chunk_size: int | None = None,
        similarity_dtype: str = "float32",
        name: str | None = None,
    ):
        _checks.check_concrete(type(self), ContrastiveLoss, "SoftmaxContrastiveLoss")
        super().__init__(
            name=name or self.default_name, reduction="mean_with_sample_weight"
        )
        self.multi_positive = _checks.check_bool("multi_positive", multi_positive)
        self.chunk_size = _pairs.check_similarity(similarity_dtype, chunk_size)
        self.similarity_dtype = similarity_dtype

    def __call__(self, y_true, y_pred, sample_weight=None):
        # Keras would cast ids to float32.
        return mean_over_pairs(self.call(y_true, y_pred), sample_weight)

    def get_config(self):
        return _checks.argument_values(self, keras.losses.Loss)


def mean_over_pairs(losses: Tensor, sample_weight: Tensor | None = None) -> Tensor:
    """The weighted mean of the pairs' losses (B,); a scalar is left as it is."""
    losses = ops.convert_to_tensor(losses)
    if len(losses.shape) == 0:
        return losses
    if len(losses.shape) > 1:
        expected = "a loss that is a scalar or a number for each pair, (batch,)"
        raise _checks.unfit(expected, shape=tuple(losses.shape))
    if sample_weight is None:
        return ops.mean(losses)
    weights = ops.cast(sample_weight, losses.dtype)
    # A product would not do: the loss of padding may be NaN.
    losses = ops.where(weights > 0, weights * losses, 0.0)
    return ops.divide_no_nan(ops.sum(losses), ops.sum(weights))


class _FunctionLoss(ContrastiveLoss):
    """A loss by a function, which weighs the pairs."""

    function: Callable[..., Tensor]
    # Further arguments of the function.
    options: tuple[str, ...] = ()

    def __call__(self, y_true, y_pred, sample_weight=None):
        # Padding would be a negative before it was weighted.
        names = ("image_embeddings", "text_embeddings", *self.parameters)
        if self.multi_positive and not (isinstance(y_true, dict) and y_true):
            expected = f"y_true with ids among {list(IDS)}, since multi_positive=True"
            raise _checks.unfit(expected, y_true=y_true)
        return type(self).function(
            *(y_pred[name] for name in names),
            sample_weight=sample_weight,
            chunk_size=self.chunk_size,
            similarity_dtype=self.similarity_dtype,
            **(y_true if self.multi_positive else {}),
            **{name: getattr(self, name) for name in self.options},
        )

    def call(self, y_true, y_pred):
        return self(y_true, y_pred)


@keras.saving.register_keras_serializable("keras_moe")
class SoftmaxContrastiveLoss(_FunctionLoss):
    """`softmax_contrastive_loss` to compile a model with; see `ContrastiveLoss`.

    Args:
        direction: `"both"`, `"image_to_text"` or `"text_to_image"`.
        **kwargs: arguments of `ContrastiveLoss`.

    Example:

    >>> from keras_moe.losses import SoftmaxContrastiveLoss
    >>> x = np.eye(2, dtype="float32")
    >>> outputs = {"image_embeddings": x, "text_embeddings": x, "logit_scale": 1.0}
    >>> round(float(SoftmaxContrastiveLoss()(None, outputs)), 4)
    0.3133
    """

    function = staticmethod(softmax_contrastive_loss)
    parameters = ("logit_scale",)
    options = ("direction",)
    default_name = "softmax_contrastive"

    def __init__(self, direction: str = "both", **kwargs: Any):
        super().__init__(**kwargs)
        self.direction = _checks.check_one_of("direction", direction, DIRECTIONS)


@keras.saving.register_keras_serializable("keras_moe")
class SigmoidContrastiveLoss(_FunctionLoss):
    """`sigmoid_contrastive_loss` to compile a model with; see `ContrastiveLoss`.

    Args: those of `ContrastiveLoss`.

    Example:

    >>> from keras_moe.losses import SigmoidContrastiveLoss
    >>> x = np.eye(2, dtype="float32")
    >>> outputs = {"image_embeddings": x, "text_embeddings": x}
    >>> outputs.update(logit_scale=2.0, logit_bias=-1.0)
    >>> round(float(SigmoidContrastiveLoss()(None, outputs)), 4)
    0.6265
    """

    function = staticmethod(sigmoid_contrastive_loss)
    parameters = ("logit_scale", "logit_bias")
    default_name = "sigmoid_contrastive"


class Temperature(NamedTuple):
    """Initial scale and bias of contrastive logits; a model learns `log(scale)`.

    Attributes:
        scale: initial scale of the logits, the inverse temperature.
        largest_scale: upper bound of the scale, None for none.
        bias: initial bias of the logits, None for no bias.
    """

    scale: float
    largest_scale: float | None = None
    bias: float | None = None

    @property
    def log_scale(self) -> float:
        """The logarithm of the initial scale."""
        return math.log(self.scale)


# CLIP, section 2.5: temperature 0.07, and a scale of at most 100. LIMoE, appendix A:
# 10; no bound is published. SigLIP, section 3.2: t' = log 10 and b = -10. CLIP-UP,
# appendix A.1, takes its settings from CLIP.
TEMPERATURES = {
    "clip": Temperature(1 / 0.07, largest_scale=100.0),
    "limoe": Temperature(10.0),
    "siglip": Temperature(10.0, bias=-10.0),
    "clip_up": Temperature(1 / 0.07, largest_scale=100.0),
}


@keras.saving.register_keras_serializable("keras_moe")
class LogScaleBound(keras.constraints.Constraint):
    """Constraint that bounds a learned logarithm of the logits' scale after each step.

    With a bound in the loss instead, a weight beyond it would have no gradient.

    Args:
        largest_scale: upper bound of the scale, 100 in CLIP (section 2.5).

    Example:

    >>> from keras_moe.losses import LogScaleBound
    >>> round(float(LogScaleBound(100.0)(np.float32(7.0))), 4)  # log 100
    4.6052
    """

    def __init__(self, largest_scale: float = 100.0):
        self.largest_scale = _checks.check_positive("largest_scale", largest_scale)

    def __call__(self, w):
        return ops.minimum(w, math.log(self.largest_scale))

    def get_config(self):
        return {"largest_scale": self.largest_scale}
