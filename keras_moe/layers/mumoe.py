"""muMoE: many experts in one factorised weight tensor, none of which is dropped.

Axes: I inputs, H mlp, O units, E experts of all levels.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_bool, check_integer
from keras_moe.layers import activations
from keras_moe.layers.expert_coefficients import ExpertCoefficients, outer
from keras_moe.layers.multilinear_experts import (
    MultilinearExperts,
    dense_parameters,
    matching_rank,
    resolved_rank,
)
from keras_moe.layers.normalization import LayerNorm
from keras_moe.ops.cost import Cost, under
from keras_moe.ops.multilinear import projections


@keras.saving.register_keras_serializable("keras_moe")
class MuMoE(keras.layers.Layer):
    """A muMoE layer: coefficients from the input, and factorised experts mixed by them.

    Every expert takes part with its coefficient; entmax makes most of these zero.
    There is no capacity, no dropping and no auxiliary loss.

    Args:
        units: O.
        num_experts: N, or (N_1, ..., N_L) for L levels of hierarchy.
        factorization: see `MultilinearExperts`.
        rank: see `MultilinearExperts`; `"match_dense"` counts the gate, too.
        match_shape: see `MultilinearExperts`.
        activation: see `ExpertCoefficients`.
        normalization: see `ExpertCoefficients`.
        use_bias: see `MultilinearExperts`.
        expert_noise: see `MultilinearExperts`.
        input_norm: whether the experts' input is normalised, but not the gate's, as in
            the released code.
        edited_outputs: units to which is added the offset `sum over n of a_n
            logit_offsets[n]` (equation 5): a number for each expert, zero at first and
            not trained, see `keras_moe.analysis.edit_expert_logits`.
        **kwargs: see `keras.layers.Layer`.

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
        super().__init__(**kwargs)
        self.gate = ExpertCoefficients(
            num_experts, activation, normalization, name="gate"
        )
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
        self.input_norm = check_bool("input_norm", input_norm)
        self.norm = _input_norm(self)
        self.edited_outputs = _check_outputs(edited_outputs, self.units)

    @property
    def units(self) -> int:
        """O."""
        return self._arguments["units"]

    def build(self, input_shape):
        self.gate.build(input_shape)
        if self.norm is not None:
            self.norm.build(input_shape)
        self.experts = self._experts(input_shape[-1])
        self.experts.build(input_shape)
        if self.edited_outputs:
            self.logit_offsets = self.add_weight(
                name="logit_offsets",
                shape=(self.gate.kinds.total, len(self.edited_outputs)),
                initializer="zeros",
                trainable=False,
                dtype="float32",
                autocast=False,
            )

    def _experts(self, dim):
        """The experts for inputs of size `dim`, not built."""
        given = dict(self._arguments)
        if given["rank"] == "match_dense" and given["factorization"] is not None:
            shape = given.pop("match_shape") or (dim, given["units"])
            given["rank"] = matching_rank(
                given["factorization"],
                given["num_experts"],
                [(dim + given["use_bias"], given["units"])],
                dense_parameters(shape) - self.gate.cost((1, dim)).parameters,
            )
        return MultilinearExperts(dtype=self.dtype_policy, name="experts", **given)

    def call(self, inputs: Any, training: bool | None = None) -> tuple[Any, Any]:
        x, logits, projected = _normalised(self, inputs, self.experts)
        coefficients, routing = self.gate(inputs, training=training, logits=logits)
        outputs = self.experts(x, coefficients, projected=projected)
        return self._edited(outputs, routing.gates), routing

    def _edited(self, outputs, gates):
        """The outputs with the offsets of those that are edited."""
        if not self.edited_outputs:
            return outputs
        places = ops.one_hot(self.edited_outputs, self.units, dtype="float32")
        offsets = ops.matmul(ops.matmul(gates, self.logit_offsets), places)
        return outputs + ops.cast(offsets, outputs.dtype)

    def ablated(self, inputs: Any, coefficients: Any, experts: Any) -> Any:
        """The outputs as if one expert's weights were zero, for each row another.

        Nothing else changes: coefficients are not shared out again, and the offsets of
        edited outputs stay.

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

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by path.

        Args:
            shape: (num_rows, dim).
        """
        return _weight_shapes(self, {self._experts(shape[-1]): shape}, shape)

    def cost(self, shape: tuple[int, int]) -> Cost:
        """The cost of rows, every one of which meets all experts.

        Args:
            shape: (num_rows, dim).
        """
        return _cost(self, {self._experts(shape[-1]): shape}, shape)

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


def _input_norm(layer):
    """The normalisation of the experts' input, or None."""
    if not layer.input_norm:
        return None
    return LayerNorm(1e-5, dtype=layer.dtype_policy, name="input_norm")


def _weight_shapes(layer, experts, shape):
    """The weights of the gate, of the experts and of the input's normalisation.

    Args:
        layer: a `MuMoE` or a `MuMoEBlock`.
        experts: dict from each of its layers of experts to the shape of its inputs.
        shape: (num_rows, dim).
    """
    shapes = under(layer.gate.name, layer.gate.weight_shapes(shape))
    if layer.norm is not None:
        shapes.update(under(layer.norm.name, layer.norm.weight_shapes(shape)))
    for part, inputs in experts.items():
        shapes.update(under(part.name, part.weight_shapes(inputs)))
    return shapes


def _cost(layer, experts, shape):
    """The cost of the gate, of the experts and of the input's normalisation."""
    total = layer.gate.cost(shape)
    if layer.norm is not None:
        total += layer.norm.cost(shape)
    return sum((part.cost(inputs) for part, inputs in experts.items()), total)


def _normalised(layer, inputs, experts):
    """The experts' input, and the projections that gate and experts share, or None."""
    if layer.norm is None:
        return inputs, *_projected(inputs, layer.gate, experts)
    return layer.norm(inputs), None, None


def _projected(inputs, gate, experts):
    """The logits of the gate and the projection of the experts, or None and None.

    Both multiply the same inputs by a matrix, and together their gradient is cheaper.
    In half precision the gate's arithmetic remains float32, and each multiplies alone.
    """
    matrix = experts.input_matrix()
    if matrix is None or experts.compute_dtype != gate.compute_dtype:
        return None, None
    kernels = [ops.cast(kernel, gate.compute_dtype) for kernel in gate.kernels]
    *logits, projected = projections(inputs, *kernels, matrix)
    return logits, projected


@keras.saving.register_keras_serializable("keras_moe")
class MuMoEBlock(keras.layers.Layer):
    """Two muMoE layers with shared coefficients and GELU between them.

    Args:
        mlp_dim: H, the units of the first layer.
        units: O; None takes the inputs' size.
        num_experts: see `MuMoE`.
        factorization: see `MuMoE`.
        rank: see `MuMoE`; of both layers, shares being of the block's I.
            `"match_dense"` matches the dense MLP, the gate counted.
        hidden_activation: activation between the layers; `"gelu"` is the exact form.
        input_norm: whether the input of the first layer is normalised, but not the
            gate's.
        activation: see `MuMoE`.
        normalization: see `MuMoE`.
        use_bias: see `MuMoE`.
        expert_noise: see `MuMoE`.
        **kwargs: see `keras.layers.Layer`.

    Call arguments:
        inputs: (..., I).
        mask: boolean (...), False for padding, which gets zeros and has no part in the
            batch statistics.
        modality_ids: integers (...); every expert takes part whatever they are.
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
        super().__init__(**kwargs)
        self.supports_masking = True
        self.mlp_dim = check_integer("mlp_dim", mlp_dim)
        self.units = units if units is None else check_integer("units", units)
        self.hidden_activation = activations.get(hidden_activation)
        self.input_norm = check_bool("input_norm", input_norm)
        self.gate = ExpertCoefficients(
            num_experts, activation, normalization, name="gate"
        )
        levels = self.gate.num_experts
        self._options = {
            "num_experts": levels,
            "factorization": factorization,
            "rank": rank,
            "use_bias": check_bool("use_bias", use_bias),
            "expert_noise": expert_noise,
        }
        # `MultilinearExperts` checks the arguments.
        self._options["rank"] = self._layer(self.mlp_dim, None, rank).rank
        self.norm = _input_norm(self)

    def _layer(self, units, name, rank):
        return MultilinearExperts(
            units, dtype=self.dtype_policy, name=name, **{**self._options, "rank": rank}
        )

    def _both(self, dim):
        """Both layers for inputs of size `dim`, not built."""
        rank, units = self._options["rank"], self.units or dim
        if rank == "match_dense":
            bias, hidden = self._options["use_bias"], self.mlp_dim
            budget = dense_parameters((dim, hidden)) + dense_parameters((hidden, units))
            rank = matching_rank(
                self._options["factorization"],
                self.gate.num_experts,
                [(dim + bias, hidden), (hidden + bias, units)],
                budget - self.gate.cost((1, dim)).parameters,
            )
        # Shares are those of the block's inputs in both layers.
        rank = resolved_rank(rank, dim)
        return (
            self._layer(self.mlp_dim, "hidden", rank),
            self._layer(units, "output", rank),
        )

    def build(self, input_shape):
        self.hidden, self.output_experts = self._both(input_shape[-1])
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
        x, logits, projected = _normalised(self, inputs, self.hidden)
        coefficients, routing = self.gate(
            inputs, training=training, logits=logits, mask=mask
        )
        x = self.hidden(x, coefficients, projected=projected)
        x = self.output_experts(self.hidden_activation(x), coefficients)
        if mask is not None:
            x = ops.where(ops.expand_dims(ops.cast(mask, "bool"), -1), x, 0)
        return x, routing

    def compute_output_spec(self, inputs, mask=None, modality_ids=None, training=None):
        _, routing = self.gate.compute_output_spec(inputs)
        shape = (*inputs.shape[:-1], self.units or inputs.shape[-1])
        return keras.KerasTensor(shape, self.compute_dtype), routing

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by path.

        Args:
            shape: (num_tokens, dim).
        """
        return _weight_shapes(self, self._inputs_of_experts(shape), shape)

    def cost(self, shape: tuple[int, int]) -> Cost:
        """The cost for tokens of one image, every one of which meets all experts.

        Args:
            shape: (num_tokens, dim).
        """
        return _cost(self, self._inputs_of_experts(shape), shape)

    def _inputs_of_experts(self, shape):
        """The shape of the inputs of each of the two layers, not built."""
        hidden, output = self._both(shape[-1])
        return {hidden: shape, output: (shape[0], self.mlp_dim)}

    def ablated(self, inputs: Any, experts: Any) -> Any:
        """The outputs as if one expert's weights were zero, for each example another.

        The expert is one of both layers. Nothing else changes: coefficients are not
        shared out again.

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
