"""Contrastive image-text training, encoding and similarity.

Axes: B images, C texts, N tokens, P embedding.
"""

import operator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe._checks import check_integer, unfit
from keras_moe._compat import LossFunctionWrapper, serving
from keras_moe._processes import predict_batch
from keras_moe._types import DType
from keras_moe.losses import (
    ContrastiveLoss,
    SigmoidContrastiveLoss,
    SoftmaxContrastiveLoss,
)
from keras_moe.losses._pairs import NEVER, Chunks, check_similarity, pairs_of, positives
from keras_moe.losses.contrastive import IDS, mean_over_pairs
from keras_moe.models.backbones._pairs import MODALITIES, PairBackbone, TakesPairs
from keras_moe.models.base._input_checks import has_no_examples, outputs_of_none
from keras_moe.models.loading._sources import ModelSource, TaskConfig
from keras_moe.models.preprocessing.images import (
    ImagePreprocessor,
    checked_preprocessor,
)
from keras_moe.models.preprocessing.patches import budget
from keras_moe.models.preprocessing.tokenizer import TextTokenizer
from keras_moe.models.registry import register_task
from keras_moe.models.tasks import base
from keras_moe.models.tasks.image_classifier import most_probable, probabilities


@keras.saving.register_keras_serializable("keras_moe")
class ContrastiveAccuracy(keras.metrics.Mean):
    """Fraction of images and texts whose nearest counterpart is their own.

    An image is correct if one of its own texts is nearer than all other texts of the
    batch, and vice versa. Ties are wrong, so constant embeddings get 0 (unlike in
    `keras_moe.evaluation.contrastive_accuracy`). Pairs with equal image or text ids, if
    given, count as each other's own, and padding is ignored. Larger batches are harder:
    compare results at the same batch size.

    Args:
        chunk_size: number of texts to compare at a time, to save memory; None for all.
        name: name of the metric.
        dtype: dtype of the metric's variables.

    Example:

    >>> from keras_moe.models import ContrastiveAccuracy
    >>> metric = ContrastiveAccuracy()
    >>> x = np.eye(4, dtype="float32")
    >>> outputs = {"image_embeddings": x, "text_embeddings": x[[0, 1, 3, 2]]}
    >>> metric.update_state(None, outputs)
    >>> float(metric.result())
    0.5
    """

    def __init__(
        self,
        chunk_size: int | None = None,
        name: str = "contrastive_accuracy",
        dtype: DType | None = None,
    ):
        super().__init__(name=name, dtype=dtype)
        self.chunk_size = check_similarity("float32", chunk_size)

    def update_state(self, y_true, y_pred, sample_weight=None):
        # Metrics need no gradient.
        images, texts = (
            ops.stop_gradient(ops.convert_to_tensor(y_pred[f"{modality}_embeddings"]))
            for modality in ("image", "text")
        )
        pairs = pairs_of(images, texts, **(y_true or {}), sample_weight=sample_weight)
        of_images, of_texts = _hits(pairs, self.chunk_size)
        return super().update_state(0.5 * (of_images + of_texts), pairs.weights)

    def get_config(self):
        return {**super().get_config(), "chunk_size": self.chunk_size}


@register_task
@keras.saving.register_keras_serializable("keras_moe")
class ContrastiveModel(TakesPairs, base.LabellessTask):
    """A contrastive image-text model on any image-text backbone.

    `fit` takes unlabelled pairs: a dict of `"images"`, `"token_ids"` and
    `"padding_mask"`. Pairs that share an image or caption count as negatives unless `y`
    is a dict of `"image_ids"` or `"text_ids"` and the loss has `multi_positive=True`.
    Give padding pairs of a last batch a `sample_weight` of 0.

    The `loss` of `compile` is a `keras_moe.losses.ContrastiveLoss`, or any Keras loss
    or function of `(y_true, y_pred)`: the ids or None, and the dict of outputs with
    `"logit_scale"`. It returns a scalar or a loss for each pair, (B,). `metrics` and
    `weighted_metrics` read the output dict, like `ContrastiveAccuracy`; `"auto"` means
    none.

    Args:
        backbone: `CLIPBackbone` or `LIMoEBackbone`.
        preprocessor: optional `TextTokenizer` for `encode_text`; saved with the model.
        image_preprocessor: optional `ImagePreprocessor` for `encode_images`.
        **kwargs: arguments of `keras_hub.models.Task`.

    Input shape: as the backbone.

    Output shape: dict of float32 unit vectors `"image_embeddings"` and
    `"text_embeddings"`, (B, P).

    Reference: *Learning Transferable Visual Models From Natural Language Supervision*,
    figure 3; *Multimodal Contrastive Learning with LIMoE*, section 2.

    Example:

    >>> from keras_moe.models import ContrastiveModel, LIMoEBackbone
    >>> backbone = LIMoEBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, vocabulary_size=20, max_length=6,
    ...     hidden_dim=8, num_layers=2, num_heads=2, mlp_dim=16, projection_dim=4,
    ...     moe={"num_experts": 4},
    ... )
    >>> model = ContrastiveModel(backbone)
    >>> token_ids = np.array([[1, 7, 19, 0], [1, 5, 6, 19]])
    >>> texts = {"token_ids": token_ids, "padding_mask": token_ids != 0}
    >>> images = np.zeros((2, 8, 8, 3), "float32")
    >>> history = model.fit({"images": images, **texts}, verbose=0)
    >>> model.similarity(images, texts).shape
    (2, 2)
    """

    task_name = "contrastive"
    pipeline_tag = "zero-shot-image-classification"
    backbone_cls = PairBackbone
    backbone: PairBackbone
    image_preprocessor: ImagePreprocessor | None

    def __init__(
        self,
        backbone: PairBackbone,
        preprocessor: TextTokenizer | None = None,
        image_preprocessor: ImagePreprocessor | None = None,
        **kwargs,
    ):
        base.check_task(self, ContrastiveModel, backbone, kwargs)
        base.check_tokenizer(preprocessor, backbone)
        image_preprocessor = checked_preprocessor(image_preprocessor, backbone)

        # === Layers ===
        self.backbone = backbone
        self.preprocessor = preprocessor

        # === Functional model ===
        super().__init__(
            backbone.input,
            backbone.output,
            backbone.features,
            backbone.routing,
            **kwargs,
        )

        # === Config ===
        object.__setattr__(self, "image_preprocessor", image_preprocessor)

    @classmethod
    def config_from(
        cls, source: ModelSource, overrides: dict, backbone_config: dict
    ) -> TaskConfig:
        config = dict(source.task_config())
        image, text = (backbone_config.get(x, backbone_config) for x in MODALITIES)
        if config.get("image_preprocessor") is not None:
            config["image_preprocessor"] = config["image_preprocessor"].adapted(
                image["image_shape"], **budget(image)
            )
        return TaskConfig(
            {**base.without_large_tokenizer(source, config, text), **overrides}
        )

    def default_loss(self) -> ContrastiveLoss:
        """Returns the sigmoid loss if similarities have a bias, else softmax."""
        if "logit_bias" in self.backbone.logit_scale.parameter_names:
            return SigmoidContrastiveLoss()
        return SoftmaxContrastiveLoss()

    def _checked_loss(self, loss):
        is_for_tensors = isinstance(loss, LossFunctionWrapper)
        if not callable(loss) or isinstance(loss, type) or is_for_tensors:
            raise ValueError(
                "Expected a loss of (y_true, y_pred), whose y_pred is a dict of "
                f"embeddings; received: loss={loss!r}"
            )
        if getattr(loss, "reduction", None) == "sum":
            raise unfit("a loss that is averaged over pairs", "reduction='sum'")
        names = self.backbone.logit_scale.parameter_names
        wanted = getattr(loss, "parameters", ())
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(
                "Expected a model with all that the loss reads; received: "
                f"{type(loss).__name__} for a model without {missing}"
            )
        return loss

    def _check_inputs(self, inputs, labels=None):
        self.backbone._check_inputs(inputs)
        if labels is not None and not (
            isinstance(labels, dict) and {*labels} <= {*IDS}
        ):
            expected = f"y to be None or a dict of ids among {list(IDS)}"
            raise unfit(expected, f"y of {type(labels).__name__}")

    def _training_data(self, x, y, sample_weight=None):
        x, y = super()._training_data(x, y)
        # Without labels Keras drops sample weights.
        if sample_weight is None or not isinstance(x, dict):
            return x, y
        number = len(next(iter(x.values())))
        if len(sample_weight) != number:
            expected = f"a sample_weight for each of {number} pairs"
            raise unfit(expected, len(sample_weight))
        # A distinct image per pair is the default.
        return x, {"image_ids": np.arange(number)} if y is None else y

    def _weighed(self, x, y, y_pred, sample_weight: Any):
        if isinstance(sample_weight, dict):
            # Keras repeats them for each label.
            sample_weight = next(iter(sample_weight.values()))
        return y, y_pred, sample_weight

    def get_layer(self, name: str | None = None, index: int | None = None) -> Any:
        if "/" in str(name):
            return self.backbone.get_layer(name)
        return super().get_layer(name, index)

    def compute_loss(
        self,
        x: object = None,
        y: object = None,
        y_pred: Any = None,
        sample_weight: object = None,
        training: bool = True,
    ) -> Any:
        """Returns the contrastive loss of a batch plus auxiliary losses."""
        outputs = {**y_pred, **self.backbone.logit_scale.parameters()}
        weight: Any = self._weighed(x, y, y_pred, sample_weight)[-1]
        if isinstance(self.loss, ContrastiveLoss):
            loss = self.loss(y, outputs, weight)
        else:
            is_keras_loss = isinstance(self.loss, keras.losses.Loss)
            function = self.loss.call if is_keras_loss else self.loss
            loss = mean_over_pairs(function(y, outputs), weight)
        return sum(self.losses, loss)

    def encode_images(self, images: Any, batch_size: int = 32) -> np.ndarray:
        """Embeds images as float32 unit vectors (B, P).

        Args:
            images: images (B, height, width, channels) in the model's format; or, with
                an `image_preprocessor`, images of any size or paths, one or several
                (floats of the model's size count as preprocessed). With `max_patches`,
                a dict of `"patches"` and `"grids"`.
            batch_size: images per batch.
        """
        shape = tuple(getattr(images, "shape", ()))
        # Integer pixels are raw.
        is_raw = "int" in str(getattr(images, "dtype", ""))
        is_prepared = shape[1:] == tuple(self.backbone.image_shape) and not is_raw
        if self.backbone.max_patches is not None:
            is_prepared = isinstance(images, dict)
        if self.image_preprocessor is not None and not is_prepared:
            images, _ = self.image_preprocessor.batch(images)
        if not isinstance(images, dict) and not hasattr(images, "shape"):
            raise ValueError(
                "Expected an array of images (batch, height, width, channels), or a "
                f"model with an image_preprocessor; received: {type(images).__name__}"
            )
        self.backbone.check_modality("image", images)
        return self._encode("image", images, batch_size)

    def encode_text(self, texts: object, batch_size: int = 32) -> np.ndarray:
        """Embeds texts as float32 unit vectors (B, P).

        Args:
            texts: captions, or a dict of `"token_ids"` and `"padding_mask"`, (B, N).
            batch_size: texts per batch.
        """
        if not isinstance(texts, dict):
            if not isinstance(self.preprocessor, TextTokenizer):
                raise ValueError(
                    "Expected a dict of token_ids and padding_mask, or a model with a "
                    "TextTokenizer for its preprocessor; received: "
                    f"texts={texts!r}, preprocessor={self.preprocessor!r}"
                )
            texts = self.preprocessor(texts)
        # The dict of a pair also has images.
        texts = {k: x for k, x in texts.items() if k != "images"}
        self.backbone.check_modality("text", texts)
        return self._encode("text", texts, batch_size)

    def similarity(self, images: Any, texts: Any, batch_size: int = 32) -> np.ndarray:
        """Scaled similarities (B, C) of inputs or embeddings: the loss's logits.

        Args:
            images: as in `encode_images`, or embeddings (B, P).
            texts: as in `encode_text`, or embeddings (C, P).
            batch_size: images and texts per batch.
        """
        if len(getattr(images, "shape", ())) != 2:
            images = self.encode_images(images, batch_size)
        if len(getattr(texts, "shape", ())) != 2:
            texts = self.encode_text(texts, batch_size)
        logits = self.backbone.logit_scale.logits(images, texts)
        return keras.ops.convert_to_numpy(logits)

    def classify(
        self, images: Any, names: Sequence[str], top: int = 5, batch_size: int = 32
    ) -> list:
        """Returns which texts fit images best.

        Args:
            images: one or several images or paths, as in `encode_images`.
            names: texts such as "a photo of a cat".
            top: number of texts per image.
            batch_size: images and texts per batch.

        Returns:
            A list of `ClassProbability`, most probable first, for one image; a list of
            such lists for several. Probabilities are a softmax over the names, or
            sigmoids if similarities have a bias, as in SigLIP.

        Example:

        >>> from keras_moe.models import ContrastiveModel, LIMoEBackbone, TextTokenizer
        >>> names = ["a cat", "a dog"]
        >>> backbone = LIMoEBackbone(
        ...     image_shape=(8, 8, 3), patch_size=4, vocabulary_size=520, max_length=6,
        ...     hidden_dim=8, num_layers=1, num_heads=2, mlp_dim=16, projection_dim=4,
        ... )
        >>> tokenizer = TextTokenizer.trained(names, 520, max_length=6)
        >>> model = ContrastiveModel(backbone, tokenizer)
        >>> [[best]] = model.classify(np.zeros((1, 8, 8, 3)), names, top=1)
        >>> best.name in names
        True
        """
        top = check_integer("top", top)
        if isinstance(names, str) or not all(isinstance(x, str) for x in names):
            raise unfit("names to be a list of texts", names=names)
        if not len(names):
            raise unfit("at least one name", names=names)
        is_several = isinstance(images, (list, tuple, dict))
        # Pillow's images and paths have no shape; a 2-D array has embeddings.
        is_one = not is_several and len(getattr(images, "shape", ())) in (0, 3)
        logits = self.similarity(images, list(names), batch_size).astype("float64")
        independent = "logit_bias" in self.backbone.logit_scale.parameter_names
        found = most_probable(probabilities(logits, independent), names, top)
        return found[0] if is_one else found

    def _encode(self, modality, inputs, batch_size):
        batch_size = check_integer("batch_size", batch_size)
        encoder = self.backbone.encoder(modality)
        if has_no_examples(inputs):
            return outputs_of_none(encoder)
        number = len(keras.tree.flatten(inputs)[0])
        if number > batch_size and keras.distribution.distribution() is None:
            encoder = serving(encoder)
            return encoder.predict(inputs, batch_size=batch_size, verbose=0)
        # `keras.Model.predict` is slow for small batches and cannot read outputs that
        # are sharded over processes.
        size, outputs = min(number, batch_size), []
        for start in range(0, number, size):
            rows = slice(start, start + size)
            part: Any = keras.tree.map_structure(operator.itemgetter(rows), inputs)
            outputs.append(predict_batch(encoder, part, size))
        return np.concatenate(outputs)

    def get_config(self):
        preprocessor = self.image_preprocessor
        if preprocessor is not None:
            preprocessor = keras.saving.serialize_keras_object(preprocessor)
        return {**super().get_config(), "image_preprocessor": preprocessor}


def _hits(pairs, chunk_size):
    """Whether images and texts are correct, float32 (B,) each."""
    images, by_text = pairs.images, [pairs.texts, pairs.counted, *pairs.keys]
    none = ops.zeros_like(pairs.counted) + NEVER
    if chunk_size is None:
        own, other, of_texts = _compared(pairs, images, *by_text)
        return ops.cast(own > other, "float32"), of_texts
    chunks = Chunks(ops.shape(images)[0], chunk_size)
    by_text = [chunks.pad(x) for x in by_text]

    def step(number, carry):
        own, other, of_texts = carry
        part = (chunks.part(x, number) for x in by_text)
        part_own, part_other, part_of_texts = _compared(pairs, images, *part)
        return (
            ops.maximum(own, part_own),
            ops.maximum(other, part_other),
            chunks.put(of_texts, number, part_of_texts),
        )

    own, other, of_texts = ops.fori_loop(
        0, chunks.count, step, (none, none, chunks.zeros())
    )
    return ops.cast(own > other, "float32"), chunks.unpad(of_texts)


def _compared(pairs, images, texts, counted, *keys):
    """Returns the best own and other similarities, and which texts are correct."""
    similarity = ops.matmul(images, ops.transpose(texts))
    is_there = ops.logical_and(
        ops.expand_dims(pairs.counted > 0, 1), ops.expand_dims(counted > 0, 0)
    )
    positive = positives(pairs.keys, keys)
    own = ops.where(ops.logical_and(is_there, positive), similarity, NEVER)
    other = ops.where(
        ops.logical_and(is_there, ops.logical_not(positive)), similarity, NEVER
    )
    of_texts = ops.max(own, axis=0) > ops.max(other, axis=0)
    return (ops.max(own, axis=1), ops.max(other, axis=1), ops.cast(of_texts, "float32"))
