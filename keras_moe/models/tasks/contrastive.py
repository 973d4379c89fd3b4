"""Contrastive image-text training, encoding and similarity.

Axes: B images, C texts, N tokens, P embedding.
"""

import operator
from typing import Any

import keras
import keras_hub
import numpy as np

from keras_moe._checks import argument_names, check_argument_names, check_integer
from keras_moe._compat import (
    LossFunctionWrapper,
    mark_loss_as_built,
    serving,
    track_loss_by,
)
from keras_moe._processes import predict_batch
from keras_moe.losses import (
    ContrastiveLoss,
    SigmoidContrastiveLoss,
    SoftmaxContrastiveLoss,
)
from keras_moe.losses.contrastive import IDS, mean_over_pairs
from keras_moe.models.backbones._pairs import MODALITIES, PairBackbone
from keras_moe.models.base._input_checks import (
    check_input_names,
    has_no_examples,
    outputs_of_none,
)
from keras_moe.models.loading.blueprint import ModelSource, TaskConfig
from keras_moe.models.preprocessing.images import (
    ImagePreprocessor,
    checked_preprocessor,
)
from keras_moe.models.preprocessing.tokenizer import TextTokenizer
from keras_moe.models.registry import register_task
from keras_moe.models.tasks.base import MoETask, check_backbone, without_large_tokenizer
from keras_moe.models.tasks.contrastive_metrics import (
    WeightedLoss,
    check_metrics,
    one_weight,
    weighable_labels,
)


@register_task
@keras.saving.register_keras_serializable("keras_moe")
class ContrastiveModel(MoETask, keras_hub.models.Task):
    """A contrastive image-text model on any image-text backbone.

    `fit` takes unlabelled pairs: a dict of `"images"`, `"token_ids"` and
    `"padding_mask"`. Pairs that share an image or caption count as negatives unless `y`
    is a dict of `"image_ids"` or `"text_ids"` and the loss has `multi_positive=True`.
    Give padding pairs of a last batch a `sample_weight` of 0.

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

    >>> import numpy as np
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
    has_head = False
    has_metrics = False
    _metrics_of_pairs, _weighted_loss = (), None  # until compiled
    backbone_cls = PairBackbone

    def __init__(
        self,
        backbone: PairBackbone,
        preprocessor: TextTokenizer | None = None,
        image_preprocessor: ImagePreprocessor | None = None,
        **kwargs,
    ):
        names, owner = ["name", "trainable", "compile"], type(self).__name__
        check_argument_names(kwargs, names, owner, argument_names(ContrastiveModel))
        check_backbone(backbone, PairBackbone)
        if isinstance(preprocessor, TextTokenizer) and preprocessor.has_vocabulary:
            preprocessor.check_fits(backbone)
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
            shape = image["image_shape"]
            config["image_preprocessor"] = config["image_preprocessor"].adapted(shape)
        return TaskConfig(
            {**without_large_tokenizer(source, config, text), **overrides}
        )

    def default_loss(self) -> ContrastiveLoss:
        """Returns the sigmoid loss if similarities have a bias, else softmax."""
        if "logit_bias" in self.backbone.logit_scale.parameter_names:
            return SigmoidContrastiveLoss()
        return SoftmaxContrastiveLoss()

    def compile(
        self,
        optimizer: Any = "auto",
        loss: Any = "auto",
        *,
        metrics: Any = "auto",
        **kwargs,
    ) -> None:
        """Configures training; see `MoETask.compile`.

        `loss` is a `keras_moe.losses.ContrastiveLoss`, or any Keras loss or function
        of `(y_true, y_pred)`: the ids or None, and the dict of outputs with
        `"logit_scale"`. It returns a scalar or a loss for each pair, (B,). `metrics`
        and `weighted_metrics` read the output dict, like `ContrastiveAccuracy`;
        `"auto"` means none.
        """
        if isinstance(loss, str) and loss == "auto":
            loss = self.default_loss()
        is_for_tensors = isinstance(loss, LossFunctionWrapper)
        if not callable(loss) or isinstance(loss, type) or is_for_tensors:
            raise ValueError(
                "Expected a loss of (y_true, y_pred), whose y_pred is a dict of "
                "embeddings, such as SoftmaxContrastiveLoss(); received: "
                f"loss={loss!r}"
            )
        if getattr(loss, "reduction", None) == "sum":
            raise ValueError(
                "Expected a loss that is averaged over pairs; received: reduction='sum'"
            )
        names = self.backbone.logit_scale.parameter_names
        wanted = getattr(loss, "parameters", ())
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(
                "Expected a model with all that the loss reads, such as "
                f"temperature='siglip'; received: {type(loss).__name__} for a model "
                f"without {missing}"
            )
        if isinstance(metrics, str) and metrics == "auto":
            metrics = self.default_metrics(loss)
        # Contrastive metrics all use sample weights, so both arguments mean the same.
        weighted = kwargs.pop("weighted_metrics", None)
        metrics = check_metrics(metrics) + check_metrics(weighted)
        # Bypass attribute tracking: metrics are not part of the weights.
        object.__setattr__(self, "_metrics_of_pairs", tuple(metrics))
        super().compile(optimizer, loss, metrics=None, **kwargs)
        mark_loss_as_built(self)
        object.__setattr__(self, "_weighted_loss", WeightedLoss(name="loss"))
        track_loss_by(self, self._weighted_loss)

    def _check_inputs(self, inputs, labels=None):
        self.backbone._check_inputs(inputs)
        if labels is not None and not (
            isinstance(labels, dict) and {*labels} <= {*IDS}
        ):
            raise ValueError(
                f"Expected y to be None or a dict of ids among {list(IDS)}; received: "
                f"y of {type(labels).__name__}"
            )

    def _labels(self, inputs, labels, sample_weight):
        return weighable_labels(inputs, labels, sample_weight)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        # The first place that sees batches of datasets.
        if isinstance(inputs, dict):
            check_input_names(inputs, tuple(self.input))
        return super().call(inputs, training=training, mask=mask)

    def get_layer(self, name: str | None = None, index: int | None = None) -> Any:
        if "/" in str(name):
            return self.backbone.get_layer(name)
        return super().get_layer(name, index)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the contrastive loss of a batch plus auxiliary losses."""
        outputs = {**y_pred, **self.backbone.logit_scale.parameters()}
        weight = one_weight(sample_weight)
        if isinstance(self.loss, ContrastiveLoss):
            loss = self.loss(y, outputs, weight)
        else:
            is_keras_loss = isinstance(self.loss, keras.losses.Loss)
            function = self.loss.call if is_keras_loss else self.loss
            loss = mean_over_pairs(function(y, outputs), weight)
        return sum(self.losses, loss)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [*super().metrics, *self._metrics_of_pairs]

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        weights = one_weight(sample_weight)
        self._weighted_loss.weigh(weights)
        for metric in self._metrics_of_pairs:
            metric.update_state(y, y_pred, weights)
        return self.get_metrics_result()

    def get_compile_config(self) -> dict[str, Any]:
        config = super().get_compile_config()
        if not config:
            return {}
        metrics = [
            keras.saving.serialize_keras_object(x) for x in self._metrics_of_pairs
        ]
        # All of them use sample weights.
        return {**config, "metrics": None, "weighted_metrics": metrics}

    def encode_images(
        self, images: Any, batch_size: int = 32, verbose: Any = 0
    ) -> np.ndarray:
        """Embeds images as float32 unit vectors (B, P).

        Args:
            images: images (B, height, width, channels) in the model's format; or, with
                an `image_preprocessor`, images of any size (floats of the model's size
                count as preprocessed).
            batch_size: images per batch.
            verbose: 1 shows progress.
        """
        shape = tuple(getattr(images, "shape", ()))
        # Integer pixels are raw.
        is_raw = "int" in str(getattr(images, "dtype", ""))
        is_prepared = shape[1:] == tuple(self.backbone.image_shape) and not is_raw
        if self.image_preprocessor is not None and not is_prepared:
            images = self.image_preprocessor(images)
            images = images if images.ndim == 4 else images[None]
        if images is None or not hasattr(images, "shape"):
            raise ValueError(
                "Expected an array of images (batch, height, width, channels), or a "
                f"model with an image_preprocessor; received: {type(images).__name__}"
            )
        self.backbone.check_modality("image", images)
        return self._encode("image", images, batch_size, verbose)

    def encode_text(
        self, texts: Any, batch_size: int = 32, verbose: Any = 0
    ) -> np.ndarray:
        """Embeds texts as float32 unit vectors (B, P).

        Args:
            texts: captions, or a dict of `"token_ids"` and `"padding_mask"`, (B, N).
            batch_size: texts per batch.
            verbose: 1 shows progress.
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
        return self._encode("text", texts, batch_size, verbose)

    def similarity(self, images: Any, texts: Any, batch_size: int = 32) -> np.ndarray:
        """Scaled similarities (B, C) of inputs or embeddings: the loss's logits."""
        if len(getattr(images, "shape", ())) != 2:
            images = self.encode_images(images, batch_size)
        if len(getattr(texts, "shape", ())) != 2:
            texts = self.encode_text(texts, batch_size)
        logits = self.backbone.logit_scale.logits(images, texts)
        return keras.ops.convert_to_numpy(logits)

    def _encode(self, modality, inputs, batch_size, verbose):
        batch_size = check_integer("batch_size", batch_size)
        encoder = self.backbone.encoder(modality)
        if has_no_examples(inputs):
            return outputs_of_none(encoder)
        number = len(keras.tree.flatten(inputs)[0])
        if number > batch_size and keras.distribution.distribution() is None:
            encoder = serving(encoder)
            return encoder.predict(inputs, batch_size=batch_size, verbose=verbose)
        # `keras.Model.predict` is slow for small batches and cannot read outputs that
        # are sharded over processes.
        size, outputs = min(number, batch_size), []
        for start in range(0, number, size):
            rows = slice(start, start + size)
            part = keras.tree.map_structure(operator.itemgetter(rows), inputs)
            outputs.append(predict_batch(encoder, part, size))
        return np.concatenate(outputs)

    def get_config(self):
        preprocessor = self.image_preprocessor
        if preprocessor is not None:
            preprocessor = keras.saving.serialize_keras_object(preprocessor)
        return {**super().get_config(), "image_preprocessor": preprocessor}
