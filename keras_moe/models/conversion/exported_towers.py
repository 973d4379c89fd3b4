"""The towers of a model that is exported: their arguments and their weights."""

from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe.models.conversion.clip_parts import ACTIVATIONS
from keras_moe.models.conversion.exported_images import images_of
from keras_moe.models.conversion.image_range import Normalization

# This library's names of activations -> those of transformers' configs.
_ACTIVATIONS = {own: name for name, own in reversed(ACTIVATIONS.items())}


class ExportedTower(NamedTuple):
    """A tower as an exporter takes it.

    Attributes:
        config: arguments of the backbone.
        values: values of the weights by their paths in the backbone, or in the
            classifier around it.
        pooling: pooling of an image tower, or None for a backbone alone.
        projection_dim: size of an image tower's projection, or None.
        images: normalisation of an image tower's images.
    """

    config: dict
    values: dict[str, np.ndarray]
    pooling: str | None = None
    projection_dim: int | None = None
    images: Normalization | None = None

    def check(self, kind: str, **wanted: Any) -> None:
        """Raises ValueError unless the tower is one that a format can hold."""
        if self.config["moe"] is not None:
            raise ValueError(
                f"Expected a dense tower for {kind}, which has no experts; received: "
                f"moe={self.config['moe']}"
            )
        if self.config["activation"] not in _ACTIVATIONS:
            raise ValueError(
                f"Expected an activation of {sorted(_ACTIVATIONS)} for {kind}; "
                f"received: activation={self.config['activation']!r}"
            )
        values = {**self.config, "image_pooling": self.pooling}
        for name, value in wanted.items():
            if values[name] != value:
                raise ValueError(
                    f"Expected {name}={value!r} for {kind}; received: "
                    f"{name}={values[name]!r}"
                )

    def square(self, name: str, kind: str) -> int:
        """The side of the images or of the patches."""
        value = self.config[name]
        height, width = (value, value) if isinstance(value, int) else value[:2]
        if height != width:
            raise ValueError(f"Expected squares for {kind}; received: {name}={value}")
        return height

    @property
    def activation(self) -> str:
        """transformers' name of the activation."""
        return _ACTIVATIONS[self.config["activation"]]


class ExportedModel(NamedTuple):
    """A model as an exporter takes it.

    Attributes:
        towers: its towers by name, `"image"` and `"text"`.
        logits: values of the logits' `"log_scale"` and `"bias"`, of pairs alone.
        preprocessor: `ImagePreprocessor` of the images, or None.
    """

    towers: dict[str, ExportedTower]
    logits: dict[str, np.ndarray]
    preprocessor: Any = None

    @classmethod
    def of(cls, model: keras.Model) -> "ExportedModel":
        """The parts of a model."""
        backbone = getattr(model, "backbone", model)
        names = {base.__name__ for base in type(backbone).__mro__}
        if not names & {"CLIPBackbone", "TextBackbone", "ViTBackbone"}:
            raise ValueError(
                "Expected a CLIPBackbone, a ViTBackbone, a TextBackbone or a task "
                f"around one; received: {type(backbone).__name__}"
            )
        values = _values(model)
        preprocessor = getattr(model, "image_preprocessor", None)
        if "CLIPBackbone" in names:
            parts = _pair(backbone.get_config(), values, preprocessor)
            return cls(*parts, preprocessor)
        if "TextBackbone" in names:
            return cls({"text": ExportedTower(backbone.get_config(), values)}, {})
        config, pooling, size = backbone.get_config(), None, None
        if model is not backbone:
            head = model.get_config()
            pooling, size = head["pooling"], head["num_classes"]
            preprocessor = model.preprocessor
        images = images_of(config, preprocessor)
        tower = ExportedTower(config, values, pooling, size, images)
        return cls({"image": tower}, {}, preprocessor)


def _values(model):
    weights = (w for w in model.weights if "seed_generator" not in w.path)
    return {
        weight.path: np.array(
            keras.ops.convert_to_numpy(keras.ops.cast(weight.value, "float32"))
        )
        for weight in weights
    }


def _pair(config, values, preprocessor):
    def of(tower):
        start = f"{tower}/"
        return {
            path.removeprefix(start): value
            for path, value in values.items()
            if path.startswith(start)
        }

    pooling = config["image_pooling"]
    if pooling is None:
        pooling = "class_token" if config["image"]["class_token"] else "average"
    image = {
        path.replace("projection/", "predictions/"): value
        for path, value in of("image").items()
    }
    text = dict(config["text"])
    if config["projection_dim"] is not None:
        text.update({k: config[k] for k in ("projection_dim", "projection_bias")})
    towers = {
        "image": ExportedTower(
            config["image"],
            image,
            pooling,
            config["projection_dim"],
            images_of(config["image"], preprocessor),
        ),
        "text": ExportedTower(text, of("text")),
    }
    return towers, of("logit_scale")
