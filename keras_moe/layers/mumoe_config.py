"""Which blocks of an encoder are muMoE, in which every expert takes part.

Axes: I inputs, H mlp, E experts of all levels.
"""

import dataclasses
from typing import Any

import keras

from keras_moe.checks import check_argument_names, check_integer
from keras_moe.layers import activations
from keras_moe.layers.block_config import BlockConfig
from keras_moe.layers.moe_config import MoEConfig, plain_router
from keras_moe.layers.moe_layers import plain_moe_layers, resolve_moe_layers
from keras_moe.layers.mumoe_block import MuMoEBlock

# Selects this kind of config in the place of a router's name.
MUMOE = "mumoe"
# Field -> argument of `MuMoEBlock`; in `router_options`, too, these have the layer's
# names.
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
class MuMoEConfig(BlockConfig):
    """The muMoE blocks of an encoder: which, how many experts, how factorised.

    Args:
        moe_layers: blocks that are muMoE: indices from 0, `"every_1"`, `"last_2"`, or
            None; see `keras_moe.layers.resolve_moe_layers`.
        num_experts: N, or (N_1, ..., N_L) for L levels of hierarchy.
        expert_mlp_dim: H of each expert; None takes the encoder's `mlp_dim`.
        expert_activation: activation between the two layers; None takes the encoder's.
        factorization: factorization of `keras_moe.layers.MultilinearExperts`.
        rank: rank of `keras_moe.layers.MuMoEBlock`.
        input_norm: whether the input of a block's first layer is normalised.
        gate_activation: activation of `keras_moe.layers.ExpertCoefficients`.
        gate_normalization: normalization of `keras_moe.layers.ExpertCoefficients`.
        expert_use_bias: whether the experts have biases.
        expert_noise: noise between the experts, see
            `keras_moe.layers.MultilinearExperts`.

    Raises:
        ValueError: if a field is out of range.

    Reference:
        *Multilinear Mixture of Experts*, section 4.3.

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

    def __post_init__(self):
        if self.expert_mlp_dim is not None:
            check_integer("expert_mlp_dim", self.expert_mlp_dim)
        # The layer checks its arguments, and says how they are kept.
        checked = self._block(1, "gelu", None).get_config()
        values = {field: checked[name] for field, name in _BLOCK_ARGUMENTS.items()}
        levels = checked["num_experts"]
        values.update(
            moe_layers=plain_moe_layers(self.moe_layers),
            num_experts=levels[0] if len(levels) == 1 else list(levels),
            expert_activation=activations.plain(self.expert_activation),
        )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def router(self) -> str:
        """`"mumoe"`, by which overrides select this kind of config."""
        return MUMOE

    @property
    def router_options(self) -> dict:
        """The arguments of `MuMoEBlock` by their own names."""
        return {name: getattr(self, f) for f, name in _BLOCK_ARGUMENTS.items()}

    def to_dict(self) -> dict:
        """The fields as plain values, and `"router": "mumoe"`."""
        return {"router": MUMOE, **super().to_dict()}

    @classmethod
    def from_dict(cls, config: dict) -> "MuMoEConfig":
        """A config of `to_dict`'s result; fields that are left out have their defaults.

        Args:
            config: values by field. `router_options`, a dict of `MuMoEBlock`'s
                arguments, stands for the fields of these arguments.

        Raises:
            ValueError: as `replace`.
        """
        config = {name: value for name, value in config.items() if name != "router"}
        options = config.pop("router_options", None) or {}
        check_argument_names(
            options, list(_BLOCK_ARGUMENTS.values()), "MuMoEBlock in an encoder"
        )
        for field, name in _BLOCK_ARGUMENTS.items():
            if name in options:
                config[field] = options[name]
        return super().from_dict(config)

    def feed_forwards(self, encoder: Any) -> list[keras.layers.Layer]:
        """The feed-forward layers of an encoder's blocks, not built.

        Args:
            encoder: `keras_moe.layers.EncoderSpec`.

        Returns:
            An `MLP` or a `MuMoEBlock` for each block.
        """
        indices = resolve_moe_layers(self.moe_layers, encoder.num_layers)
        return [
            self.block(encoder, self.expert_mlp_dim or encoder.mlp_dim)
            if index in indices
            else encoder.mlp(index)
            for index in range(encoder.num_layers)
        ]

    def block(self, encoder: Any, mlp_dim: int) -> MuMoEBlock:
        """A muMoE block for an encoder's feed-forward layer or token mixer, not built.

        Args:
            encoder: `keras_moe.layers.EncoderSpec`.
            mlp_dim: H.
        """
        return self._block(
            mlp_dim, self.expert_activation or encoder.activation, encoder.dtype
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


def moe_config(moe: Any) -> MoEConfig | MuMoEConfig | None:
    """The config of an encoder's `moe` argument.

    Args:
        moe: `MoEConfig`, `MuMoEConfig`, None, or a dict of either's fields, of which
            `"router": "mumoe"` makes the latter.

    Raises:
        ValueError: if it is none of these, or a field is unknown or out of range.

    Example:

    >>> from keras_moe.layers import moe_config
    >>> moe_config({"router": "mumoe", "num_experts": 8}).factorization
    'cp'
    """
    if moe is None or isinstance(moe, (MoEConfig, MuMoEConfig)):
        return moe
    if not isinstance(moe, dict):
        raise ValueError(
            "Expected moe to be None, a MoEConfig, a MuMoEConfig or a dict of fields; "
            f"received: moe={moe!r}"
        )
    is_mumoe = moe.get("router") == MUMOE
    return (MuMoEConfig if is_mumoe else MoEConfig).from_dict(moe)


def updated_moe(moe: Any, changes: dict) -> MoEConfig | MuMoEConfig | None:
    """A config with other fields, also where `router` changes its kind.

    Args:
        moe: argument of `moe_config`; None is a dense encoder.
        changes: new values by field, of either kind. Another router drops
            `router_options`. Another kind keeps the blocks, and the number, size and
            activation of their experts.

    Returns:
        The config; None for a dense encoder whose fields all have their defaults.

    Raises:
        ValueError: if the resulting kind has no such field, or a value is out of range.

    Example:

    >>> from keras_moe.layers import MoEConfig, updated_moe
    >>> updated_moe(MoEConfig(num_experts=8), {"router": "mumoe"}).num_experts
    8
    """
    moe = moe_config(moe)
    if moe is None:
        moe = MoEConfig(moe_layers=None)
    fields = moe.to_dict()
    router = changes.get("router", moe.router)
    if router != MUMOE:
        # A class or a layer, too, may be the router that is there.
        router = plain_router(router)
        changes = {**changes, "router": router} if "router" in changes else changes
    cls = MuMoEConfig if router == MUMOE else MoEConfig
    is_other_kind = not isinstance(moe, cls)
    if router != moe.router or "router_options" in changes:
        # The options are another router's, or are replaced as a whole; so are the
        # fields that stand for options of muMoE.
        fields.pop("router_options", None)
        if is_other_kind or isinstance(moe, MuMoEConfig):
            for name in _BLOCK_ARGUMENTS:
                fields.pop(name, None)
    if is_other_kind:
        fields = {name: fields[name] for name in cls.field_names() if name in fields}
        fields.pop("router", None)
    changed = cls.from_dict({**fields, **changes})
    return None if changed == MoEConfig(moe_layers=None) else changed
