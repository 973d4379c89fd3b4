"""Two muMoE layers, in the place of a dense MLP.

Axes: B batch, I inputs, H mlp, O units, E experts of all levels, L levels.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_bool, check_integer
from keras_moe.layers import activations
from keras_moe.layers.expert_coefficients import ExpertCoefficients
from keras_moe.layers.multilinear_experts import (
    MultilinearExperts,
    dense_parameters,
    matching_rank,
    resolved_rank,
)
from keras_moe.layers.mumoe_base import MuMoEBase


@keras.saving.register_keras_serializable("keras_moe")
class MuMoEBlock(MuMoEBase):
    """Two muMoE layers with shared coefficients and GELU between them.

    Args:
        mlp_dim: H, the units of the first layer.
        units: O; None takes the inputs' size.
        num_experts: N, or (N_1, ..., N_L) for L levels of hierarchy.
        factorization: factorization of both layers, see `MuMoE`.
        rank: rank of both layers, see `MuMoE`; a share is one of the block's I, and
            `"match_dense"` matches the dense MLP, the gate counted.
        hidden_activation: activation between the layers; `"gelu"` is the exact form.
        input_norm: whether the input of the first layer is normalised, but not the
            gate's.
        activation: activation of the gate, see `MuMoE`.
        normalization: normalization of the gate, see `MuMoE`.
        use_bias: whether the experts have biases.
        expert_noise: noise between the experts, see `MuMoE`.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: (..., I).
        mask: boolean (...), False for padding, which gets zeros and has no part in the
            batch statistics.
        modality_ids: integers (...), which change nothing: every expert takes part.
        training: whether batch statistics are those of the batch.

    Output shape:
        `(outputs, Routing)`: (..., O), and the record of the coefficients (..., E).

    Raises:
        ValueError: as `MuMoE`.

    Reference:
        *Multilinear Mixture of Experts*, section 4.3.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import MuMoEBlock
    >>> outputs, routing = MuMoEBlock(16, num_experts=4, rank=8)(np.ones((2, 3, 6)))
    >>> tuple(outputs.shape)
    (2, 3, 6)
    """

    def __init__(
        self,
        mlp_dim: int,
        units: int | None = None,
        num_experts: Any = 64,
        factorization: str | None = "cp",
        rank: Any = "match_dense",
        hidden_activation: Any = "gelu",
        input_norm: bool = False,
        activation: Any = "entmax",
        normalization: str | None = "batch",
        use_bias: bool = True,
        expert_noise: float = 1.0,
        **kwargs,
    ):
        super().__init__(num_experts, activation, normalization, input_norm, **kwargs)
        self.supports_masking = True
        self.mlp_dim = check_integer("mlp_dim", mlp_dim)
        self.units = units if units is None else check_integer("units", units)
        self.hidden_activation = activations.get(hidden_activation)
        self._options = {
            "num_experts": self.gate.num_experts,
            "factorization": factorization,
            "rank": rank,
            "use_bias": check_bool("use_bias", use_bias),
            "expert_noise": expert_noise,
        }
        # `MultilinearExperts` checks the arguments.
        self._options["rank"] = self._layer(self.mlp_dim, None, rank).rank

    def _layer(self, units, name, rank):
        return MultilinearExperts(
            units, dtype=self.dtype_policy, name=name, **{**self._options, "rank": rank}
        )

    def unbuilt_experts(self, shape: tuple[int, int]) -> dict:
        """Both layers of experts, not built, with the shapes of their inputs.

        Args:
            shape: (num_rows, dim).
        """
        num_rows, dim = shape
        rank, hidden, units = self._options["rank"], self.mlp_dim, self.units or dim
        if rank == "match_dense":
            bias = self._options["use_bias"]
            budget = dense_parameters((dim, hidden)) + dense_parameters((hidden, units))
            rank = matching_rank(
                self._options["factorization"],
                self.gate.num_experts,
                [(dim + bias, hidden), (hidden + bias, units)],
                budget - self.gate.cost((1, dim)).parameters,
            )
        # Shares are those of the block's inputs in both layers.
        rank = resolved_rank(rank, dim)
        return {
            self._layer(hidden, "hidden", rank): shape,
            self._layer(units, "output", rank): (num_rows, hidden),
        }

    def build(self, input_shape):
        self.hidden, self.output_experts = self.unbuilt_experts(input_shape[-2:])
        self.gate.build(input_shape)
        if self.norm is not None:
            self.norm.build(input_shape)
        self.hidden.build(input_shape)
        self.output_experts.build((*input_shape[:-1], self.mlp_dim))

    def call(
        self,
        inputs: Any,
        mask: Any = None,
        modality_ids: Any = None,
        training: bool | None = None,
    ) -> tuple[Any, Any]:
        x, logits, projected = self.project(inputs, self.hidden)
        coefficients, routing, sources = self.gate(
            inputs, training=training, logits=logits, mask=mask, with_sources=True
        )
        x = self.hidden(x, coefficients, projected=projected, sources=sources)
        x = self.hidden_activation(x)
        x = self.output_experts(x, coefficients, sources=sources)
        if mask is not None:
            x = ops.where(ops.expand_dims(ops.cast(mask, "bool"), -1), x, 0)
        return x, routing

    def compute_output_spec(self, inputs, mask=None, modality_ids=None, training=None):
        _, routing = self.gate.compute_output_spec(inputs)
        shape = (*inputs.shape[:-1], self.units or inputs.shape[-1])
        return keras.KerasTensor(shape, self.compute_dtype), routing

    def ablated(self, inputs: Any, experts: Any) -> Any:
        """The outputs as if one expert's weights were zero, one for each example.

        The expert is left out of both layers. Nothing else changes: the other
        coefficients stay as they are.

        Args:
            inputs: (B, ..., I).
            experts: integers (B, L), the place of each example's expert at each level.

        Returns:
            (B, ..., O).

        Reference:
            *Multilinear Mixture of Experts*, section 4.1.2.
        """
        coefficients, _ = self.gate(inputs)
        between = (1,) * (len(inputs.shape) - 2)
        experts = ops.reshape(experts, (-1, *between, experts.shape[-1]))
        x = inputs if self.norm is None else self.norm(inputs)
        x = self.hidden.ablated(x, coefficients, experts)
        x = self.hidden_activation(x)
        return self.output_experts.ablated(x, coefficients, experts)

    @property
    def router(self) -> ExpertCoefficients:
        """The layer that gives each token its experts, like an MoE layer's `router`."""
        return self.gate

    def get_config(self):
        config = super().get_config()
        config.update(
            mlp_dim=self.mlp_dim,
            units=self.units,
            **self._options,
            hidden_activation=activations.serialize(self.hidden_activation),
            input_norm=self.input_norm,
            activation=activations.serialize(self.gate.activation),
            normalization=self.gate.normalization,
        )
        return config
