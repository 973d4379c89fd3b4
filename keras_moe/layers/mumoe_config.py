"""Which blocks of an encoder are muMoE, in which every expert takes part.

Axes: I inputs, H mlp, E experts of all levels.
"""

import dataclasses
from typing import Any

import keras

from keras_moe._checks import check_bool, check_integer
from keras_moe.layers import activations
from keras_moe.layers.moe_config import (
    MixtureConfig,
    MoEConfig,
    plain_moe_layers,
    resolve_moe_layers,
)
from keras_moe.layers.mumoe import MuMoEBlock

# Selects this config where other models name a router.
MUMOE = "mumoe"
# Field -> argument of `MuMoEBlock`.
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
        check_integer("expert_mlp_dim", self.expert_mlp_dim, optional=True)
        check_bool("block_norm", self.block_norm)
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

    def feed_forwards(self, encoder: Any) -> list[keras.layers.Layer]:
        """One unbuilt `MLP` or `MuMoEBlock` per block of the `TowerSpec`."""
        indices = resolve_moe_layers(self.moe_layers, encoder.num_layers)
        return [
            self.block(encoder, self.expert_mlp_dim or encoder.mlp_dim)
            if index in indices
            else encoder.mlp(index)
            for index in range(encoder.num_layers)
        ]

    def block(self, encoder: Any, mlp_dim: int) -> MuMoEBlock:
        """An unbuilt block, for a feed-forward layer or a token mixer."""
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
    """Makes the config for an encoder's `moe` argument.

    Args:
        moe: None, `MoEConfig`, `MuMoEConfig`, or a dict of fields; with `"router":
            "mumoe"` these are `MuMoEConfig`'s.

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
