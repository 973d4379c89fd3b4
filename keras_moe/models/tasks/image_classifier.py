"""Image classification with any image backbone. Axes: B batch, N tokens, D hidden."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import keras_hub
import numpy as np

from keras_moe import _checks
from keras_moe._types import DType, Tensor
from keras_moe.layers.moe_config import moe_config
from keras_moe.layers.pooling import check_pooling
from keras_moe.losses import SigmoidCrossentropy, SparseSigmoidCrossentropy
from keras_moe.models import registry
from keras_moe.models.backbones.base import ImageBackbone
from keras_moe.models.backbones.mixer import MixerBackbone
from keras_moe.models.backbones.tower import layer_cost
from keras_moe.models.backbones.vit import ViTBackbone
from keras_moe.models.base._copying import copied
from keras_moe.models.base._input_checks import check_labels
from keras_moe.models.base._model import HubClassifier
from keras_moe.models.conversion import HEAD, POOLING
from keras_moe.models.loading._sources import PUBLISHED, SAVED, ModelSource, TaskConfig
from keras_moe.models.loading.blueprint import Part
from keras_moe.models.preprocessing.images import ImagePreprocessor
from keras_moe.models.preprocessing.patches import budget
from keras_moe.models.registry import register_task
from keras_moe.models.saving._lora import TRAINING, new_head_dtype, quantized_head
from keras_moe.models.tasks import _head
from keras_moe.models.tasks.base import MoETask, check_task
from keras_moe.ops import Routing
from keras_moe.ops._initializers import initial_values

_SPARSE = keras.losses.SparseCategoricalCrossentropy
# Kinds of the parts of a head, by the names of its layers.
_KINDS = {
    "pooler": "MAP",
    "pooled_norm": "norm",
    "pre_logits": "dense",
    "head": "muMoE",
    "predictions": "dense",
}


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


def probabilities(logits: np.ndarray, independent: bool) -> np.ndarray:
    """The softmax of logits (B, C), or the sigmoid of independent ones."""
    if independent:
        # Sigmoid that does not overflow.
        return 0.5 * (1.0 + np.tanh(0.5 * logits))
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def most_probable(
    rows: np.ndarray, names: Sequence[str] | None, top: int
) -> list[list[ClassProbability]]:
    """The classes of largest probability in each row (B, C), by their names if any."""
    names = names or [str(i) for i in range(rows.shape[1])]
    # Stable sort: on ties the lower index comes first.
    orders = np.argsort(-rows, axis=-1, kind="stable")[:, :top].tolist()
    return [
        [ClassProbability(names[int(i)], float(x[i]), i) for i in order]
        for x, order in zip(rows, orders)
    ]


class ImageClassifier(MoETask, HubClassifier):
    """A backbone with pooling and a classification head.

    Base class of `ViTImageClassifier` and `MixerImageClassifier`, compiled for integer
    classes or, with `multi_label=True`, for 0-1 vectors and a sigmoid loss summed over
    classes. `features` are the pooled features (B, D) that the head reads.

    Args:
        backbone: `ViTBackbone` or `MixerBackbone`, depending on the subclass.
        num_classes: number of classes.
        preprocessor: an `ImagePreprocessor`, applied by `classify`; a
            `keras_hub.models.Preprocessor`, applied by `fit`, `evaluate` and `predict`;
            or another callable that you apply yourself.
        pooling: `"class_token"`, `"first"` (the first patch, if there is no class
            token), `"average"`, `"patch_average"` (without the class token) or `"map"`
            (attention pooling). Defaults to the class token if any, else the average.
        multi_label: whether an image can have several labels.
        representation_dim: size of a tanh layer between pooling and head, if any.
        head_bias: initial bias of the dense head: a number (V-MoE uses -10 on
            ImageNet-21k), or `"prior"` for -log(num_classes).
        output_activation: None for logits, `"softmax"` or `"sigmoid"`. In `compile`,
            crossentropies given by name read logits unless there is one.
        dropout: dropout rate before the head.
        head_dtype: dtype policy of the head; defaults to the backbone's.
        pooled_norm: whether to normalise the pooled vector, for backbones without
            `final_norm`.
        head: `MuMoE` layer, or dict of its arguments (`units` defaults to
            `num_classes`). None for a dense head only.
        head_position: `"final"` if `head` outputs the classes, `"penultimate"` if ReLU
            and the dense head follow it.
        pooling_query_key_norm: whether attention pooling normalises queries and keys.
            Defaults to the backbone's setting; timm uses False.
        **kwargs: `name`, `trainable` and `compile`.

    Input shape: (B, height, width, channels), in [-1, 1].

    Output shape: (B, num_classes). With a backbone of `ensemble_size=M` the members'
    mean probabilities, or logits of these, and `features` are means, too; in training
    (B, M, num_classes), since `fit` minimises the mean loss of the members.

    Reference: *An Image is Worth 16x16 Words*; *Scaling Vision Transformers* (MAP
    head); *Multilinear Mixture of Experts*, section 4.1 (muMoE heads).

    Example:

    >>> import keras
    >>> from keras_moe import models
    >>> classifier = models.from_preset("vmoe_digits")
    >>> isinstance(classifier, models.ImageClassifier)
    True
    >>> extractor = keras.Model(classifier.input, classifier.features)
    >>> extractor.predict(np.zeros((1, 16, 16, 1)), verbose=0).shape
    (1, 64)
    """

    task_name = "image_classifier"
    backbone: ImageBackbone
    multi_label: bool
    output_activation: str | None
    encoded: Any
    pipeline_tag = "image-classification"

    @classmethod
    def config_from(
        cls, source: ModelSource, overrides: dict, backbone_config: dict
    ) -> TaskConfig:
        # `num_classes` means a new head: drop the arguments of the source's head.
        is_new = "num_classes" in overrides
        if not is_new and not source.is_trained:
            expected = f"num_classes, since {source.name!r} carries no trained task"
            raise _checks.unfit(expected, "num_classes=None")
        config, new_weights = dict(source.task_config()), ()
        if is_new:
            new_weights = _adapt_head(config, source, overrides, backbone_config)
        config["preprocessor"] = _preprocessor(
            source, config, overrides, backbone_config
        )
        return TaskConfig({**config, **overrides}, new_weights)

    def __init__(
        self,
        backbone: ImageBackbone,
        num_classes: int,
        preprocessor: object = None,
        pooling: str | None = None,
        multi_label: bool = False,
        representation_dim: int | None = None,
        head_bias: Any = 0.0,
        output_activation: str | None = None,
        dropout: float = 0.0,
        head_dtype: DType | None = None,
        pooled_norm: bool = False,
        head: Any = None,
        head_position: str = "final",
        pooling_query_key_norm: bool | None = None,
        **kwargs,
    ):
        check_task(self, ImageClassifier, backbone, kwargs, ImageBackbone)
        if type(self) is ImageClassifier:
            found = registry.task_class(
                type(backbone), lambda cls: issubclass(cls, ImageClassifier)
            )
            example = getattr(found, "__name__", "ViTImageClassifier")
            _checks.check_concrete(ImageClassifier, ImageClassifier, example)
        num_classes = _checks.check_integer("num_classes", num_classes)
        _checks.check_integer("representation_dim", representation_dim, optional=True)
        _checks.check_dropout("dropout", dropout)
        _checks.check_bool("multi_label", multi_label)
        _checks.check_bool("pooled_norm", pooled_norm)
        activations = (None, "sigmoid" if multi_label else "softmax")
        _checks.check_one_of("output_activation", output_activation, activations)
        policy = _checks.check_dtype("head_dtype", head_dtype) or backbone.dtype_policy
        if isinstance(preprocessor, ImagePreprocessor):
            preprocessor.check_model(backbone, num_classes)

        # === Layers ===
        config = backbone.config.to_dict()
        self.backbone = backbone
        self.preprocessor = preprocessor
        inputs, routing = backbone.input, dict(backbone.routing)
        # The layers draw their initial values by the model's seed.
        with initial_values(config["seed"], type(self).__name__):
            layers = _head.head_layers(
                config,
                policy,
                num_classes,
                pooling,
                representation_dim,
                head_bias,
                output_activation,
                dropout,
                pooled_norm,
                head,
                head_position,
                pooling_query_key_norm,
            )
            self.pooler = layers["pooler"]
            self.pooled_normalization = layers.get("pooled_norm")
            self.output_dropout = layers["output_dropout"]
            self.head = layers.get("head")
            self.output_dense = layers["predictions"]

            # === Functional model ===
            encoded, members = backbone(inputs), backbone.ensemble_size
            tokens, mask = encoded, backbone.token_mask(inputs)
            if members > 1:
                length = tokens.shape[1] // members
                tokens = keras.ops.reshape(tokens, (-1, length, tokens.shape[2]))
            features = self.pooler(tokens, mask=mask)
            if self.pooled_normalization is not None:
                features = self.pooled_normalization(features)
            if representation_dim is not None:
                self.representation = layers["pre_logits"]
                features = self.representation(features)
            outputs = self.output_dropout(features)
            if self.head is not None:
                outputs, record = self.head(outputs)
                # The only token is the pooled feature of the image.
                routing["head"] = Routing(
                    *(keras.ops.expand_dims(x, 1) for x in record)
                )
                if head_position == "penultimate":
                    outputs = keras.ops.relu(outputs)
            outputs = self.output_dense(outputs)
            if members > 1:
                if head is not None:
                    raise _checks.unfit(
                        "head=None for an ensemble", ensemble_size=members
                    )
                kind = (
                    _head.SIGMOID if multi_label or num_classes == 1 else _head.SOFTMAX
                )
                kind = kind if output_activation is None else _head.PROBABILITIES
                self.members_mean = _head.MembersMean(
                    members, kind, dtype=policy, name="members_mean"
                )
                outputs = self.members_mean(outputs)
                features = keras.ops.mean(
                    keras.ops.reshape(features, (-1, members, features.shape[-1])), 1
                )
        # The base constructor compiles and reads some, but Keras allows plain
        # attributes only after it. `encoded` has the symbolic tokens of the backbone.
        object.__setattr__(self, "multi_label", multi_label)
        object.__setattr__(self, "encoded", encoded)
        object.__setattr__(self, "output_activation", output_activation)
        super().__init__(inputs, outputs, features, routing, **kwargs)

        # === Config ===
        self.num_classes = num_classes
        self.pooling = check_pooling(pooling, backbone.class_token)
        self.pooling_query_key_norm = pooling_query_key_norm
        self.pooled_norm = pooled_norm
        self.representation_dim = representation_dim
        self.head_bias = head_bias
        self.dropout = dropout
        self.head_dtype = head_dtype
        self.head_position = head_position

    @property
    def output_name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the output is, in exported programs."""
        return "logits" if self.output_activation is None else "probabilities"

    @property
    def preprocessor(self) -> Any:
        """An `ImagePreprocessor`, which `classify` applies, or another, or None."""
        return super().preprocessor

    @preprocessor.setter
    def preprocessor(self, value: object) -> None:
        if value is not None and not callable(value):
            expected = "preprocessor to be an ImagePreprocessor, a layer or None"
            raise _checks.unfit(expected, preprocessor=value)
        # The constructor checks it before there is a model.
        if isinstance(value, ImagePreprocessor) and hasattr(self, "num_classes"):
            value.check_model(self.backbone, self.num_classes)
        keras_hub.models.Task.preprocessor.fset(self, value)  # pyright: ignore

    def classify(
        self,
        images: object,
        top: int = 5,
        batch_size: int = 32,
        max_value: float | None = None,
    ) -> list:
        """Returns the most probable classes of images of any size.

        Args:
            images: one or several images or paths, as in `ImagePreprocessor`.
            top: number of classes per image.
            batch_size: images per batch.
            max_value: pixel value of white, see `ImagePreprocessor`.

        Returns:
            A list of `ClassProbability`, most probable first, for one image (H, W, C)
            or (H, W); a list of such lists for several.
        """
        top = _checks.check_integer("top", top)
        batch_size = _checks.check_integer("batch_size", batch_size)
        if not isinstance(self.preprocessor, ImagePreprocessor):
            raise ValueError(
                "Expected a model with an ImagePreprocessor: set model.preprocessor = "
                "keras_moe.models.ImagePreprocessor(model.input_shape[1:]); received: "
                f"preprocessor={self.preprocessor!r}"
            )
        prepared, is_one = self.preprocessor.batch(images, max_value)
        outputs = self.predict(prepared, batch_size=batch_size, verbose=0)
        outputs = outputs.astype("float64")
        if self.output_activation is None:
            outputs = probabilities(outputs, self.multi_label)
        found = most_probable(outputs, self.preprocessor.class_names, top)
        return found[0] if is_one else found

    def outputs_from_head(self, head_outputs: object) -> Any:
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
            expected = "a classifier with head=MuMoE(...) as its final layer"
            raise _checks.unfit(expected, head=head, head_position=self.head_position)
        _checks.check_integer("output", output, 0, self.num_classes - 1)
        experts = head.gate.expert_types.total
        offsets = np.asarray(offsets, "float32")
        if offsets.shape != (experts,) or not np.isfinite(offsets).all():
            raise _checks.unfit(f"finite offsets of shape ({experts},)", offsets)
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

    def compute_loss(
        self,
        x: object = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        if y is not None and self._has_members(y_pred):
            # Their mean loss.
            members, classes = y_pred.shape[1:]
            y_pred = keras.ops.reshape(y_pred, (-1, classes))
            y, sample_weight = (
                None if each is None else keras.ops.repeat(each, members, axis=0)
                for each in (y, sample_weight)
            )
        return super().compute_loss(x, y, y_pred, sample_weight, training)

    def compute_metrics(
        self, x: object, y: object, y_pred: Tensor, sample_weight: object = None
    ) -> dict[str, Tensor]:
        if self._has_members(y_pred):
            y_pred = self.members_mean.mean(y_pred)
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def _has_members(self, outputs):
        """Whether outputs are an ensemble's in training, (B, M, C)."""
        return self.backbone.ensemble_size > 1 and len(outputs.shape) == 3

    def _checked_loss(self, loss):
        return _head.loss_of_outputs(loss, self.output_activation is None)

    def default_loss(self) -> keras.losses.Loss:
        """Returns softmax cross-entropy, or `SigmoidCrossentropy` if `multi_label`."""
        loss = SigmoidCrossentropy if self.multi_label else _SPARSE
        return loss(from_logits=self.output_activation is None)

    def default_metrics(self, loss: object) -> list:
        """Returns accuracy, or area under precision-recall if `multi_label`."""
        from_logits = self.output_activation is None
        if any(isinstance(each, _SPARSE) for each in keras.tree.flatten(loss)):
            return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
        if self.multi_label:
            return [keras.metrics.AUC(curve="PR", from_logits=from_logits, name="auc")]
        if self.output_shape[-1] == 1:
            # Keras's own choice would treat logits as probabilities.
            threshold = 0.0 if from_logits else 0.5
            return [keras.metrics.BinaryAccuracy("accuracy", threshold=threshold)]
        # Keras chooses by label shape, whatever the loss.
        return ["accuracy"]

    def label_spec(self) -> keras.KerasTensor:
        sparse = (_SPARSE, SparseSigmoidCrossentropy)
        if isinstance(self.loss, sparse) or "sparse" in str(self.loss):
            return keras.KerasTensor((None,), "int32")
        return keras.KerasTensor((None, self.num_classes), "float32")

    def check_labels(self, labels: object) -> None:
        check_labels(labels, self.num_classes, getattr(self, "loss", None))

    def get_config(self):
        names = {*_checks.argument_names(ImageClassifier)} - {
            "backbone",
            "preprocessor",
        }
        return {
            **super().get_config(),
            **{name: getattr(self, name) for name in sorted(names)},
            "head_dtype": quantized_head(self, self.head_dtype),
            "head": self.head and keras.saving.serialize_keras_object(self.head),
        }

    @staticmethod
    def describe_parts(
        backbone_config: dict, num_tokens: int, dim: int, **config: Any
    ) -> list[Part]:
        _checks.check_integer("num_classes", config["num_classes"])
        parts, shape = [], (num_tokens, dim)
        members = getattr(moe_config(backbone_config["moe"]), "ensemble_size", 1)
        for name, layer in _head.head_layers(
            backbone_config, "float32", **config
        ).items():
            cost = layer_cost(layer, shape)
            if cost.parameters:
                parts.append(Part(name, _KINDS[name], *cost).of_members(members))
            shape = (1, getattr(layer, "units", shape[-1]))
        return parts


@register_task
@keras.saving.register_keras_serializable("keras_moe")
class ViTImageClassifier(ImageClassifier):
    """A `ViTBackbone` with pooling and a classification head.

    Args:
        backbone: a `ViTBackbone`.
        num_classes: number of classes.
        **kwargs: arguments of `ImageClassifier`.

    Reference: *An Image is Worth 16x16 Words*; *Scaling Vision Transformers* (MAP
    head).

    Example:

    >>> from keras_moe.models import ViTBackbone, ViTImageClassifier
    >>> backbone = ViTBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=2,
    ...     num_heads=2, mlp_dim=16, moe={"moe_layers": "every_2", "num_experts": 4},
    ... )
    >>> ViTImageClassifier(backbone, num_classes=3).output_shape
    (None, 3)
    """

    backbone_cls = ViTBackbone


@register_task
@keras.saving.register_keras_serializable("keras_moe")
class MixerImageClassifier(ImageClassifier):
    """A `MixerBackbone` with average pooling and a classification head.

    Args:
        backbone: a `MixerBackbone`.
        num_classes: number of classes.
        **kwargs: arguments of `ImageClassifier`; `pooling` is `"average"` (the default)
            or `"first"`.

    Reference: *MLP-Mixer: An all-MLP Architecture for Vision*.

    Example:

    >>> from keras_moe.models import MixerBackbone, MixerImageClassifier
    >>> backbone = MixerBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=2,
    ...     token_mlp_dim=4, mlp_dim=16,
    ... )
    >>> MixerImageClassifier(backbone, num_classes=3).output_shape
    (None, 3)
    """

    backbone_cls = MixerBackbone


def _preprocessor(source, config, overrides, backbone_config):
    shape, num_classes = backbone_config["image_shape"], overrides.get("num_classes")
    own = budget(backbone_config)
    default = ImagePreprocessor(shape, class_names=source.class_names, **own)
    preprocessor = config.get("preprocessor", default)
    if not isinstance(preprocessor, ImagePreprocessor):
        return preprocessor
    if source.kind == SAVED and num_classes is not None:
        # Other classes, even if there are as many.
        preprocessor = dataclasses.replace(preprocessor, class_names=None)
    return preprocessor.adapted(shape, num_classes, **own)


def _adapt_head(config, source, overrides, backbone_config):
    """Adapts a source's arguments to a new head; returns paths of new weights."""
    if source.kind == SAVED:
        for name in TRAINING:
            # The backbone's are in its own config.
            config.pop(name, None)
        # A quantised head's policies do not apply to a new head.
        config["head_dtype"] = new_head_dtype(config.get("head_dtype"))
        if config.get("head") and config.get("head_position") == "final":
            # The number of units follows the classes, and old edits do not apply.
            head = config["head"]
            units = {"units": overrides["num_classes"], "edited_outputs": ()}
            config["head"] = {**head, "config": {**head["config"], **units}}
        return (*HEAD, *POOLING)
    if source.kind == PUBLISHED:
        config.pop("representation_dim", None)
        pooling = config.get("pooling")
        is_kept = overrides.get("pooling", pooling) == pooling
        if is_kept and "pooled_norm" not in overrides:
            return HEAD
        config.pop("pooled_norm", None)
        return (*HEAD, *POOLING)
    # A representation layer as wide as the backbone follows its width, and is dropped
    # if a final muMoE replaces the dense head.
    if config.get("representation_dim") == source.config.get("hidden_dim"):
        config["representation_dim"] = backbone_config.get("hidden_dim")
    if overrides.get("head") and overrides.get("head_position", "final") == "final":
        config.pop("representation_dim", None)
    return ()
