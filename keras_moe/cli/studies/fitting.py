"""Training as the studies do it: the schedule, the augmentation, the watch."""

import math
from collections.abc import Callable
from typing import Any

import keras

from keras_moe.cli.studies.study import Diverged, Tell


class Watch(keras.callbacks.Callback):
    """Tells the loss of each epoch, and ends a run whose loss is not finite.

    Args:
        tell: function that shows a text beside the bar.
        on_epoch: function to call after each epoch.
    """

    def __init__(self, tell: Tell, on_epoch: Callable[[], Any] = lambda: None):
        super().__init__()
        self.tell, self.on_epoch = tell, on_epoch

    def on_epoch_end(self, epoch, logs=None):
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise Diverged(epoch + 1, loss)
        self.tell(f"epoch {epoch + 1} of {self.params['epochs']}, loss {loss:.3f}")
        self.on_epoch()


def compile_with_cosine(model: keras.Model, steps: int, learning_rate: float) -> None:
    """Compiles a model with AdamW, warm-up in a tenth of the steps, and cosine decay.

    Args:
        model: a model that knows its loss.
        steps: steps of the whole training.
        learning_rate: learning rate after the warm-up.
    """
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=learning_rate, warmup_steps=steps // 10
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(
            schedule, weight_decay=0.05, global_clipnorm=1.0
        )
    )


def shifts_and_turns() -> list[keras.layers.Layer]:
    """The augmentation of digits: small shifts and turns."""
    return [
        keras.layers.RandomTranslation(0.1, 0.1, fill_mode="nearest"),
        keras.layers.RandomRotation(0.03, fill_mode="nearest"),
    ]
