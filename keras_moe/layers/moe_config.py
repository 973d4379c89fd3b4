"""Which blocks of a tower are mixtures of experts, and how they are built.

Axes: N tokens, S group_size, E experts, C capacity, H mlp.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Self

import keras
import numpy as np

from keras_moe import _checks, losses, routers
from keras_moe._types import Config
from keras_moe.layers import activations
from keras_moe.layers.experts import Experts
from keras_moe.layers.mlp import MLP
from keras_moe.layers.moe import MoE
from keras_moe.layers.mumoe import MuMoEBlock
from keras_moe.ops.expert_types import ExpertTypes, expert_types
from keras_moe.routers._pruned import METHODS, pruned_router
from keras_moe.routers.names import class_for_types, router_name, split_router
from keras_moe.routers.router import Router, router_arguments

# A default that depends on the router or the blocks.
AUTO = "auto"
# Gating residuals even in the first MoE block.
EVERY = "every_block"
# Router arguments that come from the encoder or from other fields of the config.
_NOT_OF_ROUTER = (
    "num_experts",
    "zero_experts",
    "copy_experts",
    "constant_experts",
    "gating_residual",
    "seed",
)
# The router of `MuMoEConfig`, which selects it in overrides.
MUMOE = "mumoe"
# Field of `MuMoEConfig` -> argument of `MuMoEBlock`.
_BLOCK_ARGUMENTS = {
    "factorization": "factorization",
    "rank": "rank",
    "input_norm": "input_norm",
    "gate_activation": "activation",
    "gate_normalization": "normalization",
    "expert_use_bias": "use_bias",
    "expert_noise": "expert_noise",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Base class of `MoEConfig` and `MuMoEConfig`."""

    moe_layers: Any
    # Number of modalities that the routers distinguish by `modality_ids`.
    modality_count = None
    # M, the members of an ensemble.
    ensemble_size = 1

    @classmethod
    def field_names(cls) -> list[str]:
        """Names of the config's fields."""
        return [field.name for field in dataclasses.fields(cls)]

    def replace(self, **changes: object) -> Self:
        """Returns a copy with some fields changed."""
        _checks.check_argument_names(changes, self.field_names(), type(self).__name__)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict:
        """Returns the fields as plain values; `from_dict` restores the config."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, config: dict) -> Self:
        """Makes a config from `to_dict`'s result; missing fields get defaults."""
        _checks.check_argument_names(config, cls.field_names(), cls.__name__)
        return cls(**config)

    def for_layers(self, num_layers: int) -> Self:
        """Resolves indices of MoE blocks for an encoder with `num_layers` blocks."""
        if self.moe_layers is None or isinstance(self.moe_layers, str):
            return self
        indices = resolve_moe_layers(self.moe_layers, num_layers)
        return self.replace(moe_layers=list(indices))

    def _set(self, **values):
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def feed_forwards(self, tower: Any) -> list[keras.layers.Layer]:
        """One unbuilt feed-forward layer per block of the `TowerSpec`."""
        indices = resolve_moe_layers(self.moe_layers, tower.num_layers)
        return [
            self._mixture(tower, index, indices)
            if index in indices
            else tower.mlp(index)
            for index in range(tower.num_layers)
        ]

    def _mixture(self, tower, index, indices):
        """The mixture of block `index`, one of `indices`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(MixtureConfig):
    """Mixtures of experts of an encoder: which blocks, which experts, which router.

    Every backbone accepts it as `moe`. Presets accept its fields and router arguments:
    `from_preset("vmoe_b32", num_experts=8, num_selected_experts=1)`.

    With the router argument `ensemble_size=M` an image backbone is an efficient
    ensemble of M members. They share the blocks in front of the first mixture; from it
    on, the tokens are there M times, and each member's go to its own `num_experts` / M
    experts. Classifiers average the members' probabilities.

    Args:
        moe_layers: indices from 0, `"every_2"`, `"last_2"` or None (dense); see
            `resolve_moe_layers`.
        num_experts: E, feed-forward experts per block.
        router: name such as `"softmax_token_choice"`, dict such as `{"name": "soft",
            "num_slots": 2}` (see `keras_moe.routers.get`), or a `Router`, which is
            copied for each block with a different seed.
        expert_mlp_dim: H of each expert; None for the encoder's `mlp_dim`.
        examples_per_group: examples per training group; None for the whole batch.
        auxiliary_losses: dict from name to weight or options, such as `{"load_balance":
            {"weight": 0.01, "choices": "all"}}` or
            `keras_moe.losses.LIMOE_LOSSES["limoe_b16"]`; see `keras_moe.losses.get`.
            `"auto"` uses V-MoE's importance and load losses (load only with noise) for
            softmax token choice, MoE++'s for its router, and none otherwise.
        expert_dropout: dropout rate inside the experts.
        shared_expert_initialization: whether a layer's experts start equal; `"auto"` is
            True, as in V-MoE, except with MoE++'s router.
        dispatcher: `"index"` or `"einsum"`; see `keras_moe.layers.MoE`.
        zero_experts: number of MoE++ experts that output 0, in addition to
            `num_experts`. With zero, copy or constant experts, token choice becomes a
            `PathwayAwareRouter` with *MoE++*'s defaults: capacity factor 1.1, no noise,
            gating residuals, balance loss of weight 0.01, independently initialised
            experts.
        copy_experts: number of experts that output their input.
        constant_experts: number of experts that mix the token with a trained vector, or
            `"auto"`.
        gating_residual: whether MoE++'s router adds a map of the previous MoE block's
            logits; `"auto"` is True with zero-computation experts in several blocks.
            `"every_block"` gives the first one a map, too, which is never used: the
            released code has it.
        gated_experts: whether experts are gated. MoE++ uses SwiGLU: True, with
            `expert_use_bias=False` and `expert_activation="silu"`.
        expert_use_bias: whether the experts' layers have biases.
        expert_activation: activation of the experts; None for the encoder's.
        input_scale: factor on the experts' input; K in the released MoE++ code.
        shared_experts: number of experts, like the others, through which every token
            passes in addition, without a gate or a slot. Together they are one `MLP`.
        pruning: None, or a dict written by `keras_moe.analysis.prune_experts`.

    Reference: *Scaling Vision with Sparse Mixture of Experts*, section 3.1; *Routers in
    Vision Mixture of Experts*, section 2; *MoE++*, Table 2; *DeepSeekMoE*, section 3,
    for shared experts and a small `expert_mlp_dim`; *Sparse MoEs Meet Efficient
    Ensembles*, section 4, for `ensemble_size`.

    Example:

    >>> from keras_moe.layers import MoEConfig
    >>> moe = MoEConfig(num_experts=8, router={"name": "soft", "num_slots": 2})
    >>> MoEConfig.from_dict(moe.to_dict()) == moe
    True
    >>> moe.replace(num_experts=16).num_experts
    16
    """

    moe_layers: Any = "every_2"
    num_experts: int = 32
    router: Any = "softmax_token_choice"
    expert_mlp_dim: int | None = None
    examples_per_group: int | None = 8
    auxiliary_losses: Any = AUTO
    expert_dropout: float = 0.0
    shared_expert_initialization: Any = AUTO
    dispatcher: str = "index"
    zero_experts: int = 0
    copy_experts: int = 0
    constant_experts: Any = 0
    gating_residual: Any = AUTO
    gated_experts: bool = False
    expert_use_bias: bool = True
    expert_activation: Any = None
    input_scale: float = 1.0
    shared_experts: int = 0
    pruning: dict | None = None

    def __post_init__(self):
        for name in ("examples_per_group", "expert_mlp_dim"):
            checked = _checks.check_integer(name, getattr(self, name), optional=True)
            self._set(**{name: checked})
        for name in ("gated_experts", "expert_use_bias"):
            _checks.check_bool(name, getattr(self, name))
        _checks.check_positive("input_scale", self.input_scale)
        _checks.check_integer("shared_experts", self.shared_experts, minimum=0)
        for name in ("gating_residual", "shared_expert_initialization"):
            named = (AUTO, EVERY) if name == "gating_residual" else (AUTO,)
            if getattr(self, name) not in named:
                _checks.check_bool(name, getattr(self, name))
        router = self.router
        if isinstance(router, Router):
            router = self._take_layer(router)
        # Plain copies, because the caller's values may be mutable or not JSON.
        self._set(
            moe_layers=plain_moe_layers(self.moe_layers),
            num_experts=self.expert_types.ffn,
            auxiliary_losses=_plain_losses(self.auxiliary_losses),
            expert_activation=activations.plain(self.expert_activation),
            pruning=_plain_pruning(self.pruning),
            router=self._plain_router(router),
        )

    def _take_layer(self, router):
        """Copies a router layer's expert counts; returns its class and arguments."""
        types = router.expert_types
        if self.num_experts not in (type(self).num_experts, types.ffn):
            expected = f"the num_experts={types.ffn} of the router"
            raise _checks.unfit(expected, num_experts=self.num_experts)
        if self.gating_residual == AUTO:
            self._set(gating_residual=router.gating_residual)
        self._set(num_experts=types.ffn, **types.arguments())
        names = {*router_arguments(type(router))} - {*_NOT_OF_ROUTER}
        config = router.get_config()
        return {"name": type(router), **{k: v for k, v in config.items() if k in names}}

    def _plain_router(self, router):
        """The router's name, or a dict of name and non-default arguments."""
        name, arguments = split_router(router)
        cls, defaults = self._router_defaults(name)
        _checks.check_argument_names(
            arguments, list(defaults), f"{cls.__name__} in an encoder"
        )
        arguments = {
            key: value
            for key, value in plain_value(arguments).items()
            if value is not None or defaults[key] is not None
        }
        name = name if isinstance(name, str) else router_name(name)
        return {"name": name, **arguments} if arguments else name

    def _router_defaults(self, name):
        """The router's class and the defaults of arguments that can be set."""
        cls, named = class_for_types(
            name, self.expert_types, self.gating_residual in (True, EVERY)
        )
        defaults = {**router_arguments(cls), **named}
        return cls, {k: v for k, v in defaults.items() if k not in _NOT_OF_ROUTER}

    @property
    def router_class(self) -> type[Router]:
        """Class of the blocks' routers."""
        return self._router_defaults(split_router(self.router)[0])[0]

    @property
    def router_arguments(self) -> dict[str, Any]:
        """The router's arguments, including defaults."""
        name, arguments = split_router(self.router)
        return {**self._router_defaults(name)[1], **arguments}

    @property
    def expert_types(self) -> ExpertTypes:
        """Number of experts of each type in a block."""
        return expert_types(
            self.num_experts,
            self.zero_experts,
            self.copy_experts,
            self.constant_experts,
        )

    @property
    def modality_count(self) -> int | None:
        """M if the routers distinguish modalities and need `modality_ids`."""
        # Read from the arguments: constructing a router would advance Python's random
        # state.
        arguments = self.router_arguments
        if self.ensemble_size > 1:
            # The tower knows whose token is whose.
            return None
        if arguments.get("num_modalities") is not None:
            return arguments["num_modalities"]
        for name in ("expert_pools", "priority"):
            if isinstance(arguments.get(name), list):
                return len(arguments[name])
        return None

    @property
    def ensemble_size(self) -> int:
        """M, the members of an ensemble, by the router's argument; 1 for none."""
        if self.moe_layers is None:
            return 1
        return self.router_arguments.get("ensemble_size") or 1

    def feed_forwards(self, tower: Any) -> list[keras.layers.Layer]:
        indices = resolve_moe_layers(self.moe_layers, tower.num_layers)
        names = [f"block_{index}" for index in indices]
        for name in (self.pruning or {"kept_experts": ()})["kept_experts"]:
            _checks.check_one_of("pruned block", name, names)
        return super().feed_forwards(tower)

    def _mixture(self, tower, index, indices):
        arguments = {"seed": tower.seed_of(index, 3)}
        residual = self.gating_residual
        if residual == AUTO:
            residual = self.expert_types.zero_computation > 0 and len(indices) > 1
        if residual:
            arguments["gating_residual"] = residual == EVERY or index != indices[0]
        router = routers.get(self.router, self.expert_types, **arguments)
        pruning = self.pruning or {"kept_experts": {}}
        kept = pruning["kept_experts"].get(f"block_{index}")
        if kept is not None:
            router = pruned_router(router, kept, pruning["method"], pruning["removed"])
        shared = self.shared_expert_initialization
        if shared == AUTO:
            shared = router.shares_expert_initialization
        auxiliary_losses = self.auxiliary_losses
        if auxiliary_losses == AUTO:
            auxiliary_losses = router.default_auxiliary_losses()
        group_size = None
        if self.examples_per_group is not None:
            group_size = self.examples_per_group * tower.num_tokens
            group_size *= router.ensemble_size
        mlp_dim = self.expert_mlp_dim or tower.mlp_dim
        experts = Experts(
            len(router.expert_columns),
            mlp_dim,
            activation=self.expert_activation or tower.activation,
            dropout=self.expert_dropout,
            shared_initialization=shared,
            gated=self.gated_experts,
            use_bias=self.expert_use_bias,
            seed=tower.seed_of(index, 2),
            dtype=tower.dtype,
            name="experts",
        )
        shared_experts = None
        if self.shared_experts:
            shared_experts = MLP(
                self.shared_experts * mlp_dim,
                activation=self.expert_activation or tower.activation,
                dropout=self.expert_dropout,
                gated=self.gated_experts,
                use_bias=self.expert_use_bias,
                seed=tower.seed_of(index, 2),
                dtype=tower.dtype,
                name="shared_experts",
            )
        return MoE(
            router,
            experts,
            group_size=group_size,
            auxiliary_losses=auxiliary_losses,
            dispatcher=self.dispatcher,
            input_scale=self.input_scale,
            shared_experts=shared_experts,
            dtype=tower.dtype,
            name="moe",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuMoEConfig(MixtureConfig):
    """The muMoE blocks of an encoder: which ones, how many experts, how factorised.

    Args:
        moe_layers: indices from 0, `"every_2"`, `"last_2"` or None (dense); see
            `resolve_moe_layers`.
        num_experts: N, or (N_1, ..., N_L) for L levels of hierarchy.
        expert_mlp_dim: H of each expert; None for the encoder's `mlp_dim`.
        expert_activation: activation between the two layers; None for the encoder's.
        factorization: see `keras_moe.layers.MultilinearExperts`.
        rank: see `keras_moe.layers.MuMoEBlock`.
        input_norm: whether the input of a block's first layer is normalised.
        gate_activation: `activation` of `keras_moe.layers.ExpertCoefficients`.
        gate_normalization: `normalization` of `keras_moe.layers.ExpertCoefficients`.
        expert_use_bias: whether the experts have biases.
        expert_noise: see `keras_moe.layers.MultilinearExperts`.
        block_norm: whether the gate reads tokens normalised by the block. If False, it
            reads them as they are, as in the released GPT-2 with `input_norm=True`.

    Reference: *Multilinear Mixture of Experts*, section 4.3.

    Example:

    >>> from keras_moe.layers import MuMoEConfig
    >>> moe = MuMoEConfig(moe_layers="every_1", num_experts=(8, 2), factorization="tr")
    >>> MuMoEConfig.from_dict(moe.to_dict()) == moe
    True
    """

    moe_layers: Any = "every_1"
    num_experts: Any = 64
    expert_mlp_dim: int | None = None
    expert_activation: Any = None
    factorization: str | None = "cp"
    rank: Any = "match_dense"
    input_norm: bool = False
    gate_activation: Any = "entmax"
    gate_normalization: str | None = "batch"
    expert_use_bias: bool = True
    expert_noise: float = 1.0
    block_norm: bool = True

    def __post_init__(self):
        _checks.check_integer("expert_mlp_dim", self.expert_mlp_dim, optional=True)
        _checks.check_bool("block_norm", self.block_norm)
        # The layer validates and standardises the arguments.
        checked = self._block(1, "gelu", None).get_config()
        values = {field: checked[name] for field, name in _BLOCK_ARGUMENTS.items()}
        levels = checked["num_experts"]
        values.update(
            moe_layers=plain_moe_layers(self.moe_layers),
            num_experts=levels[0] if len(levels) == 1 else list(levels),
            expert_activation=activations.plain(self.expert_activation),
        )
        self._set(**values)

    @property
    def router(self) -> str:
        """`"mumoe"`, which selects this kind of config in overrides."""
        return MUMOE

    def to_dict(self) -> dict:
        """Returns the fields as plain values, plus `"router": "mumoe"`."""
        return {"router": MUMOE, **super().to_dict()}

    @classmethod
    def from_dict(cls, config: dict) -> "MuMoEConfig":
        """Makes a config from `to_dict`'s result; missing fields get defaults."""
        return super().from_dict({k: v for k, v in config.items() if k != "router"})

    def _mixture(self, tower, index, indices):
        return self.block(tower, self.expert_mlp_dim or tower.mlp_dim)

    def block(self, tower: Any, mlp_dim: int) -> MuMoEBlock:
        """An unbuilt block, for a feed-forward layer or a token mixer."""
        return self._block(
            mlp_dim, self.expert_activation or tower.activation, tower.dtype
        )

    def _block(self, mlp_dim, hidden_activation, dtype):
        return MuMoEBlock(
            mlp_dim=mlp_dim,
            num_experts=self.num_experts,
            hidden_activation=hidden_activation,
            dtype=dtype,
            name="moe",
            **{name: getattr(self, field) for field, name in _BLOCK_ARGUMENTS.items()},
        )


def moe_config(moe: MixtureConfig | Config | None) -> MoEConfig | MuMoEConfig | None:
    """The config for an encoder's `moe` argument, which may be a dict of fields."""
    if moe is None or isinstance(moe, (MoEConfig, MuMoEConfig)):
        return moe
    if not isinstance(moe, dict):
        expected = "moe to be None, a MoEConfig, a MuMoEConfig or a dict of fields"
        raise _checks.unfit(expected, moe=moe)
    is_mumoe = moe.get("router") == MUMOE
    return (MuMoEConfig if is_mumoe else MoEConfig).from_dict(moe)


def plain_value(value: object) -> Any:
    """Copies nested plain data, serialising Keras objects."""
    if isinstance(value, dict):
        return {name: plain_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic)):
        # NumPy numbers are not JSON.
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return keras.saving.serialize_keras_object(value)


def _plain_losses(auxiliary_losses):
    if auxiliary_losses == AUTO:
        return AUTO
    checked = losses.get(auxiliary_losses)
    if isinstance(auxiliary_losses, dict):
        return plain_value(auxiliary_losses)
    return losses.serialize(checked)


def _plain_pruning(pruning):
    """Validates the field `pruning` and fills in defaults."""
    if pruning is None:
        return None
    if not isinstance(pruning, dict) or not isinstance(
        pruning.get("kept_experts"), dict
    ):
        raise ValueError(
            "Expected pruning to be None, or a dict with kept_experts, a dict from "
            f"blocks to experts; received: pruning={pruning!r}"
        )
    _checks.check_argument_names(
        pruning, ["method", "kept_experts", "removed"], "pruning"
    )
    pruning = {"method": METHODS[0], "removed": True, **plain_value(pruning)}
    _checks.check_one_of("method", pruning["method"], METHODS)
    _checks.check_bool("removed", pruning["removed"])
    for experts in pruning["kept_experts"].values():
        for expert in experts:
            _checks.check_integer("kept_experts", expert, 0)
    return pruning


def resolve_moe_layers(
    moe_layers: str | Iterable[int] | None, num_layers: int
) -> tuple[int, ...]:
    """Indices of the blocks whose feed-forward layer is a mixture of experts.

    Args:
        moe_layers: None for a dense network; indices from 0; `"every_n"` for blocks
            n - 1, 2 n - 1, ... (`"every_2"` is 1, 3, 5, ...); or `"last_n"` for the
            last n of `"every_2"`.
        num_layers: number of blocks.

    Returns: Sorted tuple of indices.

    Reference: *Scaling Vision with Sparse Mixture of Experts*, section 3.1 ("Every 2",
    "Last 2").

    Example:

    >>> from keras_moe.layers import resolve_moe_layers
    >>> resolve_moe_layers("every_2", 6), resolve_moe_layers("last_2", 8)
    ((1, 3, 5), (5, 7))
    """
    if moe_layers is None:
        return ()
    if isinstance(moe_layers, str):
        match = re.fullmatch(r"(every|last)_([1-9]\d*)", moe_layers)
        count = int(match[2]) if match else 0
        if match is None:
            indices = ()
        elif match[1] == "every":
            indices = range(count - 1, num_layers, count)
        else:
            indices = range(1, num_layers, 2)
            indices = indices[-count:] if count <= len(indices) else ()
    else:
        indices = sorted(_indices(moe_layers))
    if not indices or len({*indices}) < len(indices) or indices[-1] >= num_layers:
        raise ValueError(
            "Expected moe_layers to be different indices, 'every_n' or 'last_n' that "
            f"fit num_layers={num_layers}, or None; received: moe_layers={moe_layers!r}"
        )
    return tuple(indices)


def plain_moe_layers(moe_layers: str | Iterable[int] | None) -> str | list[int] | None:
    """Returns indices in `moe_layers` as a list of ints, after checking them."""
    if moe_layers is None or isinstance(moe_layers, str):
        return moe_layers
    return _indices(moe_layers)


def _indices(moe_layers):
    if not isinstance(moe_layers, Iterable):
        expected = "moe_layers to be None, indices, 'every_n' or 'last_n'"
        raise _checks.unfit(expected, moe_layers=moe_layers)
    return [_checks.check_integer("moe_layers", index, 0) for index in moe_layers]
