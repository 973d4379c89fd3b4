"""The callback of a study's runs."""

import math
from collections.abc import Callable
from typing import Any

import keras

from tools.studies.study import Diverged, Tell


class Watch(keras.callbacks.Callback):
    """Tells the loss of each epoch, and ends a run whose loss is not finite."""

    def __init__(self, tell: Tell, on_epoch: Callable[[], Any] = lambda: None):
        super().__init__()
        self.tell, self.on_epoch = tell, on_epoch

    def on_epoch_end(self, epoch, logs=None):
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise Diverged(epoch + 1, loss)
        self.tell(f"epoch {epoch + 1} of {self.params['epochs']}, loss {loss:.3f}")
        self.on_epoch()
