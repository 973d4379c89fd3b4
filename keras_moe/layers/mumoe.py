"""muMoE layers: many experts in one factorised weight tensor, all taking part.

Axes: B batch, N tokens, D hidden, I inputs, H mlp, O units, E experts of all levels, L
levels, R rank.
"""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_moe._checks import check_bool, check_integer, unfit
from keras_moe._types import Activation, Config, Tensor
from keras_moe.layers import activations, multilinear_experts
from keras_moe.layers._layer import Layer, build_once, layer_argument
from keras_moe.layers.mlp import check_num_tokens, known_num_tokens
from keras_moe.layers.normalization import LayerNorm
from keras_moe.ops._multilinear import projections


class MuMoEBase(Layer):
    """Gate, norm and experts of `MuMoE` and `MuMoEBlock`, which define `sizes`."""

    # O.
    units: Any

    def __init__(
        self,
        num_experts: int | Sequence[int],
        factorization: str | None,
        rank: multilinear_experts.Rank,
        activation: Activation = "entmax",
        normalization: str | None = "batch",
        use_bias: bool = True,
        expert_noise: float = 1.0,
        input_norm: bool = False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.gate = multilinear_experts.ExpertCoefficients(
            num_experts, activation, normalization, name="gate"
        )
        self.activation = self.gate.activation
        self.normalization = normalization
        self.num_experts = self.gate.num_experts
        self.factorization = factorization
        self.use_bias = use_bias
        self.expert_noise = expert_noise
        # `MultilinearExperts` validates the arguments.
        self.rank = self._experts(1, None, rank).rank
        self.input_norm = check_bool("input_norm", input_norm)
        self.norm = None
        if input_norm:
            self.norm = LayerNorm(1e-5, dtype=self.dtype_policy, name="input_norm")

    def _experts(self, units, name, rank):
        return multilinear_experts.MultilinearExperts(
            units,
            self.num_experts,
            self.factorization,
            rank,
            self.use_bias,
            self.expert_noise,
            dtype=self.dtype_policy,
            name=name,
        )

    def sizes(self, dim: int) -> dict[str, tuple[int, int]]:
        """Inputs and units of each layer of experts by name, for inputs of size I."""
        raise NotImplementedError

    def unbuilt_experts(self, shape: tuple) -> dict:
        """Dict from unbuilt layers of experts to the shapes of their inputs."""
        num_rows, dim = shape
        sizes, rank = self.sizes(dim), self.rank
        if rank == "match_dense":
            rank = multilinear_experts.matching_rank(
                self.factorization,
                self.num_experts,
                list(sizes.values()),
                self.use_bias,
                self.gate.cost((1, dim)).parameters,
            )
        # In all layers fractions are relative to I.
        rank = multilinear_experts.resolved_rank(rank, dim)
        return {
            self._experts(units, name, rank): (num_rows, inputs)
            for name, (inputs, units) in sizes.items()
        }

    def build(self, input_shape):
        self.gate.build(input_shape)
        if self.norm is not None:
            self.norm.build(input_shape)

    def _gated(self, inputs, experts, training, mask=None):
        """The outputs of the first layer of experts, and what the gate returns."""
        x, logits, projected = self._projected(inputs, experts)
        coefficients, routing, sources = self.gate(
            inputs, training=training, logits=logits, mask=mask, with_sources=True
        )
        x = experts(x, coefficients, projected=projected, sources=sources)
        return x, coefficients, routing, sources

    def _projected(self, inputs, experts):
        """The experts' input, the gate's logits and the experts' projection."""
        if self.norm is not None:
            return self.norm(inputs), None, None
        gate, factor = self.gate, experts.input_factor()
        if factor is None or experts.compute_dtype != gate.compute_dtype:
            return inputs, None, None
        kernels = [ops.cast(kernel, gate.compute_dtype) for kernel in gate.kernels]
        *logits, projected = projections(inputs, *kernels, factor)
        return inputs, logits, projected

    def compute_output_spec(self, inputs, mask=None, modality_ids=None, training=None):
        _, routing = self.gate.compute_output_spec(inputs)
        shape = (*inputs.shape[:-1], self.units or inputs.shape[-1])
        return keras.KerasTensor(shape, self.compute_dtype), routing

    def parts(self, shape: tuple) -> dict[Any, tuple]:
        parts = {self.gate: shape}
        if self.norm is not None:
            parts[self.norm] = shape
        return parts | self.unbuilt_experts(shape)


@keras.saving.register_keras_serializable("keras_moe")
class MuMoE(MuMoEBase):
    """A linear muMoE layer: factorised experts mixed by coefficients of the input.

    Entmax makes most coefficients zero. No capacity, dropping or auxiliary loss.

    Args:
        units: width O of the output.
        num_experts: N, or (N_1, ..., N_L) for L levels of hierarchy.
        factorization: see `MultilinearExperts`.
        rank: see `MultilinearExperts`; `"match_dense"` also counts the gate.
        edited_outputs: units that get an untrained offset `sum over n of a_n
            logit_offsets[n]` (equation 5); see `keras_moe.analysis.edit_expert_logits`.
        **kwargs: `activation` and `normalization` of `ExpertCoefficients`, `use_bias`
            and `expert_noise` of `MultilinearExperts`, `input_norm` (whether the
            experts' input is normalised, but not the gate's), and arguments of
            `keras.layers.Layer`.

    Call arguments:
        inputs: (..., I).
        training: whether to normalise by the statistics of the batch.

    Output shape:
        `(outputs, Routing)`: (..., O), and the record of the coefficients (..., E).

    Reference: *Multilinear Mixture of Experts*, section 3, and 4.2 for edits.

    Example:

    >>> from keras_moe.layers import MuMoE
    >>> layer = MuMoE(10, num_experts=16, rank=8)
    >>> outputs, routing = layer(np.ones((2, 3, 6), "float32"))
    >>> tuple(outputs.shape), tuple(routing.gates.shape)
    ((2, 3, 10), (2, 3, 16))
    """

    def __init__(
        self,
        units: int,
        num_experts: int | Sequence[int],
        factorization: str | None = "cp",
        rank: multilinear_experts.Rank = "match_dense",
        edited_outputs: Sequence[int] = (),
        **kwargs,
    ):
        super().__init__(num_experts, factorization, rank, **kwargs)
        self.units = check_integer("units", units)
        outputs = tuple(check_integer("edited_outputs", i, 0) for i in edited_outputs)
        if len({*outputs}) < len(outputs) or any(i >= units for i in outputs):
            expected = f"edited_outputs to be different units below {units}"
            raise unfit(expected, edited_outputs=edited_outputs)
        self.edited_outputs = outputs

    def sizes(self, dim: int) -> dict[str, tuple[int, int]]:
        return {"experts": (dim, self.units)}

    def build(self, input_shape):
        super().build(input_shape)
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

    def call(self, inputs: Tensor, training: bool | None = None) -> tuple[Any, Any]:
        outputs, _, routing, _ = self._gated(inputs, self.experts, training)
        if self.edited_outputs:
            places = ops.one_hot(self.edited_outputs, self.units, dtype="float32")
            offsets = ops.matmul(ops.matmul(routing.gates, self.logit_offsets), places)
            outputs = outputs + ops.cast(offsets, outputs.dtype)
        return outputs, routing


@keras.saving.register_keras_serializable("keras_moe")
class MuMoEBlock(MuMoEBase):
    """Two muMoE layers with shared coefficients and an activation between them.

    Args:
        mlp_dim: H, units of the first layer.
        units: O; None for the input size.
        num_experts: N, or (N_1, ..., N_L) for L levels of hierarchy.
        factorization: factorization of both layers, see `MultilinearExperts`.
        rank: rank of both layers. A fraction is relative to the block's I, and
            `"match_dense"` matches the parameters of the dense MLP, gate included.
        hidden_activation: activation between the layers; `"gelu"` is the exact form.
        **kwargs: the further arguments of `MuMoE`, for both layers.

    Call arguments:
        inputs: (..., I).
        mask: boolean (...), False for padding, which gets zeros.
        modality_ids: integers (...); ignored.
        training: whether to normalise by the statistics of the batch.

    Output shape:
        `(outputs, Routing)`: (..., O), and the record of the coefficients (..., E).

    Reference: *Multilinear Mixture of Experts*, section 4.3.

    Example:

    >>> from keras_moe.layers import MuMoEBlock
    >>> outputs, routing = MuMoEBlock(16, num_experts=4, rank=8)(np.ones((2, 3, 6)))
    >>> tuple(outputs.shape)
    (2, 3, 6)
    """

    def __init__(
        self,
        mlp_dim: int,
        units: int | None = None,
        num_experts: int | Sequence[int] = 64,
        factorization: str | None = "cp",
        rank: multilinear_experts.Rank = "match_dense",
        hidden_activation: Activation = "gelu",
        **kwargs,
    ):
        super().__init__(num_experts, factorization, rank, **kwargs)
        self.supports_masking = True
        self.mlp_dim = check_integer("mlp_dim", mlp_dim)
        self.units = units if units is None else check_integer("units", units)
        self.hidden_activation = activations.get(hidden_activation)

    def sizes(self, dim: int) -> dict[str, tuple[int, int]]:
        return {
            "hidden": (dim, self.mlp_dim),
            "output": (self.mlp_dim, self.units or dim),
        }

    def build(self, input_shape):
        self.hidden, self.output_experts = self.unbuilt_experts(input_shape[-2:])
        super().build(input_shape)
        self.hidden.build(input_shape)
        self.output_experts.build((*input_shape[:-1], self.mlp_dim))

    def call(
        self,
        inputs: Tensor,
        mask: Tensor | None = None,
        modality_ids: Tensor | None = None,
        training: bool | None = None,
    ) -> tuple[Any, Any]:
        x, coefficients, routing, sources = self._gated(
            inputs, self.hidden, training, mask
        )
        x = self.hidden_activation(x)
        x = self.output_experts(x, coefficients, sources=sources)
        if mask is not None:
            x = ops.where(ops.expand_dims(ops.cast(mask, "bool"), -1), x, 0)
        return x, routing

    @property
    def router(self) -> multilinear_experts.ExpertCoefficients:
        """The gate, under the name that MoE layers use."""
        return self.gate


@keras.saving.register_keras_serializable("keras_moe")
class TokenMuMoE(Layer):
    """`MuMoEBlock` across tokens, applied to each of the D channels.

    Fixes the number of tokens. Coefficients are per channel instead of per token.

    Args:
        block: `MuMoEBlock` across tokens.
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape: (B, N, D).

    Output shape:
        `(tokens, Routing)`: (B, N, D), and the record of the coefficients (B, D, E).

    Reference: *Multilinear Mixture of Experts*, section 4.3.

    Example:

    >>> from keras_moe.layers import MuMoEBlock, TokenMuMoE
    >>> layer = TokenMuMoE(MuMoEBlock(16, num_experts=4, rank=8))
    >>> tokens, routing = layer(np.ones((1, 4, 8), "float32"))
    >>> tuple(tokens.shape), tuple(routing.gates.shape)
    ((1, 4, 8), (1, 8, 4))
    """

    def __init__(self, block: keras.layers.Layer | Config, **kwargs):
        super().__init__(**kwargs)
        self.block = layer_argument(block, "block")
        if not isinstance(self.block, MuMoEBlock):
            raise ValueError(f"Expected block to be a MuMoEBlock; received: {block}")

    def build(self, input_shape):
        self.num_tokens = known_num_tokens(input_shape)
        build_once(self.block, (input_shape[0], input_shape[2], input_shape[1]))

    def call(self, tokens: Tensor, training: bool | None = None) -> tuple[Any, Any]:
        check_num_tokens(tokens, self.num_tokens)
        channels = ops.transpose(tokens, (0, 2, 1))
        outputs, routing = self.block(channels, training=training)
        # The block's policy may be another.
        outputs = ops.cast(outputs, self.compute_dtype)
        return ops.transpose(outputs, (0, 2, 1)), routing

    @property
    def router(self) -> multilinear_experts.ExpertCoefficients:
        """The block's gate."""
        return self.block.router

    def compute_output_spec(self, tokens, training=None):
        batch, num_tokens, dim = tokens.shape
        channels = keras.KerasTensor((batch, dim, num_tokens), self.compute_dtype)
        _, routing = self.block.compute_output_spec(channels)
        return keras.KerasTensor(tokens.shape, self.compute_dtype), routing

    def parts(self, shape: tuple) -> dict[Any, tuple]:
        return {self.block: shape[::-1]}
