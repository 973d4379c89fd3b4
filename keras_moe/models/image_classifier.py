"""Image classification on any backbone.

Axes: B batch, N tokens, D hidden.
"""

from typing import Any

import keras
import keras_hub

from keras_moe.checks import (
    argument_names,
    check_argument_names,
    check_bool,
    check_dropout,
    check_dtype,
    check_integer,
)
from keras_moe.layers import LayerNorm
from keras_moe.models import classifying, head_editing
from keras_moe.models.classifier_config import classifier_config
from keras_moe.models.classifier_parts import (
    backbone_arguments,
    check_backbone,
    check_head,
    check_output_activation,
    check_pooling,
    dropout_layer,
    head_layer,
    pooled_norm_layer,
    pooling_layer,
    predictions_layer,
)
from keras_moe.models.compile_defaults import (
    default_loss,
    default_metrics,
    loss_of_outputs,
)
from keras_moe.models.description import Part
from keras_moe.models.image_preprocessor import ImagePreprocessor
from keras_moe.models.input_checks import check_labels
from keras_moe.models.model_sources import ModelSource, TaskConfig
from keras_moe.models.quantization import quantized_head
from keras_moe.models.task import MoETask
from keras_moe.ops import Cost, Routing
from keras_moe.ops.initializers import FastInitializer


class ImageClassifier(MoETask, keras_hub.models.ImageClassifier):
    """A backbone with pooling and a classification head.

    This is the base of `ViTImageClassifier` and `MixerImageClassifier`.

    It is compiled with defaults for its kind of labels: integer classes, or with
    `multi_label=True` a 0-1 vector per image and a sigmoid loss summed over classes.
    `classifier.features` is the symbolic pooled feature (B, D) that the head reads:
    `keras.Model(classifier.input, classifier.features)` extracts features.

    Args:
        backbone: a `ViTBackbone` or `MixerBackbone`, as the subclass says.
        num_classes: number of classes.
        preprocessor: an `ImagePreprocessor`, which `classify` applies; or a
            `keras_hub.models.Preprocessor`, which `fit`, `evaluate` and `predict`
            apply; or another layer or callable on images, which is applied where it
            is called alone; or None.
        pooling: `"class_token"`, `"first"` (the first patch's token, of a backbone
            without a class token), `"average"`, `"patch_average"` (without the class
            token) or `"map"` (attention pooling); None takes the class token if there
            is one, else the average.
        multi_label: whether an image may have several labels: a sigmoid instead of a
            softmax cross-entropy.
        representation_dim: size of a tanh layer between pooling and head, or None.
        head_bias: initial bias of the head: a number (V-MoE uses -10 on
            ImageNet-21k), or `"prior"` for -log(num_classes).
        output_activation: activation of the outputs: None for logits, `"softmax"` or
            `"sigmoid"`.
        dropout: dropout rate before the head.
        head_dtype: dtype policy of the head; None takes the backbone's.
        pooled_norm: whether the pooled vector is normalised, for a backbone without
            `final_norm`.
        head: a `MuMoE` layer in the place of the dense head, or before it, or a dict
            of such a layer's arguments, whose `units` default to the classes; None has
            the dense head alone. The classifier makes a layer of the same arguments,
            called "head", with the dtype policy of heads.
        head_position: `"final"`, where the head's units are the classes; or
            `"penultimate"`, where ReLU and the dense head follow.
        pooling_query_key_norm: whether attention pooling normalises queries and keys;
            None does so where the backbone does, as in V-MoE and Soft MoE; False is
            timm's.
        **kwargs: arguments of `keras_hub.models.ImageClassifier`.

    Input shape:
        (B, height, width, channels), in [-1, 1].

    Output shape:
        (B, num_classes).

    Raises:
        ValueError: if an argument is out of range or arguments do not fit together.

    Reference:
        *An Image is Worth 16x16 Words*; *Scaling Vision Transformers* (MAP head);
        *Multilinear Mixture of Experts*, section 4.1 (muMoE heads).

    Example:

    >>> from keras_moe.models import ImageClassifier, ViTImageClassifier
    >>> issubclass(ViTImageClassifier, ImageClassifier)
    True
    """

    task_name = "image_classifier"
    pipeline_tag = "image-classification"

    @classmethod
    def config_from(
        cls, source: ModelSource, overrides: dict, backbone_config: dict
    ) -> TaskConfig:
        """See `classifier_config`."""
        return classifier_config(source, overrides, backbone_config)

    def __init__(
        self,
        backbone: Any,
        num_classes: int,
        preprocessor: Any = None,
        pooling: str | None = None,
        multi_label: bool = False,
        representation_dim: int | None = None,
        head_bias: Any = 0.0,
        output_activation: str | None = None,
        dropout: float = 0.0,
        head_dtype: Any = None,
        pooled_norm: bool = False,
        head: Any = None,
        head_position: str = "final",
        pooling_query_key_norm: bool | None = None,
        **kwargs,
    ):
        num_classes = check_integer("num_classes", num_classes)
        if representation_dim is not None:
            check_integer("representation_dim", representation_dim)
        check_dropout("dropout", dropout)
        check_argument_names(
            kwargs,
            ["name", "trainable", "compile"],
            type(self).__name__,
            argument_names(ImageClassifier),
        )
        check_output_activation(output_activation, multi_label)
        check_backbone(backbone, self.backbone_cls)
        check_bool("multi_label", multi_label)
        backbone_config = backbone_arguments(backbone)
        policy = check_dtype("head_dtype", head_dtype) or backbone.dtype_policy
        pooling = check_pooling(pooling, backbone.class_token)
        if isinstance(preprocessor, ImagePreprocessor):
            preprocessor.check_model(backbone_config["image_shape"], num_classes)
        head = check_head(head, head_position, num_classes, head_bias)

        # === Layers ===
        self.backbone = backbone
        self.preprocessor = preprocessor
        self.pooler = pooling_layer(
            backbone_config, pooling, pooling_query_key_norm, dtype=policy
        )
        self.pooled_normalization = pooled_norm_layer(
            backbone_config, pooled_norm, dtype=policy
        )
        self.output_dropout = dropout_layer(backbone_config, dropout, dtype=policy)
        self.head = head_layer(head, dtype=policy)
        self.output_dense = predictions_layer(
            num_classes,
            output_activation,
            head_bias,
            is_dense=head is None or head_position == "penultimate",
            dtype=policy,
        )

        # === Functional model ===
        inputs = self.backbone.input
        features = self.pooler(self.backbone(inputs))
        if self.pooled_normalization is not None:
            features = self.pooled_normalization(features)
        if representation_dim is not None:
            self.representation = keras.layers.Dense(
                representation_dim,
                activation="tanh",
                kernel_initializer=FastInitializer("glorot_uniform"),
                dtype=policy,
                name="pre_logits",
            )
            features = self.representation(features)
        outputs, routing = self._classified(features, head_position)
        # The constructor compiles, and reads both: Keras lets a model have plain
        # attributes only after it.
        object.__setattr__(self, "multi_label", multi_label)
        object.__setattr__(self, "output_activation", output_activation)
        super().__init__(inputs, outputs, features, routing, **kwargs)

        # === Config ===
        self.num_classes = num_classes
        self.pooling = pooling
        self.pooling_query_key_norm = pooling_query_key_norm
        self.pooled_norm = pooled_norm
        self.representation_dim = representation_dim
        self.head_bias = head_bias
        self.dropout = dropout
        self.head_dtype = head_dtype
        self.head_position = head_position

    def _classified(self, features, head_position):
        """The outputs for pooled features, and the model's records of routing."""
        outputs, routing = self.output_dropout(features), dict(self.backbone.routing)
        if self.head is not None:
            outputs, record = self.head(outputs)
            # The pooled feature is an image's only token.
            routing["head"] = Routing(*(keras.ops.expand_dims(x, 1) for x in record))
            if head_position == "penultimate":
                outputs = keras.ops.relu(outputs)
        return self.output_dense(outputs), routing

    @property
    def features(self) -> Any:
        """The symbolic feature (B, D) that the head reads."""
        return super().features

    @property
    def routing(self) -> dict:
        """The symbolic `Routing` of each MoE block, by the block's name.

        A muMoE head's is "head": (B, 1, E), with the image's feature as its token.
        """
        return super().routing

    @property
    def preprocessor(self) -> Any:
        """An `ImagePreprocessor`, which `classify` applies, or another, or None."""
        return super().preprocessor

    @preprocessor.setter
    def preprocessor(self, value: Any) -> None:
        known = value is None or isinstance(value, ImagePreprocessor) or callable(value)
        if not known:
            raise ValueError(
                "Expected preprocessor to be an ImagePreprocessor, a layer or None; "
                f"received: preprocessor={value!r}"
            )
        # The constructor checks its own before there is a model.
        if isinstance(value, ImagePreprocessor) and hasattr(self, "num_classes"):
            value.check_model(self.input_shape[1:], self.num_classes)
        keras_hub.models.Task.preprocessor.fset(self, value)

    def classify(
        self,
        images: Any,
        top: int = 5,
        batch_size: int = 32,
        max_value: float | None = None,
    ) -> list:
        """The most probable classes of images of any size.

        The model's `preprocessor` prepares the images.

        Args:
            images: uint8 or other images, one or several, as `ImagePreprocessor` takes
                them.
            top: number of classes for each image.
            batch_size: images per batch.
            max_value: the value of white, see `ImagePreprocessor`.

        Returns:
            For each image a list of `ClassProbability`, the most probable first; for
            one image (H, W, C) or (H, W) its list alone.

        Raises:
            ValueError: if the model has no `ImagePreprocessor`, or the images or
                another argument do not fit.
        """
        return classifying.classify(self, images, top, batch_size, max_value)

    def outputs_from_head(self, head_outputs: Any) -> Any:
        """From the outputs of the muMoE head to those of the model, at inference.

        Args:
            head_outputs: (B, units) of `classifier.head`.

        Returns:
            (B, num_classes).
        """
        if self.head_position == "penultimate":
            head_outputs = keras.ops.relu(head_outputs)
        return self.output_dense(head_outputs)

    def with_logit_offsets(self, output: int, offsets: Any) -> "ImageClassifier":
        """A new model whose final muMoE head adds to one output's logits.

        `logit[output] + sum over n of a_n offsets[n]`; offsets of earlier edits of the
        same output are added to. This model stays as it is. The new one is compiled as
        this one is, with an optimizer that starts afresh.

        Args:
            output: index of the class.
            offsets: (E,), a number for each expert.

        Returns:
            A model of the same class.

        Raises:
            ValueError: if the model has no final muMoE head, or an argument does not
                fit it.

        Reference:
            *Multilinear Mixture of Experts*, equation 5.
        """
        return head_editing.with_logit_offsets(self, output, offsets)

    def compile(
        self,
        optimizer: Any = "auto",
        loss: Any = "auto",
        *,
        metrics: Any = "auto",
        **kwargs,
    ) -> None:
        """Configures training, with defaults for this task.

        Args:
            optimizer: `"auto"` is AdamW at 3e-4 with weight decay 1e-4 and gradients
                clipped to global norm 1 (not with half-precision weights).
            loss: `"auto"` is softmax cross-entropy on integer labels, or
                `SigmoidCrossentropy` with `multi_label`. Keras's crossentropies by
                name, such as `"categorical_crossentropy"` on one-hot labels, take
                the outputs as logits, unless the model has an output activation.
            metrics: `"auto"` is the accuracy, of integer or one-hot labels as the loss
                takes them, or with `multi_label` the area under the precision-recall
                curve of all decisions.
            **kwargs: arguments of `keras.Model.compile`.
        """
        loss = loss_of_outputs(loss, self.output_activation is None)
        super().compile(optimizer, loss, metrics=metrics, **kwargs)

    def default_loss(self) -> keras.losses.Loss:
        """The crossentropy for the model's kind of labels and outputs."""
        return default_loss(self.multi_label, self.output_activation is None)

    def default_metrics(self, loss: Any) -> list:
        """The accuracy, or the area under the precision-recall curve.

        Args:
            loss: loss that the model is trained with.
        """
        classes, from_logits = self.output_shape[-1], self.output_activation is None
        return default_metrics(loss, self.multi_label, classes, from_logits)

    def check_labels(self, labels: Any) -> None:
        """Raises ValueError for labels out of range, where the loss implies their kind.

        Args:
            labels: labels of `fit` or `evaluate`.
        """
        check_labels(labels, self.num_classes, getattr(self, "loss", None))

    def get_config(self):
        config = super().get_config()
        config.update(
            num_classes=self.num_classes,
            pooling=self.pooling,
            pooling_query_key_norm=self.pooling_query_key_norm,
            pooled_norm=self.pooled_norm,
            multi_label=self.multi_label,
            representation_dim=self.representation_dim,
            head_bias=self.head_bias,
            output_activation=self.output_activation,
            dropout=self.dropout,
            head_dtype=quantized_head(self, self.head_dtype),
            head=self.head and keras.saving.serialize_keras_object(self.head),
            head_position=self.head_position,
        )
        return config

    @staticmethod
    def describe_parts(
        backbone_config: dict,
        num_tokens: int,
        dim: int,
        num_classes: int,
        pooling: str | None = None,
        representation_dim: int | None = None,
        pooled_norm: bool = False,
        head: Any = None,
        head_position: str = "final",
        pooling_query_key_norm: bool | None = None,
        **_,
    ) -> list[Part]:
        """The parts that the task adds to its backbone, with their costs."""
        check_integer("num_classes", num_classes)
        pooling = check_pooling(pooling, backbone_config.get("class_token", True))
        pooler = pooling_layer(
            backbone_config, pooling, pooling_query_key_norm, dtype="float32"
        )
        parts = []
        cost = pooler.cost((num_tokens, dim))
        if cost.parameters:
            parts.append(Part("pooler", "MAP", *cost))
        if pooled_norm:
            parts.append(Part("pooled_norm", "norm", *LayerNorm().cost((1, dim))))
        if representation_dim is not None:
            cost = _dense_cost(dim, representation_dim)
            parts.append(Part("pre_logits", "dense", *cost))
            dim = representation_dim
        head = check_head(head, head_position, num_classes, 0.0)
        if head is not None:
            parts.append(Part("head", "muMoE", *head.cost((1, dim))))
            dim = head.units
            if head_position == "final":
                return parts
        parts.append(Part("predictions", "dense", *_dense_cost(dim, num_classes)))
        return parts


def _dense_cost(inputs, units):
    """The cost of a dense layer for one vector."""
    shapes = {"kernel": (inputs, units), "bias": (units,)}
    return Cost.all_active(shapes, 2 * inputs * units)
