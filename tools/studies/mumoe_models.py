"""The images of the study of muMoE, made of scanned digits, and its dense ViTs.

Axes: B images.
"""

import functools
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe import data, models
from tools.studies.study import (
    OnProgress,
    Run,
    Study,
    Watch,
    arrays_as_weights,
    weights_as_arrays,
)
from tools.studies.truncated_svd import truncated_svd

SIZES = {"patch_size": 4, "hidden_dim": 64, "num_layers": 2, "mlp_dim": 128}
SHAPE = (16, 16, 1)
# Examples of the 100 numbers, and the shares of singular values that are kept.
TRAIN_NUMBERS, TEST_NUMBERS = 6000, 2000
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
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
        on_progress: OnProgress,
        passes: int = 1,
    ) -> None:
        """Trains a compiled model."""
        model.fit(
            images,
            labels,
            batch_size=self.batch_size,
            epochs=passes * self.epochs,
            verbose=0,
            callbacks=[Watch(on_progress)],
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


class DenseModels:
    """A dense ViT for each seed, from which heads start, and its images."""

    def __init__(self, study: Study, fit: Fit, seeds: int):
        self.study, self.fit, self.seeds = study, fit, seeds
        settings = {"numbers": [TRAIN_NUMBERS, TEST_NUMBERS]}
        self.runs = [
            Run("dense", seed, settings, functools.partial(self.train, seed))
            for seed in range(seeds)
        ]

    @functools.cached_property
    def images(self) -> tuple[tuple, tuple]:
        """Images and labels to train on, and to test."""
        return numbers("train", TRAIN_NUMBERS), numbers("test", TEST_NUMBERS)

    def new_model(self, seed: int, **head) -> keras.Model:
        """A ViT with any head."""
        keras.utils.set_random_seed(seed)
        shape = (SHAPE[0], 2 * SHAPE[1], SHAPE[2])
        backbone = models.ViTBackbone(
            image_shape=shape, num_heads=4, seed=seed, **SIZES
        )
        return models.ViTImageClassifier(backbone, 100, **head)

    def train(self, seed: int, on_progress: OnProgress) -> tuple[dict, dict]:
        """Trains from a seed, and keeps the backbone's weights."""
        train, test = self.images
        model = self.new_model(seed)
        model.compile(optimizer=self.fit.optimizer())
        self.fit.train(model, *train, on_progress)
        svd = truncated_svd(model, *test, shares=SHARES)
        result = {"accuracy": svd.full, "svd": svd._asdict()}
        return result, weights_as_arrays(model.backbone)

    def weights(self, seed: int, on_progress: OnProgress) -> list[np.ndarray]:
        """The backbone's weights of a seed, trained if they are not there."""
        self.study.finish(self.runs[seed], on_progress)
        return arrays_as_weights(self.study.arrays(self.runs[seed]))
