"""Training of small models on digits: the schedule and the augmentation."""

import keras


def compile_with_cosine(model: keras.Model, steps: int, learning_rate: float) -> None:
    """Compiles a model with AdamW, warm-up in a tenth of the steps, and cosine
    decay.
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
