"""The contrastive losses as `keras.losses.Loss`, which a model of pairs trains by."""

from collections.abc import Callable
from typing import Any

import keras

from keras_moe.checks import (
    check_argument_names,
    check_bool,
    check_one_of,
)
from keras_moe.losses.pairs import check_similarity
from keras_moe.losses.sigmoid_contrastive import sigmoid_contrastive_loss
from keras_moe.losses.softmax_contrastive import (
    DIRECTIONS,
    softmax_contrastive_loss,
)

IDS = ("image_ids", "text_ids")


class ContrastiveLoss(keras.losses.Loss):
    """A loss of the embeddings of pairs, which needs no labels.

    The loss belongs to a whole batch: no output of the model has a loss of its own. A
    model therefore hands all of them over in its `compute_loss`, and adds its
    auxiliary losses:

    ```python
    class ContrastiveModel(keras.Model):
        def call(self, inputs, training=None):
            return {
                "image_embeddings": ...,  # (B, D)
                "text_embeddings": ...,  # (B, D)
                "logit_scale": ops.exp(self.log_scale),
                "logit_bias": self.logit_bias,  # for the sigmoid loss
            }

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return sum(self.losses, self.loss(y, y_pred, sample_weight))
    ```

    `fit` then takes `x` alone. Ids of images and captions, where there are any, are
    `y`; padded pairs of a last batch have `sample_weight` 0. The reduction is the
    weighted mean over pairs, so that padding leaves the loss as it is without it.

    Args:
        multi_positive: whether pairs with an equal image or caption id are positives
            of each other. Otherwise the ids are not read, and these pairs are
            negatives: `count_duplicate_pairs` tells how many there are.
        chunk_size: number of texts whose logits are in memory at a time, None for all.
        similarity_dtype: dtype to which the unit vectors are rounded.
        name: name of the loss.

    Call arguments:
        y_true: None, or a dict with `"image_ids"`, `"text_ids"` or both, int (B,).
        y_pred: dict with `"image_embeddings"` and `"text_embeddings"`, float (B, D),
            the scalar `"logit_scale"` and, for the sigmoid loss, `"logit_bias"`.
        sample_weight: None, or float (B,), weight of each pair.

    Example:

    >>> from keras_moe.losses import ContrastiveLoss, SigmoidContrastiveLoss
    >>> isinstance(SigmoidContrastiveLoss(), ContrastiveLoss)
    True
    """

    # The function, and the names of the logits' parameters in `y_pred`.
    function: Callable[..., Any]
    parameters: tuple[str, ...]

    def __init__(
        self,
        multi_positive: bool = False,
        chunk_size: int | None = None,
        similarity_dtype: str = "float32",
        name: str | None = None,
    ):
        super().__init__(name=name, reduction="mean_with_sample_weight")
        self.multi_positive = check_bool("multi_positive", multi_positive)
        self.chunk_size = check_similarity(similarity_dtype, chunk_size)
        self.similarity_dtype = similarity_dtype

    def __call__(self, y_true, y_pred, sample_weight=None):
        # Keras would cast ids to float32, and weigh padding after it was a negative.
        names = ("image_embeddings", "text_embeddings", *self.parameters)
        missing = [name for name in names if name not in y_pred]
        if missing:
            raise ValueError(
                f"Expected y_pred with {list(names)}; received: {sorted(y_pred)}"
            )
        ids = {}
        if self.multi_positive:
            ids = self._ids(y_true)
        return type(self).function(
            *(y_pred[name] for name in names),
            sample_weight=sample_weight,
            chunk_size=self.chunk_size,
            similarity_dtype=self.similarity_dtype,
            **ids,
            **self._options(),
        )

    def call(self, y_true, y_pred):
        return self(y_true, y_pred)

    @staticmethod
    def _ids(y_true):
        if not isinstance(y_true, dict) or not y_true:
            raise ValueError(
                f"Expected y_true to be a dict with ids among {list(IDS)}, since "
                f"multi_positive=True; received: y_true={y_true!r}"
            )
        check_argument_names(y_true, list(IDS), "y_true")
        return y_true

    def _options(self):
        """Arguments of the function that the class alone has."""
        return {}

    def get_config(self):
        return {
            "multi_positive": self.multi_positive,
            "chunk_size": self.chunk_size,
            "similarity_dtype": self.similarity_dtype,
            "name": self.name,
        }


@keras.saving.register_keras_serializable("keras_moe")
class SoftmaxContrastiveLoss(ContrastiveLoss):
    """`softmax_contrastive_loss` as a loss; see `ContrastiveLoss` for its use.

    Args:
        direction: direction that counts: `"both"`, `"image_to_text"` or
            `"text_to_image"`.
        multi_positive: whether pairs with an equal id are positives of each other.
        chunk_size: number of texts whose logits are in memory at a time, None for all.
        similarity_dtype: dtype to which the unit vectors are rounded.
        name: name of the loss.

    Call arguments:
        y_true: None, or a dict with `"image_ids"`, `"text_ids"` or both, int (B,).
        y_pred: dict with `"image_embeddings"` and `"text_embeddings"`, float (B, D),
            and the scalar `"logit_scale"`.
        sample_weight: None, or float (B,), weight of each pair.

    Raises:
        ValueError: if an argument is unknown, or `y_true` or `y_pred` lacks a part.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import SoftmaxContrastiveLoss
    >>> x = np.eye(2, dtype="float32")
    >>> outputs = {"image_embeddings": x, "text_embeddings": x, "logit_scale": 1.0}
    >>> round(float(SoftmaxContrastiveLoss()(None, outputs)), 4)
    0.3133
    """

    function = staticmethod(softmax_contrastive_loss)
    parameters = ("logit_scale",)

    def __init__(
        self,
        direction: str = "both",
        multi_positive: bool = False,
        chunk_size: int | None = None,
        similarity_dtype: str = "float32",
        name: str = "softmax_contrastive",
    ):
        super().__init__(multi_positive, chunk_size, similarity_dtype, name)
        self.direction = check_one_of("direction", direction, DIRECTIONS)

    def _options(self):
        return {"direction": self.direction}

    def get_config(self):
        return {"direction": self.direction, **super().get_config()}


@keras.saving.register_keras_serializable("keras_moe")
class SigmoidContrastiveLoss(ContrastiveLoss):
    """`sigmoid_contrastive_loss` as a loss; see `ContrastiveLoss` for its use.

    Args:
        multi_positive: whether pairs with an equal id are positives of each other.
        chunk_size: number of texts whose logits are in memory at a time, None for all.
        similarity_dtype: dtype to which the unit vectors are rounded.
        name: name of the loss.

    Call arguments:
        y_true: None, or a dict with `"image_ids"`, `"text_ids"` or both, int (B,).
        y_pred: dict with `"image_embeddings"` and `"text_embeddings"`, float (B, D),
            and the scalars `"logit_scale"` and `"logit_bias"`.
        sample_weight: None, or float (B,), weight of each pair.

    Raises:
        ValueError: if an argument is unknown, or `y_true` or `y_pred` lacks a part.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import SigmoidContrastiveLoss
    >>> x = np.eye(2, dtype="float32")
    >>> outputs = {"image_embeddings": x, "text_embeddings": x}
    >>> outputs.update(logit_scale=2.0, logit_bias=-1.0)
    >>> round(float(SigmoidContrastiveLoss()(None, outputs)), 4)
    0.6265
    """

    function = staticmethod(sigmoid_contrastive_loss)
    parameters = ("logit_scale", "logit_bias")

    def __init__(
        self,
        multi_positive: bool = False,
        chunk_size: int | None = None,
        similarity_dtype: str = "float32",
        name: str = "sigmoid_contrastive",
    ):
        super().__init__(multi_positive, chunk_size, similarity_dtype, name)
