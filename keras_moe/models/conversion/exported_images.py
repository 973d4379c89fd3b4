"""The patch embedding of a model whose images are in [-1, 1], for other libraries.

Axes: D hidden.
"""

from typing import Any

import numpy as np

from keras_moe.models.conversion.clip_image_names import CLIP_IMAGES
from keras_moe.models.conversion.image_range import Normalization
from keras_moe.models.conversion.image_sizes import KERNEL, POSITIONS

BIAS = "patch_embedding/bias"


def images_of(config: dict, preprocessor: Any) -> Normalization:
    """The normalisation of a model's images."""
    parts = ((0.5,), (0.5,))
    if preprocessor is not None:
        parts = preprocessor.mean, preprocessor.std
    channels = config["image_shape"][2]
    # One number is that of all channels.
    return Normalization(*(tuple(x) * (channels // len(x)) for x in parts))


def without_patch_bias(
    values: dict[str, np.ndarray], class_token: bool, images: Normalization
) -> tuple[dict[str, np.ndarray], Normalization]:
    """Weights of an image tower without a bias of its patches, which CLIP has not.

    A bias that came with the normalisation of CLIP's images leaves with it: the kernel
    is again one for such images, with the fewest digits that give the same product. Any
    other bias becomes part of the positions.
    """
    values = dict(values)
    bias, kernel = values.pop(BIAS), values[KERNEL]
    if not bias.any():
        return values, images
    if images.is_ours and kernel.shape[2] == len(CLIP_IMAGES.mean):
        divisor = 2.0 * np.array(CLIP_IMAGES.std, "float32")[:, None]
        original = _dividend(kernel, divisor)
        mean, std = (np.array(x, "float64") for x in CLIP_IMAGES)
        sums = original.sum(axis=(0, 1), dtype="float64")
        if np.allclose(((0.5 - mean) / std) @ sums, bias, rtol=1e-4, atol=1e-6):
            values[KERNEL] = original
            return values, CLIP_IMAGES
    positions = values[POSITIONS].copy()
    positions[:, int(class_token) :] += bias
    values[POSITIONS] = positions
    return values, images


def _dividend(quotient, divisor):
    """The float32 of the fewest digits whose quotient this is."""
    nearest = quotient * divisor
    best, score = nearest, np.full(nearest.shape, -1, "int64")
    for steps in (0, 1, -1):
        candidate = nearest.view("int32") + np.int32(steps)
        value = candidate.view("float32")
        # The last bit that is set.
        digits = (candidate & -candidate).astype("int64")
        is_better = (value / divisor == quotient) & (digits > score)
        best, score = (
            np.where(is_better, value, best),
            np.where(is_better, digits, score),
        )
    return np.where(quotient == 0, quotient, best)
