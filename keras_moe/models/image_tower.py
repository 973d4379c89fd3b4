"""Towers of images: patches become tokens, and blocks of one encoder follow.

Axes: B batch, N tokens, D hidden.
"""

from collections.abc import Callable
from typing import Any

import keras

from keras_moe.checks import check_bool, check_image_shape, check_integer, check_seed
from keras_moe.layers import (
    ClassToken,
    EncoderSpec,
    LayerNorm,
    PatchEmbedding,
    PositionEmbedding,
)
from keras_moe.models.tower import Tower, encoder_spec

_SWITCHES = ("class_token", "embedding_norm", "final_norm")


def image_tower(
    config: dict,
    dtype: Any,
    token_mixer: Callable[[EncoderSpec, int], keras.layers.Layer],
) -> Tower:
    """The tower of a backbone of images, not built.

    Args:
        config: arguments of the backbone's constructor: `image_shape`, `patch_size`,
            `hidden_dim`, `num_layers`, `mlp_dim`, `activation`, `dropout_rate`,
            `stochastic_depth`, `layer_norm_epsilon`, `rematerialize`, `moe`, `seed`,
            and those of `class_token`, `position_embedding`, `position_interpolation`,
            `embedding_norm` and `final_norm` that it has. Others are the token mixer's.
        dtype: dtype policy.
        token_mixer: function from the `EncoderSpec` and a block's index to the layer
            through which the block's tokens see each other, not built.

    Raises:
        ValueError: if an argument is out of range.
    """
    image_shape = check_image_shape(config["image_shape"])
    # Before seeds and layers are made of them.
    check_seed("seed", config["seed"])
    hidden_dim = check_integer("hidden_dim", config["hidden_dim"])
    for name in _SWITCHES:
        check_bool(name, config.get(name, False))
    epsilon = config["layer_norm_epsilon"]
    interpolation = config.get("position_interpolation", "bilinear")
    patches = PatchEmbedding(
        hidden_dim,
        config["patch_size"],
        interpolation=interpolation,
        dtype=dtype,
        name="patch_embedding",
    )
    rows, columns = patches.grid(image_shape)
    has_class_token = config.get("class_token", False)
    num_tokens = rows * columns + int(has_class_token)
    spec = encoder_spec(config, num_tokens, dtype)
    embedding = [patches]
    if has_class_token:
        embedding.append(ClassToken(dtype=dtype, name="class_token"))
    if config.get("position_embedding") is not None:
        embedding.append(
            PositionEmbedding(
                (rows, columns),
                config["position_embedding"],
                interpolation=interpolation,
                dtype=dtype,
                name="position_embedding",
            )
        )
    if config.get("embedding_norm", False):
        embedding.append(LayerNorm(epsilon, dtype=dtype, name="embedding_norm"))
    embedding.append(
        keras.layers.Dropout(
            config["dropout_rate"],
            seed=spec.seed_of(-1, 0),
            dtype=dtype,
            name="embedding_dropout",
        )
    )
    blocks = spec.blocks(lambda index: token_mixer(spec, index))
    final_norm = None
    if config.get("final_norm", True):
        final_norm = LayerNorm(epsilon, dtype=dtype, name="final_norm")
    return Tower(tuple(embedding), blocks, final_norm)
