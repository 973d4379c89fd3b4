"""The images of the study of muMoE, made of scanned digits, and how models learn them.

Axes: B images.
"""

from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe import data
from tools.studies.study import Tell
from tools.studies.watch import Watch

SIZES = {"patch_size": 4, "hidden_dim": 64, "num_layers": 2, "mlp_dim": 128}
SHAPE = (16, 16, 1)
# The attributes of a digit; the last is the sensitive one, the first the target.
LABELS = ("5 and above", "even", "with a loop", "prime", "inverted")


class Fit(NamedTuple):
    """How models are trained.

    Attributes:
        epochs: number of epochs.
        batch_size: images in a step.
        learning_rate: learning rate, which is constant.
    """

    epochs: int
    batch_size: int
    learning_rate: float

    def optimizer(self, rate: float = 1.0) -> keras.optimizers.Optimizer:
        """A new optimizer."""
        return keras.optimizers.AdamW(rate * self.learning_rate, weight_decay=1e-4)

    def train(
        self,
        model: keras.Model,
        images: np.ndarray,
        labels: Any,
        tell: Tell,
        passes: int = 1,
    ) -> None:
        """Trains a compiled model."""
        model.fit(
            images,
            labels,
            batch_size=self.batch_size,
            epochs=passes * self.epochs,
            verbose=0,
            callbacks=[Watch(tell)],
        )


def numbers(split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers from 00 to 99, as many of each, of two digits of a split."""
    images, digits = data.load_digits(split, SHAPE)
    generator = np.random.default_rng(0)
    labels = generator.permutation(np.arange(count) % 100)
    of_digit = [np.flatnonzero(digits == digit) for digit in range(10)]
    halves = [
        images[[generator.choice(of_digit[digit]) for digit in place]]
        for place in (labels // 10, labels % 10)
    ]
    return np.concatenate(halves, axis=2), labels.astype("int32")


def with_attributes(
    images: np.ndarray, digits: np.ndarray, inverted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Images, some of them inverted, and their attributes (B, 5)."""
    images = np.where(inverted[:, None, None, None], -images, images)
    labels = [digits >= 5, digits % 2 == 0, np.isin(digits, [0, 6, 8, 9])]
    labels += [np.isin(digits, [2, 3, 5, 7]), inverted]
    return images, np.stack(labels, axis=1).astype("float32")


def both_ways(images: np.ndarray, digits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every image twice: as it is, and inverted."""
    inverted = np.repeat([False, True], len(digits))
    return with_attributes(
        np.concatenate([images, images]), np.concatenate([digits, digits]), inverted
    )
