"""`fit`, `evaluate` and `predict` of tasks, which take all that Keras takes."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import keras_hub


class TrainerMixin:
    """Trains with Keras's own methods in the place of KerasHub's.

    KerasHub's turn all data into one kind of dataset, in order to map a preprocessor
    over it: they know no `PyDataset`, `DataLoader` or generator, and do not shuffle
    arrays. Only a `keras_hub.models.Preprocessor` needs them; any other preprocessor
    is applied where its owner calls it.
    """

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains the model.

        Args:
            *args: data: arrays, a `tf.data.Dataset`, a `keras.utils.PyDataset`, a
                PyTorch `DataLoader`, a Grain dataset or loader, or a generator of
                batches; see `keras.Model.fit`.
            **kwargs: see `keras.Model.fit`.
        """
        return self._training_method("fit")(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The loss and metrics; see `keras.Model.evaluate`, and `fit` for the data."""
        return self._training_method("evaluate")(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs; see `keras.Model.predict`, and `fit` for the data."""
        return self._training_method("predict")(*args, **kwargs)

    def preprocess_samples(
        self, x: Any, y: Any = None, sample_weight: Any = None
    ) -> Any:
        """A batch for the model: as it is, without a KerasHub preprocessor."""
        if self._is_preprocessed():
            return super().preprocess_samples(x, y, sample_weight)
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    def _is_preprocessed(self) -> bool:
        return isinstance(self.preprocessor, keras_hub.models.Preprocessor)

    def _training_method(self, name: str) -> Callable:
        if self._is_preprocessed():
            return getattr(super(), name)
        return functools.partial(getattr(keras.Model, name), self)
