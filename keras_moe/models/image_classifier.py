"""Image classification with any image backbone.

Axes: B batch, N tokens, D hidden.
"""

import dataclasses
from typing import Any, NamedTuple

import keras
import keras_hub
import numpy as np

from keras_moe.checks import (
    argument_names,
    check_argument_names,
    check_bool,
    check_dropout,
    check_dtype,
    check_integer,
)
from keras_moe.layers import LayerNorm
from keras_moe.models.adaptation import new_head_dtype, quantized_head
from keras_moe.models.classifier_head import (
    backbone_arguments,
    check_backbone,
    check_head,
    check_output_activation,
    check_pooling,
    default_loss,
    default_metrics,
    dropout_layer,
    head_layer,
    loss_of_outputs,
    pooled_norm_layer,
    pooling_layer,
    predictions_layer,
)
from keras_moe.models.conversion import HEAD, POOLING
from keras_moe.models.copying import copied
from keras_moe.models.description import Part
from keras_moe.models.image_preprocessor import ImagePreprocessor
from keras_moe.models.input_checks import check_labels
from keras_moe.models.source import (
    ARCHITECTURE,
    PUBLISHED,
    SAVED,
    ModelSource,
    TaskConfig,
)
from keras_moe.models.task import MoETask
from keras_moe.ops import Cost, Routing
from keras_moe.ops.initializers import FastInitializer


class ClassProbability(NamedTuple):
    """A class with its probability.

    Attributes:
        name: name of the class, or its index as text without class names.
        probability: softmax, or sigmoid for multi-label models.
        index: index of the class.
    """

    name: str
    probability: float
    index: int


class ImageClassifier(MoETask, keras_hub.models.ImageClassifier):
    """A backbone with pooling and a classification head.

    Base class of `ViTImageClassifier` and `MixerImageClassifier`. It is compiled for
    integer classes or, with `multi_label=True`, for 0-1 vectors and a sigmoid loss
    summed over classes. `keras.Model(classifier.input, classifier.features)` extracts
    the pooled features (B, D) that the head reads.

    Args:
        backbone: `ViTBackbone` or `MixerBackbone`, depending on the subclass.
        num_classes: number of classes.
        preprocessor: an `ImagePreprocessor`, applied by `classify`; a
            `keras_hub.models.Preprocessor`, applied by `fit`, `evaluate` and `predict`;
            or another callable that you apply yourself.
        pooling: `"class_token"`, `"first"` (the first patch, if there is no class
            token), `"average"`, `"patch_average"` (without the class token) or `"map"`
            (attention pooling). Defaults to the class token, or the average without
            one.
        multi_label: whether an image can have several labels (sigmoid instead of
            softmax cross-entropy).
        representation_dim: size of a tanh layer between pooling and head, if any.
        head_bias: initial bias of the head: a number (V-MoE uses -10 on ImageNet-21k),
            or `"prior"` for -log(num_classes).
        output_activation: None for logits, `"softmax"` or `"sigmoid"`.
        dropout: dropout rate before the head.
        head_dtype: dtype policy of the head; defaults to the backbone's.
        pooled_norm: whether to normalise the pooled vector, for backbones without
            `final_norm`.
        head: `MuMoE` layer, or dict of its arguments (`units` defaults to
            `num_classes`), from which the layer "head" is created. None for a dense
            head only.
        head_position: `"final"` if `head` outputs the classes, `"penultimate"` if ReLU
            and the dense head follow it.
        pooling_query_key_norm: whether attention pooling normalises queries and keys.
            Defaults to the backbone's setting, as in V-MoE and Soft MoE; timm uses
            False.
        **kwargs: `name`, `trainable` and `compile`.

    Input shape:
        (B, height, width, channels), in [-1, 1].

    Output shape:
        (B, num_classes).

    Reference:
        *An Image is Worth 16x16 Words*; *Scaling Vision Transformers* (MAP head);
        *Multilinear Mixture of Experts*, section 4.1 (muMoE heads).

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from keras_moe import models
    >>> classifier = models.from_preset("vmoe_digits")
    >>> isinstance(classifier, models.ImageClassifier)
    True
    >>> extractor = keras.Model(classifier.input, classifier.features)
    >>> extractor.predict(np.zeros((1, 16, 16, 1)), verbose=0).shape
    (1, 64)
    """

    task_name = "image_classifier"
    pipeline_tag = "image-classification"

    @classmethod
    def config_from(
        cls, source: ModelSource, overrides: dict, backbone_config: dict
    ) -> TaskConfig:
        # `num_classes` means a new head: drop the arguments of the source's head.
        is_new = "num_classes" in overrides
        if not is_new and not source.is_trained:
            raise ValueError(
                f"Expected num_classes, since {source.name!r} carries no trained task; "
                "received: num_classes=None"
            )
        if not is_new and overrides.get("head") is not None:
            raise ValueError(
                "Expected num_classes beside a new head; received: "
                f"head={overrides['head']}"
            )
        config, new_weights = dict(source.task_config()), ()
        preprocessor = _preprocessor(source, config, backbone_config)
        if source.kind == ARCHITECTURE:
            config = _fitted(config, source, overrides, backbone_config)
        elif is_new:
            adapt = {SAVED: _new_head, PUBLISHED: _without_head}[source.kind]
            config, new_weights = adapt(config, overrides)
        config.update({"preprocessor": preprocessor, **overrides})
        if is_new and isinstance(config["preprocessor"], ImagePreprocessor):
            config["preprocessor"] = _renamed(config, source, overrides)
        return TaskConfig(config, new_weights)

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
        # The base constructor compiles and reads both, but Keras allows plain
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
        """Returns outputs and routing records for pooled features."""
        outputs, routing = self.output_dropout(features), dict(self.backbone.routing)
        if self.head is not None:
            outputs, record = self.head(outputs)
            # The only token is the pooled feature of the image.
            routing["head"] = Routing(*(keras.ops.expand_dims(x, 1) for x in record))
            if head_position == "penultimate":
                outputs = keras.ops.relu(outputs)
        return self.output_dense(outputs), routing

    @property
    def features(self) -> Any:
        """The symbolic features (B, D) that the head reads."""
        return super().features

    @property
    def routing(self) -> dict:
        """The symbolic `Routing` of each MoE block, by block name.

        A muMoE head's record is "head", (B, 1, E): its only token is the pooled
        feature.
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
        # The constructor checks it before there is a model.
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
        """Returns the most probable classes of images of any size.

        Args:
            images: one or several images, as in `ImagePreprocessor`.
            top: number of classes per image.
            batch_size: images per batch.
            max_value: pixel value of white, see `ImagePreprocessor`.

        Returns:
            A list of `ClassProbability`, most probable first, for one image (H, W, C)
            or (H, W); a list of such lists for several.
        """
        top = check_integer("top", top)
        batch_size = check_integer("batch_size", batch_size)
        if not isinstance(self.preprocessor, ImagePreprocessor):
            raise ValueError(
                "Expected a model with an ImagePreprocessor: set model.preprocessor = "
                "keras_moe.models.ImagePreprocessor(model.input_shape[1:]); received: "
                f"preprocessor={self.preprocessor!r}"
            )
        self.preprocessor.check_model(self.input_shape[1:], self.num_classes)
        prepared = self.preprocessor(images, max_value)
        if prepared.ndim == 3:
            return self._classes(prepared[None], top, 1)[0]
        return self._classes(prepared, top, batch_size)

    def _classes(self, prepared, top, batch_size):
        if not len(prepared):
            return []
        outputs = self.predict(prepared, batch_size=batch_size, verbose=0)
        names = self.preprocessor.class_names
        results = []
        for row in self._probabilities(outputs.astype("float64")):
            # Stable sort: on ties the lower index comes first.
            order = np.argsort(-row, kind="stable")[:top].tolist()
            results.append(
                [
                    ClassProbability(names[i] if names else str(i), float(row[i]), i)
                    for i in order
                ]
            )
        return results

    def _probabilities(self, outputs):
        if self.output_activation is not None:
            return outputs
        if self.multi_label:
            # Sigmoid that does not overflow.
            return 0.5 * (1.0 + np.tanh(0.5 * outputs))
        outputs = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
        return outputs / outputs.sum(axis=-1, keepdims=True)

    def outputs_from_head(self, head_outputs: Any) -> Any:
        """Maps a muMoE head's outputs (B, units) to the model's, at inference."""
        if self.head_position == "penultimate":
            head_outputs = keras.ops.relu(head_outputs)
        return self.output_dense(head_outputs)

    def with_logit_offsets(self, output: int, offsets: Any) -> "ImageClassifier":
        """Returns a copy whose final muMoE head offsets one logit per expert.

            logit[output] + sum over n of a_n offsets[n]

        where a_n is the coefficient of expert n (*Multilinear Mixture of Experts*,
        equation 5). Repeated edits of an output add up. The copy's optimizer is fresh.

        Args:
            output: index of the class.
            offsets: (E,), one number per expert.
        """
        head = self.head
        if head is None or self.head_position != "final":
            raise ValueError(
                "Expected a classifier with head=MuMoE(...) as its final layer; "
                f"received: head={head}, head_position={self.head_position!r}"
            )
        output = check_integer("output", output, 0)
        experts = head.gate.expert_types.total
        offsets = np.asarray(offsets, "float32")
        if output >= self.num_classes or offsets.shape != (experts,):
            raise ValueError(
                f"Expected an output below {self.num_classes} and offsets of shape "
                f"({experts},); received: output={output}, shape={offsets.shape}"
            )
        if not np.isfinite(offsets).all():
            raise ValueError(f"Expected finite offsets; received: {offsets}")
        before = head.edited_outputs
        outputs = before if output in before else (*before, output)
        config = self.get_config()
        config["head"]["config"]["edited_outputs"] = outputs
        edited = copied(self, config, without="logit_offsets")
        table = np.zeros((experts, len(outputs)), "float32")
        if before:
            table[:, : len(before)] = keras.ops.convert_to_numpy(head.logit_offsets)
        table[:, outputs.index(output)] += offsets
        edited.head.logit_offsets.assign(table)
        return edited

    def compile(
        self,
        optimizer: Any = "auto",
        loss: Any = "auto",
        *,
        metrics: Any = "auto",
        **kwargs,
    ) -> None:
        """Configures training; see `MoETask.compile` for `"auto"`.

        Keras's crossentropies given by name, such as `"categorical_crossentropy"` for
        one-hot labels, read logits unless the model has an output activation.
        """
        loss = loss_of_outputs(loss, self.output_activation is None)
        super().compile(optimizer, loss, metrics=metrics, **kwargs)

    def default_loss(self) -> keras.losses.Loss:
        """Returns softmax cross-entropy, or `SigmoidCrossentropy` if `multi_label`."""
        return default_loss(self.multi_label, self.output_activation is None)

    def default_metrics(self, loss: Any) -> list:
        """Returns accuracy, or area under precision-recall if `multi_label`."""
        classes, from_logits = self.output_shape[-1], self.output_activation is None
        return default_metrics(loss, self.multi_label, classes, from_logits)

    def check_labels(self, labels: Any) -> None:
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
            cost = Cost.of_dense(dim, representation_dim)
            parts.append(Part("pre_logits", "dense", *cost))
            dim = representation_dim
        head = check_head(head, head_position, num_classes, 0.0)
        if head is not None:
            parts.append(Part("head", "muMoE", *head.cost((1, dim))))
            dim = head.units
            if head_position == "final":
                return parts
        parts.append(Part("predictions", "dense", *Cost.of_dense(dim, num_classes)))
        return parts


def _preprocessor(source, config, backbone_config):
    """Returns the source's preprocessor at the model's size, or the default."""
    shape = backbone_config["image_shape"]
    if "preprocessor" not in config:
        return ImagePreprocessor(shape, class_names=source.class_names)
    preprocessor = config["preprocessor"]
    if isinstance(preprocessor, ImagePreprocessor):
        return preprocessor.adapted(shape)
    return preprocessor


def _renamed(config, source, overrides):
    """Drops class names that do not belong to the new head."""
    preprocessor = config["preprocessor"]
    if "preprocessor" in overrides:
        return preprocessor
    if source.kind == SAVED:
        # Other classes, even if there are as many.
        return dataclasses.replace(preprocessor, class_names=None)
    return preprocessor.adapted(num_classes=config["num_classes"])


def _fitted(config, source, overrides, backbone_config):
    """Adapts a preset's head arguments to overrides.

    A representation layer as wide as the backbone follows its width; it and V-MoE's
    head bias are dropped if a final muMoE replaces the dense head.
    """
    config = dict(config)
    hidden_dim = source.config.get("hidden_dim")
    if config.get("representation_dim") == hidden_dim:
        config["representation_dim"] = backbone_config.get("hidden_dim")
    if overrides.get("head") and overrides.get("head_position", "final") == "final":
        # Its experts have biases.
        config.pop("head_bias", None)
        config.pop("representation_dim", None)
    return config


def _new_head(config, overrides):
    """Adapts a saved task's arguments to a head with other classes."""
    config = dict(config)
    # A quantised head's policies do not apply to a new head.
    config["head_dtype"] = new_head_dtype(config.get("head_dtype"))
    if config.get("head") and config.get("head_position") == "final":
        # The number of units follows the classes, and old edits do not apply.
        head = config["head"]
        units = {"units": overrides["num_classes"], "edited_outputs": ()}
        config["head"] = {**head, "config": {**head["config"], **units}}
    return config, (*HEAD, *POOLING)


def _without_head(config, overrides):
    """Returns published arguments for a new head, keeping the pooling if possible."""
    config, new_weights = dict(config), HEAD
    config.pop("representation_dim", None)
    theirs = config.get("pooling")
    if overrides.get("pooling", theirs) != theirs or "pooled_norm" in overrides:
        new_weights = (*HEAD, *POOLING)
        config.pop("pooled_norm", None)
    return config, new_weights
