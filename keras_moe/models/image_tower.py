"""Towers of images: patches become tokens, and blocks of one encoder follow.

Axes: B batch, N tokens, D hidden.
"""

from collections.abc import Callable
from typing import Any

import keras

from keras_moe.checks import (
    check_bool,
    check_image_shape,
    check_integer,
    check_one_of,
    check_seed,
)
from keras_moe.layers import (
    ClassToken,
    EncoderSpec,
    LayerNorm,
    PatchEmbedding,
    PositionEmbedding,
)
from keras_moe.layers.position_embedding import KINDS
from keras_moe.models.tower import Tower, embedding_dropout, encoder_spec

_SWITCHES = ("class_token", "embedding_norm", "final_norm")


def image_tower(
    config: dict,
    dtype: Any,
    token_mixer: Callable[[EncoderSpec, int], keras.layers.Layer],
) -> Tower:
    """The tower of a backbone of images, not built."""
    # Before seeds and layers are made of it.
    check_seed("seed", config["seed"])
    embedding, num_tokens = image_embedding(config, dtype)
    embedding += (embedding_dropout(config, dtype),)
    spec = encoder_spec(config, num_tokens, dtype)
    blocks = spec.blocks(lambda index: token_mixer(spec, index))
    final_norm = None
    if config.get("final_norm", True):
        epsilon = config["layer_norm_epsilon"]
        final_norm = LayerNorm(epsilon, dtype=dtype, name="final_norm")
    return Tower(embedding, blocks, final_norm)


def image_embedding(config: dict, dtype: Any) -> tuple[tuple, int]:
    """The layers from images to tokens but dropout, not built, and the tokens'
    number.
    """
    image_shape = check_image_shape(config["image_shape"])
    hidden_dim = check_integer("hidden_dim", config["hidden_dim"])
    for name in _SWITCHES:
        check_bool(name, config.get(name, False))
    epsilon = config["layer_norm_epsilon"]
    interpolation = config.get("position_interpolation", "bilinear")
    patches = PatchEmbedding(
        hidden_dim,
        config["patch_size"],
        interpolation=interpolation,
        padding=config.get("patch_padding", "valid"),
        dtype=dtype,
        name="patch_embedding",
    )
    rows, columns = patches.grid(image_shape)
    has_class_token = config.get("class_token", False)
    embedding = [patches]
    if has_class_token:
        embedding.append(ClassToken(dtype=dtype, name="class_token"))
    if config.get("position_embedding") is not None:
        check_one_of("position_embedding", config["position_embedding"], KINDS)
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
    return tuple(embedding), rows * columns + int(has_class_token)
