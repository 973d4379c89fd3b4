"""Edits of a muMoE head's logits for the images that use some of its experts.

Axes: B batch, E experts.
"""

import numbers
from typing import Any

import keras
import numpy as np

from keras_moe.analysis.blocks import check_images, mumoe_head

# The best value for the blind threshold in the paper.
_BLIND_STRENGTH = 2.5


def edit_expert_logits(
    model: Any,
    subpopulation: Any,
    output: int,
    strength: float | None = None,
    batch_size: int = 32,
) -> Any:
    """A new model whose logits move for images that use a subpopulation's experts.

    `strength mean(a)^T a` is added to the logit of `output`, with an image's
    coefficients a and their mean over the subpopulation: the logits of images that use
    its experts move, those of others do not. Nothing is trained, and no attribute is
    needed when the model is used. Edits of several outputs, or of one again, add up.

    Args:
        model: `ImageClassifier` with a muMoE as its final layer; it is not changed.
        subpopulation: training images of the subpopulation, (B, height, width,
            channels). None takes ones for the mean, which moves all images alike: the
            attribute-blind threshold.
        output: class, or label, whose logit moves.
        strength: lambda; the logit falls where it is negative. None takes the number
            of experts, or 2.5 without a subpopulation, as in the paper. Choose the
            best value on validation data.
        batch_size: number of images in a batch.

    Returns:
        A model of the same class, which saves and loads as any other.

    Raises:
        ValueError: if the model has no final muMoE head, there is no image, or an
            argument is out of range.

    Reference:
        *Multilinear Mixture of Experts*, equation 5 and appendix J.

    Example:

    >>> import numpy as np
    >>> from keras_moe import analysis, models
    >>> from keras_moe.layers import MuMoE
    >>> model = models.from_preset(
    ...     "vmoe_digits", num_classes=10, head=MuMoE(10, num_experts=4, rank=8)
    ... )
    >>> images = np.zeros((2, 16, 16, 1), "float32")
    >>> edited = analysis.edit_expert_logits(model, images, output=3, strength=2.0)
    >>> change = edited.predict(images, verbose=0) - model.predict(images, verbose=0)
    >>> change[0].round(3).tolist()  # an untrained gate is uniform: 2 * 4 / 4 ** 2
    [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    experts = mumoe_head(model).gate.expert_types.total
    if strength is not None and not (
        isinstance(strength, numbers.Real) and np.isfinite(strength)
    ):
        raise ValueError(
            f"Expected strength to be a finite number; received: strength={strength!r}"
        )
    if subpopulation is None:
        mean = np.ones(experts)
        strength = _BLIND_STRENGTH if strength is None else strength
    else:
        mean = mean_coefficients(model, subpopulation, batch_size)
        strength = experts if strength is None else strength
    return model.with_logit_offsets(output, strength * mean)


def mean_coefficients(model: Any, images: Any, batch_size: int = 32) -> np.ndarray:
    """The mean coefficient of each expert of a muMoE head over some images.

    Args:
        model: `ImageClassifier` with a muMoE head.
        images: (B, height, width, channels).
        batch_size: number of images in a batch.

    Returns:
        float64 (E,), which sums to 1 where each image's coefficients do.

    Raises:
        ValueError: if there is no muMoE head, or no image.

    Example:

    >>> import numpy as np
    >>> from keras_moe import analysis, models
    >>> from keras_moe.layers import MuMoE
    >>> model = models.from_preset(
    ...     "vmoe_digits", num_classes=10, head=MuMoE(10, num_experts=4, rank=8)
    ... )
    >>> analysis.mean_coefficients(model, np.zeros((2, 16, 16, 1), "float32")).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    mumoe_head(model)
    images = check_images(images)
    gates = keras.Model(model.input, model.routing["head"].gates).predict(
        images, batch_size=batch_size, verbose=0
    )
    return gates[:, 0].mean(axis=0, dtype="float64")
