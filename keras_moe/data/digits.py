"""The 1,797 handwritten digits (8x8, 10 classes) that ship with scikit-learn."""

from typing import Any

import numpy as np

from keras_moe._checks import check_image_shape, check_one_of
from keras_moe.data._examples import Classes, IndexedExamples, in_memory
from keras_moe.data._packages import extra

CLASS_NAMES = tuple(map(str, range(10)))
SPLITS = ("train", "test", "all")


def load_digits(
    split: str, image_shape: tuple[int, int, int] = (32, 32, 3), seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Loads the handwritten digits as arrays, without a download.

    A quarter of each class is in `"test"`. Returns images (N, height, width, channels),
    float32 in [-1, 1], resized bilinearly, and labels (N,), int32 in [0, 10).

    Args:
        split: `"train"`, `"test"` or `"all"`.
        image_shape: (height, width, channels).
        seed: seed of the split; use the same one for `"train"` and `"test"`.

    Example:

    >>> from keras_moe.data import load_digits
    >>> images, labels = load_digits("test", image_shape=(16, 16, 1))
    >>> images.shape, labels.shape
    ((450, 16, 16, 1), (450,))
    """
    height, width, channels = check_image_shape(image_shape)
    pixels, labels = read_pixels(split, seed)
    rows, columns = _bilinear(8, height), _bilinear(8, width)
    # (height, 8) @ (N, 8, 8) @ (8, width)
    images = rows @ pixels[..., 0] @ columns.T
    images = (images / 127.5 - 1.0).astype("float32")
    return np.repeat(images[..., None], channels, axis=-1), labels


def read_pixels(split: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the original images, (N, 8, 8, 1) in [0, 255], and the labels."""
    check_one_of("split", split, SPLITS)
    with extra("digits"):
        from sklearn import datasets, model_selection
    digits: Any = datasets.load_digits()
    # Pixels count ink from 0 to 16.
    pixels = (digits.images * (255.0 / 16.0)).astype("float32")[..., None]
    labels = digits.target.astype("int32")
    if split == "all":
        return pixels, labels
    train, test = model_selection.train_test_split(
        np.arange(len(labels)), test_size=0.25, random_state=seed, stratify=labels
    )
    chosen = train if split == "train" else test
    return pixels[chosen], labels[chosen]


def credit(name: str) -> str:
    return "E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, CC BY 4.0"


def find_classes(name: str, data_dir: str | None) -> Classes:
    """Returns the ten classes."""
    return Classes(len(CLASS_NAMES), CLASS_NAMES)


def open_labelled(name: str, split: str, data_dir: str | None) -> IndexedExamples:
    """Opens a split for a pipeline."""
    pixels, labels = read_pixels(split)
    return in_memory(pixels, labels, find_classes(name, data_dir))


def _bilinear(size: int, new_size: int) -> np.ndarray:
    """Matrix (new_size, size) of bilinear resizing with half-pixel centres."""
    at = np.clip((np.arange(new_size) + 0.5) * size / new_size - 0.5, 0, size - 1)
    low = np.floor(at).astype(int)
    high, share = np.minimum(low + 1, size - 1), at - low
    identity = np.eye(size)
    return (1 - share)[:, None] * identity[low] + share[:, None] * identity[high]
