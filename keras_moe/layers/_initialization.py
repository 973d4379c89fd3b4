"""Initial values of published codes, as rules from patterns of weight paths.

Axes: D hidden, H mlp, L layers.
"""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras.initializers import RandomNormal, RandomUniform

from keras_moe._checks import check_initializer, check_one_of

# Parts of the paths: what feeds the residual stream, and what reads it.
_QUERY_KEY_VALUE = r"(.*/)?attention/(query|key|value)/kernel"
_ATTENTION_OUTPUT = r"(.*/)?attention_output/kernel"
_HIDDEN = r"(.*/)?(mlp/hidden/|mlp/gate/|experts/hidden_|experts/gate_)kernel"
_OUTPUT = r"(.*/)?(mlp/output/|experts/output_)kernel"
_HIDDEN_BIAS = r"(.*/)?(mlp/hidden/|experts/hidden_)bias"
_OUTPUT_BIAS = r"(.*/)?(mlp/output/|experts/output_)bias"
_BIAS = r"(.*/)?(\w+_)?bias"
_EMBEDDINGS = r"(.*/)?(reverse_)?embeddings"
_TEXT_POSITIONS = r"(.*/)?text_positions/embedding"
_IMAGE_POSITIONS = r"(.*/)?(position_embedding/embedding|class_token/token)"
_PATCHES = r"(.*/)?patch_embedding/kernel"


def _gpt2(config):
    """GPT-2 and nanoGPT: 0.02, and less for what adds to the residual stream."""
    residual = RandomNormal(stddev=0.02 / math.sqrt(2 * config.num_layers))
    return {
        _ATTENTION_OUTPUT: residual,
        _OUTPUT: residual,
        **{name: RandomNormal(stddev=0.02) for name in (_QUERY_KEY_VALUE, _HIDDEN)},
        **{name: RandomNormal(stddev=0.02) for name in (_EMBEDDINGS, _TEXT_POSITIONS)},
        _BIAS: "zeros",
    }


def _llama(config):
    """LLaMA in transformers, and MoE++, whose constant experts keep N(0, 1)."""
    return {r".*(kernel|embeddings)": RandomNormal(stddev=0.02)}


def _mixer(config):
    """MLP-Mixer: Flax's defaults."""
    kernels = r"(.*/)?(hidden|output|experts/hidden_|experts/output_)/?kernel"
    return {kernels: "lecun_normal", _BIAS: "zeros"}


def _mumoe_mixer(config):
    """The muMoE paper's mixers: PyTorch's linear stem."""
    patches = config.patch_size
    height, width = (patches, patches) if isinstance(patches, int) else patches
    stem = _linear(height * width * config.image_shape[-1])
    return {_PATCHES: stem, r"patch_embedding/bias": stem}


def _clip_image(config):
    """CLIP leaves its image tower's blocks as PyTorch's layers start."""
    width = config.hidden_dim
    return {
        # One matrix (3 D, D) of queries, keys and values, Glorot uniform.
        _QUERY_KEY_VALUE: _uniform(math.sqrt(6 / (4 * width))),
        _ATTENTION_OUTPUT: _linear(width),
        _HIDDEN: _linear(width),
        _HIDDEN_BIAS: _linear(width),
        _OUTPUT: _linear(config.mlp_dim),
        _OUTPUT_BIAS: _linear(config.mlp_dim),
        _PATCHES: keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform"),
        _IMAGE_POSITIONS: RandomNormal(stddev=width**-0.5),
    }


def _clip_text(config):
    """CLIP's text tower, scaled by width and depth."""
    width = config.hidden_dim
    residual = RandomNormal(stddev=width**-0.5 * (2 * config.num_layers) ** -0.5)
    return {
        _QUERY_KEY_VALUE: RandomNormal(stddev=width**-0.5),
        _ATTENTION_OUTPUT: residual,
        _HIDDEN: RandomNormal(stddev=(2 * width) ** -0.5),
        _HIDDEN_BIAS: _linear(width),
        _OUTPUT: residual,
        _OUTPUT_BIAS: _linear(config.mlp_dim),
        _EMBEDDINGS: RandomNormal(stddev=0.02),
        _TEXT_POSITIONS: RandomNormal(stddev=0.01),
    }


def _siglip(config):
    """SigLIP in big_vision: ViT's, with larger positions and token embeddings."""
    normal = RandomNormal(stddev=config.hidden_dim**-0.5)
    positions = r"(.*/)?position_embedding/embedding"
    return dict.fromkeys((_EMBEDDINGS, _TEXT_POSITIONS, positions), normal)


def _limoe(config):
    """V-MoE's, with the token embeddings of its released text tower."""
    return {
        _EMBEDDINGS: RandomNormal(stddev=config.hidden_dim**-0.5),
        _TEXT_POSITIONS: RandomNormal(stddev=0.02),
    }


def _uniform(limit):
    return RandomUniform(-limit, limit)


def _linear(fan_in):
    """PyTorch's `Linear`, kernel and bias alike."""
    return _uniform(1 / math.sqrt(fan_in))


INITIALIZATIONS: dict[str, Callable] = {
    "clip_image": _clip_image,
    "clip_text": _clip_text,
    "gpt2": _gpt2,
    "limoe": _limoe,
    "llama": _llama,
    "mixer": _mixer,
    "mumoe_mixer": _mumoe_mixer,
    "siglip": _siglip,
}


def check_initialization(value: Any) -> Any:
    """Returns the argument `initialization` as plain values."""
    if value is None or isinstance(value, str):
        return value and check_one_of("initialization", value, sorted(INITIALIZATIONS))
    if not isinstance(value, dict):
        raise ValueError(
            "Expected initialization to be None, a name, or a dict from patterns of "
            f"weight paths to initializers; received: initialization={value!r}"
        )
    for pattern in value:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                "Expected initialization to map patterns of weight paths; received: "
                f"{pattern!r} ({error})"
            ) from None
    return {
        pattern: keras.initializers.serialize(
            check_initializer("initialization", initializer)
        )
        for pattern, initializer in value.items()
    }


def initialization_rules(config: Any) -> dict[str, Any]:
    """Patterns of weight paths to initializers, by a backbone's config."""
    value = getattr(config, "initialization", None)
    if not isinstance(value, str):
        return value or {}
    try:
        return INITIALIZATIONS[value](config)
    except AttributeError as error:
        raise ValueError(
            f"Expected an initialization for {type(config).__name__}; received: "
            f"initialization={value!r} ({error})"
        ) from None


def warn_of_unused(config: Any, used: set[str]) -> None:
    """Warns of patterns of the user's own that no weight's path matched."""
    value = getattr(config, "initialization", None)
    if isinstance(value, dict) and (unused := [x for x in value if x not in used]):
        warnings.warn(
            f"No weight has a path like these patterns of initialization: {unused}. "
            "Paths are those of `backbone.weights`, such as block_0/mlp/hidden/kernel",
            stacklevel=4,
        )
