"""Learned temperatures and biases of contrastive losses, as published."""

import math
from typing import NamedTuple

import keras
from keras import ops

from keras_moe.checks import check_positive


class Temperature(NamedTuple):
    """How the scale and the bias of contrastive logits are learned.

    A model learns `log(scale)`, so that the scale stays positive.

    Fields:
        scale: scale of the logits at the start, the inverse temperature.
        largest_scale: bound of the scale, None for none.
        bias: bias of the logits at the start, None for no bias.
    """

    scale: float
    largest_scale: float | None = None
    bias: float | None = None

    @property
    def log_scale(self) -> float:
        """The logarithm of the scale at the start."""
        return math.log(self.scale)


# CLIP, section 2.5: temperature 0.07, and a scale of at most 100. LIMoE, appendix A:
# 10; no bound is published. SigLIP, section 3.2: t' = log 10 and b = -10. CLIP-UP,
# appendix A.1, takes its settings from CLIP.
TEMPERATURES = {
    "clip": Temperature(1 / 0.07, largest_scale=100.0),
    "limoe": Temperature(10.0),
    "siglip": Temperature(10.0, bias=-10.0),
    "clip_up": Temperature(1 / 0.07, largest_scale=100.0),
}


@keras.saving.register_keras_serializable("keras_moe")
class LogScaleBound(keras.constraints.Constraint):
    """Bounds a learned logarithm of the logits' scale, after each step.

    It is the `constraint` of the weight. A bound in the loss instead would leave a
    weight beyond it without a gradient, and it would never come back.

    Args:
        largest_scale: bound of the scale, 100 in CLIP.

    Raises:
        ValueError: if `largest_scale` is not positive.

    Reference:
        *Learning Transferable Visual Models From Natural Language Supervision*
        (CLIP), section 2.5.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import LogScaleBound
    >>> round(float(LogScaleBound(100.0)(np.float32(7.0))), 4)  # log 100
    4.6052
    """

    def __init__(self, largest_scale: float = 100.0):
        self.largest_scale = check_positive("largest_scale", largest_scale)

    def __call__(self, w):
        return ops.minimum(w, math.log(self.largest_scale))

    def get_config(self):
        return {"largest_scale": self.largest_scale}
