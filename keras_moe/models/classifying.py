"""Names and probabilities for images of any size."""

from typing import Any, NamedTuple

import keras
import keras_hub
import numpy as np

from keras_moe.checks import check_integer
from keras_moe.models.classifier_config import with_new_names
from keras_moe.models.image_preprocessor import ImagePreprocessor


class ClassProbability(NamedTuple):
    """A class that a classifier finds in an image.

    Attributes:
        name: the class's name, or its number as text where the model has no names.
        probability: the softmax or, for a multi-label model, the sigmoid.
        index: the class's number.
    """

    name: str
    probability: float
    index: int


class ClassifyMixin:
    """Adds `classify` to a task with a `preprocessor`."""

    @classmethod
    def from_config(cls, config: dict) -> Any:
        """A task of `get_config`'s arguments.

        Args:
            config: of `get_config`.
        """
        config = with_new_names(config)
        if isinstance(config.get("preprocessor"), dict):
            # KerasHub takes layers alone.
            config["preprocessor"] = keras.saving.deserialize_keras_object(
                config["preprocessor"]
            )
        return super().from_config(config)

    @property
    def preprocessor(self) -> Any:
        """An `ImagePreprocessor`, which `classify` applies, or another, or None."""
        return keras_hub.models.Task.preprocessor.fget(self)

    @preprocessor.setter
    def preprocessor(self, value: Any) -> None:
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
            top: how many classes for each image.
            batch_size: images per batch.
            max_value: the value of white, see `ImagePreprocessor`.

        Returns:
            For each image a list of `ClassProbability`, the most probable first; for
            one image (H, W, C) or (H, W) its list alone.

        Raises:
            ValueError: if the model has no `ImagePreprocessor`, or the images or
                another argument do not fit.
        """
        top = check_integer("top", top)
        batch_size = check_integer("batch_size", batch_size)
        preprocessor = self.preprocessor
        if not isinstance(preprocessor, ImagePreprocessor):
            raise ValueError(
                "Expected a model with an ImagePreprocessor: set model.preprocessor = "
                "keras_moe.models.ImagePreprocessor(model.input_shape[1:]); received: "
                f"preprocessor={preprocessor!r}"
            )
        preprocessor.check_model(self.input_shape[1:], self.num_classes)
        prepared = preprocessor(images, max_value)
        if prepared.ndim == 3:
            return self._classified(prepared[None], top, 1)[0]
        return self._classified(prepared, top, batch_size)

    def _classified(self, prepared, top, batch_size):
        if not len(prepared):
            return []
        outputs = self.predict(prepared, batch_size=batch_size, verbose=0)
        probabilities = self._probabilities(outputs.astype("float64"))
        names = self.preprocessor.class_names
        results = []
        for row in probabilities:
            # Stable: among equals the lower number comes first.
            order = np.argsort(-row, kind="stable")[:top]
            results.append(
                [
                    ClassProbability(
                        names[i] if names else str(i), float(row[i]), int(i)
                    )
                    for i in order
                ]
            )
        return results

    def _probabilities(self, outputs):
        if self.output_activation is not None:
            return outputs
        if self.multi_label:
            # No exponential of a large number.
            return 0.5 * (1.0 + np.tanh(0.5 * outputs))
        outputs = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
        return outputs / outputs.sum(axis=-1, keepdims=True)
