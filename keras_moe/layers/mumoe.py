"""muMoE: many experts in one factorised weight tensor, none of which is dropped.

Axes: I inputs, H mlp, O units, E experts of all levels.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_integer
from keras_moe.layers import activations
from keras_moe.layers.expert_coefficients import outer
from keras_moe.layers.multilinear_experts import (
    MultilinearExperts,
    dense_parameters,
    matching_rank,
)
from keras_moe.layers.mumoe_base import MuMoEBase


@keras.saving.register_keras_serializable("keras_moe")
class MuMoE(MuMoEBase):
    """A muMoE layer: coefficients from the input, and factorised experts mixed by them.

    Every expert takes part with its coefficient; entmax makes most of these zero.
    There is no capacity, no dropping and no auxiliary loss.

    Args:
        units: O.
        num_experts: N, or (N_1, ..., N_L) for L levels of hierarchy.
        factorization: factorization of `MultilinearExperts`.
        rank: rank of `MultilinearExperts`; `"match_dense"` counts the gate, too.
        match_shape: inputs and units of the dense layer for `"match_dense"`.
        activation: activation of `ExpertCoefficients`.
        normalization: normalization of `ExpertCoefficients`.
        use_bias: whether the experts have biases, see `MultilinearExperts`.
        expert_noise: noise between the experts, see `MultilinearExperts`.
        input_norm: whether the experts' input is normalised, but not the gate's, as in
            the released code.
        edited_outputs: units to which is added the offset `sum over n of a_n
            logit_offsets[n]` (equation 5): a number for each expert, zero at first and
            not trained, see `keras_moe.analysis.edit_expert_logits`.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: (..., I).
        training: whether batch statistics are those of the batch.

    Output shape:
        `(outputs, Routing)`: (..., O), and the record of the coefficients (..., E).

    Raises:
        ValueError: as the two layers; or if an edited output is no unit.

    Reference:
        *Multilinear Mixture of Experts*, section 3, and 4.2 for edits.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import MuMoE
    >>> layer = MuMoE(10, num_experts=16, rank=8)
    >>> outputs, routing = layer(np.ones((2, 3, 6), "float32"))
    >>> tuple(outputs.shape), tuple(routing.gates.shape)
    ((2, 3, 10), (2, 3, 16))
    """

    def __init__(
        self,
        units: int,
        num_experts: Any,
        factorization: str | None = "cp",
        rank: Any = "match_dense",
        match_shape: tuple[int, int] | None = None,
        activation: Any = "entmax",
        normalization: str | None = "batch",
        use_bias: bool = True,
        expert_noise: float = 1.0,
        input_norm: bool = False,
        edited_outputs: Any = (),
        **kwargs,
    ):
        super().__init__(num_experts, activation, normalization, input_norm, **kwargs)
        arguments = {
            "units": units,
            "num_experts": self.gate.num_experts,
            "factorization": factorization,
            "rank": rank,
            "match_shape": match_shape,
            "use_bias": use_bias,
            "expert_noise": expert_noise,
        }
        # `MultilinearExperts` checks and standardises them; the rank may depend on the
        # input.
        checked = MultilinearExperts(**arguments).get_config()
        self._arguments = {name: checked[name] for name in arguments}
        self.edited_outputs = _check_outputs(edited_outputs, self.units)

    @property
    def units(self) -> int:
        """O."""
        return self._arguments["units"]

    def build(self, input_shape):
        self.gate.build(input_shape)
        if self.norm is not None:
            self.norm.build(input_shape)
        (self.experts,) = self.unbuilt_experts(input_shape[-2:])
        self.experts.build(input_shape)
        if self.edited_outputs:
            self.logit_offsets = self.add_weight(
                name="logit_offsets",
                shape=(self.gate.expert_types.total, len(self.edited_outputs)),
                initializer="zeros",
                trainable=False,
                dtype="float32",
                autocast=False,
            )

    def unbuilt_experts(self, shape: tuple[int, int]) -> dict:
        """The layer of experts, not built, with the shape of its inputs.

        Args:
            shape: (num_rows, dim).
        """
        dim, arguments = shape[-1], dict(self._arguments)
        factorization, units = arguments["factorization"], arguments["units"]
        if arguments["rank"] == "match_dense" and factorization is not None:
            dense = arguments.pop("match_shape") or (dim, units)
            arguments["rank"] = matching_rank(
                factorization,
                arguments["num_experts"],
                [(dim + arguments["use_bias"], units)],
                dense_parameters(dense) - self.gate.cost((1, dim)).parameters,
            )
        experts = MultilinearExperts(
            dtype=self.dtype_policy, name="experts", **arguments
        )
        return {experts: shape}

    def call(self, inputs: Any, training: bool | None = None) -> tuple[Any, Any]:
        x, logits, projected = self.project(inputs, self.experts)
        coefficients, routing, sources = self.gate(
            inputs, training=training, logits=logits, with_sources=True
        )
        outputs = self.experts(x, coefficients, projected=projected, sources=sources)
        return self._edited(outputs, routing.gates), routing

    def _edited(self, outputs, gates):
        """The outputs with the offsets of those that are edited."""
        if not self.edited_outputs:
            return outputs
        places = ops.one_hot(self.edited_outputs, self.units, dtype="float32")
        offsets = ops.matmul(ops.matmul(gates, self.logit_offsets), places)
        return outputs + ops.cast(offsets, outputs.dtype)

    def ablated(self, inputs: Any, coefficients: Any, experts: Any) -> Any:
        """The outputs as if one expert's weights were zero, one for each row.

        Nothing else changes: the other coefficients and the offsets of edited outputs
        stay as they are.

        Args:
            inputs: (B, I).
            coefficients: tensor (B, N_l) for each level, the gate's for `inputs`.
            experts: integers (B, L), the place of each row's expert at each level.

        Returns:
            (B, O).

        Reference:
            *Multilinear Mixture of Experts*, section 4.1.2.
        """
        x = inputs if self.norm is None else self.norm(inputs)
        outputs = self.experts.ablated(x, coefficients, experts)
        return self._edited(outputs, outer(coefficients, ops.multiply))

    def compute_output_spec(self, inputs, training=None):
        _, routing = self.gate.compute_output_spec(inputs)
        shape = (*inputs.shape[:-1], self.units)
        return keras.KerasTensor(shape, self.compute_dtype), routing

    def get_config(self):
        config = super().get_config()
        config.update(
            **self._arguments,
            activation=activations.serialize(self.gate.activation),
            normalization=self.gate.normalization,
            input_norm=self.input_norm,
            edited_outputs=self.edited_outputs,
        )
        return config


def _check_outputs(edited_outputs, units):
    if not isinstance(edited_outputs, (list, tuple)):
        raise ValueError(
            "Expected edited_outputs to be a sequence of units; received: "
            f"edited_outputs={edited_outputs!r}"
        )
    outputs = tuple(check_integer("edited_outputs", i, 0) for i in edited_outputs)
    if len(set(outputs)) < len(outputs) or any(i >= units for i in outputs):
        raise ValueError(
            f"Expected edited_outputs to be different units below {units}; "
            f"received: edited_outputs={edited_outputs}"
        )
    return outputs
