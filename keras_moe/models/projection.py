"""The projection of a pooled vector to an embedding.

Axes: B batch, D hidden, P embedding.
"""

from typing import Any

import keras

from keras_moe.checks import check_bool, check_integer
from keras_moe.ops.initializers import FastInitializer


def embedding_projection(
    projection_dim: int,
    use_bias: bool = False,
    dtype: Any = None,
    name: str = "projection",
) -> keras.layers.Dense:
    """A dense layer from (B, D) to (B, P), not built, drawn as in CLIP."""
    return keras.layers.Dense(
        check_integer("projection_dim", projection_dim),
        use_bias=check_bool("projection_bias", use_bias),
        # A standard deviation of 1 / sqrt(D).
        kernel_initializer=FastInitializer(
            keras.initializers.VarianceScaling(1.0, "fan_in", "untruncated_normal")
        ),
        dtype=dtype,
        name=name,
    )
