"""The arguments that the blocks of a tower share, what they build, and how it starts.

Axes: N tokens, D hidden, H mlp, L layers.
"""

import copy
import dataclasses
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras.initializers import RandomNormal, RandomUniform

from keras_moe import _checks
from keras_moe._types import Config, DType
from keras_moe.layers import activations
from keras_moe.layers.block import Block, MoEBlock
from keras_moe.layers.mlp import MLP
from keras_moe.layers.moe_config import moe_config
from keras_moe.layers.normalization import NORMS

# Random sites per block: dropout, token mixer, feed-forward layer, router.
_SITES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Encoder arguments shared by all backbones.

    Args:
        hidden_dim: width D of tokens.
        num_layers: number of blocks.
        mlp_dim: H of the dense feed-forward layers.
        activation: activation of the feed-forward layers.
        dropout_rate: dropout rate on embeddings, token mixers and dense MLPs.
        stochastic_depth: drop rate of the last block; rates grow linearly from 0.
        layer_norm_epsilon: epsilon of all normalisations.
        layer_scale_initial_value: initial value of each `LayerScale`; None for none.
        norm: `"layer"`, `"rms"` or `"plain_rms"` normalisation in the blocks and after
            them; the last has no parameters in the blocks.
        gated_mlp: whether dense feed-forward layers are gated, as in LLaMA.
        use_bias: whether attention, dense MLPs and the blocks' layer norms have biases.
            Experts have `expert_use_bias`.
        moe: `MoEConfig`, `MuMoEConfig` or a dict of fields; None for a dense model.
        rematerialize: whether the backward pass recomputes the blocks, to save memory.
        seed: seed of initial weights, noise and dropout; None for Keras's global seed.
        initialization: how weights start: None as in ViT and V-MoE, or the name of
            another published code: `"clip_image"`, `"clip_text"`, `"gpt2"`, `"limoe"`,
            `"llama"` (MoE++'s language models, too), `"mixer"`, `"mumoe_mixer"` or
            `"siglip"`. A dict maps patterns of weight paths to initializers, such as
            `{".*/mlp/hidden/kernel": "he_normal"}`; the first that matches is used.

    Example:

    >>> from keras_moe.layers import TowerConfig
    >>> TowerConfig(num_layers=2, moe={"num_experts": 4}).moe.num_experts
    4
    """

    hidden_dim: int = 768
    num_layers: int = 12
    mlp_dim: int = 3072
    activation: Any = "gelu_tanh"
    dropout_rate: float = 0.0
    stochastic_depth: float = 0.0
    layer_norm_epsilon: float = 1e-6
    layer_scale_initial_value: float | None = None
    norm: str = "layer"
    gated_mlp: bool = False
    use_bias: bool = True
    moe: Any = None
    rematerialize: bool = False
    seed: int | None = None
    initialization: Any = None

    def __post_init__(self):
        moe = moe_config(self.moe)
        # Mistyped numbers would take minutes to build.
        num_layers = _checks.check_integer("num_layers", self.num_layers, maximum=1000)
        self._set(
            hidden_dim=_checks.check_integer("hidden_dim", self.hidden_dim),
            num_layers=num_layers,
            mlp_dim=_checks.check_integer("mlp_dim", self.mlp_dim),
            activation=activations.plain(self.activation),
            moe=moe and moe.for_layers(num_layers),
            initialization=check_initialization(self.initialization),
        )
        _checks.check_dropout("dropout_rate", self.dropout_rate)
        _checks.check_dropout("stochastic_depth", self.stochastic_depth)
        _checks.check_positive("layer_norm_epsilon", self.layer_norm_epsilon)
        _checks.check_seed("seed", self.seed)
        _checks.check_one_of("norm", self.norm, NORMS)
        for name in ("gated_mlp", "use_bias"):
            _checks.check_bool(name, getattr(self, name))

    def _set(self, **values):
        """Sets fields of the frozen dataclass; for `__post_init__` only."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def to_dict(self) -> dict:
        """Returns the arguments as plain values that construct an equal config."""
        names = [field.name for field in dataclasses.fields(self)]
        values = {name: copy.deepcopy(getattr(self, name)) for name in names}
        return {**values, "moe": self.moe and self.moe.to_dict()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerSpec(TowerConfig):
    """`TowerConfig` for a given number of tokens; builds the blocks.

    Args:
        num_tokens: N, tokens per example.
        dtype: dtype policy.
        **kwargs: arguments of `TowerConfig`.

    Example:

    >>> from keras_moe.layers import TowerSpec, MoEConfig, Attention
    >>> spec = TowerSpec(num_layers=2, num_tokens=9, mlp_dim=16, moe=MoEConfig())
    >>> blocks = spec.blocks(lambda index: Attention(num_heads=2, key_dim=4))
    >>> [type(block).__name__ for block in blocks]
    ['Block', 'MoEBlock']
    """

    num_tokens: int
    dtype: Any = None

    @classmethod
    def of(
        cls, config: TowerConfig, num_tokens: int, dtype: DType | None
    ) -> "TowerSpec":
        """Makes the spec from a backbone's config."""
        shared = [field.name for field in dataclasses.fields(TowerConfig)]
        values = {name: getattr(config, name) for name in shared}
        return cls(num_tokens=num_tokens, dtype=dtype, **values)

    def seed_of(self, index: int, site: int) -> int | None:
        """Seed of site 0 block (index -1: embedding), 1 mixer, 2 experts, 3 router."""
        return None if self.seed is None else self.seed + _SITES * (index + 1) + site

    def mlp(self, index: int) -> MLP:
        """An unbuilt dense feed-forward layer for a block."""
        return MLP(
            self.mlp_dim,
            self.activation,
            self.dropout_rate,
            self.seed_of(index, 2),
            gated=self.gated_mlp,
            use_bias=self.use_bias,
            dtype=self.dtype,
            name="mlp",
        )

    def blocks(
        self, token_mixer: Callable[[int], keras.layers.Layer]
    ) -> tuple[Block, ...]:
        """The unbuilt blocks; `token_mixer(index)` makes a block's token mixer."""
        if self.moe is None:
            feed_forwards = [self.mlp(index) for index in range(self.num_layers)]
        else:
            feed_forwards = self.moe.feed_forwards(self)
        depth_step = self.stochastic_depth / max(self.num_layers - 1, 1)
        return tuple(
            (MoEBlock if hasattr(feed_forward, "router") else Block)(
                token_mixer(index),
                feed_forward,
                dropout=self.dropout_rate,
                layer_norm_epsilon=self.layer_norm_epsilon,
                seed=self.seed_of(index, 0),
                rematerialize=self.rematerialize,
                stochastic_depth=index * depth_step,
                layer_scale_initial_value=self.layer_scale_initial_value,
                norm=self.norm,
                use_bias=self.use_bias,
                feed_forward_norm=not hasattr(feed_forward, "router")
                or getattr(self.moe, "block_norm", True),
                dtype=self.dtype,
                name=f"block_{index}",
            )
            for index, feed_forward in enumerate(feed_forwards)
        )


# Initial values of published codes, as rules from patterns of weight paths.

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
    # One matrix (3 D, D) of queries, keys and values, Glorot uniform.
    limit = math.sqrt(6 / (4 * width))
    return {
        _QUERY_KEY_VALUE: RandomUniform(-limit, limit),
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


def _linear(fan_in):
    """PyTorch's `Linear`, kernel and bias alike."""
    limit = 1 / math.sqrt(fan_in)
    return RandomUniform(-limit, limit)


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


def check_initialization(value: object) -> str | Config | None:
    """Returns the argument `initialization` as plain values."""
    if value is None or isinstance(value, str):
        return value and _checks.check_one_of(
            "initialization", value, sorted(INITIALIZATIONS)
        )
    if not isinstance(value, dict):
        raise ValueError(
            "Expected initialization to be None, a name, or a dict from patterns of "
            f"weight paths to initializers; received: initialization={value!r}"
        )
    for pattern in value:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            expected = "initialization to map patterns of weight paths"
            raise _checks.unfit(expected, f"{pattern!r} ({error})") from None
    return {
        pattern: keras.initializers.serialize(
            _checks.check_initializer("initialization", initializer)
        )
        for pattern, initializer in value.items()
    }


def initialization_rules(config: object) -> dict[str, Any]:
    """Patterns of weight paths to initializers, by a backbone's config."""
    value = getattr(config, "initialization", None)
    if not isinstance(value, str):
        return value or {}
    try:
        return INITIALIZATIONS[value](config)
    except AttributeError as error:
        expected = f"an initialization for {type(config).__name__}"
        raise _checks.unfit(expected, f"initialization={value!r} ({error})") from None


def warn_of_unused(config: object, used: set[str]) -> None:
    """Warns of patterns of the user's own that no weight's path matched."""
    value = getattr(config, "initialization", None)
    if isinstance(value, dict) and (unused := [x for x in value if x not in used]):
        warnings.warn(
            f"No weight has a path like these patterns of initialization: {unused}. "
            "Paths are those of `backbone.weights`, such as block_0/mlp/hidden/kernel",
            stacklevel=4,
        )
