"""The router of MoE++: experts of several types, and gating residuals.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe import _checks
from keras_moe._types import Size, Tensor
from keras_moe.ops.capacity import heterogeneous_capacity
from keras_moe.ops.expert_types import ExpertTypes, expert_types
from keras_moe.ops.plans import HeterogeneousPlan
from keras_moe.routers.sparse_router import both_masks
from keras_moe.routers.token_choice import TokenChoiceRouter

ZERO_GATES = ("keep", "remove")


@keras.saving.register_keras_serializable("keras_moe")
class PathwayAwareRouter(TokenChoiceRouter):
    """MoE++'s token choice among feed-forward and zero-computation experts.

    Experts are ordered FFN, zero, copy, constant; only FFN experts have slots. In
    training, each type has the capacity of equation 8; at inference no token is dropped
    by default.

    The defaults follow the paper's equations. To match the released code, use
    `gate_hidden_dim=8 * num_experts`, `normalize_gates="before"`,
    `zero_gates="remove"`, and `MoE(input_scale=num_selected_experts)`.

    Args:
        num_experts: E, of all types together.
        num_selected_experts: K, experts per token.
        zero_experts: number of experts that output 0.
        copy_experts: number of experts that output their input.
        constant_experts: number of experts that mix the token with a trained vector.
        tau: ratio of the tokens of an FFN expert to those of a zero-computation expert.
        gating_residual: whether to add a linear map (E, E) of `previous_logits`.
        gate_hidden_dim: hidden size of a two-layer tanh gate; None for one layer.
        logits_norm_std: standard deviation over experts to which each token's logits
            are scaled before routing, or None. The next layer gets unscaled logits.
        zero_gates: `"keep"` the gates of zero experts, or `"remove"` them (set to 0
            before gates are normalised).
        noise_std: std of the training noise, times `num_experts`; None for 0.0.
        **kwargs: arguments of `TokenChoiceRouter`, except `capacity`, `eval_capacity`,
            `num_modalities`, `expert_pools`, `gates`, `selection_bias_rate`,
            `route_scale` and `ensemble_size`. `capacity_factor` is 1.1 by default.

    Call arguments:
        previous_logits: float32 (G, S, E), `Routing.logits` of the previous MoE layer;
            the others are those of `Router`.

    Output shape: `(HeterogeneousPlan, Routing)`; without zero-computation experts the
    plans of `TokenChoiceRouter`.

    Reference: *MoE++*, equations 1, 6 and 8.

    Example:

    >>> from keras_moe.routers import PathwayAwareRouter
    >>> router = PathwayAwareRouter(num_experts=6, zero_experts=1, copy_experts=1)
    >>> plan, routing = router(np.ones((1, 5, 8), "float32"))
    >>> tuple(plan.in_place.shape), tuple(routing.gates.shape)
    ((1, 5, 2), (1, 5, 6))
    """

    default_capacity_factor = 1.1
    # MoE++ initialises experts independently.
    shares_expert_initialization = False
    refused_arguments = (
        "capacity", "eval_capacity", "num_modalities", "expert_pools", "gates",
        "selection_bias_rate", "route_scale", "ensemble_size",
    )  # fmt: skip

    def __init__(
        self,
        num_experts: int,
        num_selected_experts: int = 2,
        zero_experts: int = 0,
        copy_experts: int = 0,
        constant_experts: int = 0,
        tau: float = 0.75,
        gating_residual: bool = False,
        gate_hidden_dim: int | None = None,
        logits_norm_std: float | None = None,
        zero_gates: str = "keep",
        noise_std: float | None = None,
        **kwargs,
    ):
        for name in self.refused_arguments:
            value = kwargs.pop(name, None)
            if value is not None:
                expected = (
                    "factors as capacities, one kernel for all modalities and softmax "
                    "gates"
                )
                raise _checks.unfit(expected, **{name: value})
        super().__init__(
            num_experts,
            num_selected_experts,
            noise_std=0.0 if noise_std is None else noise_std,
            **kwargs,
        )
        # "auto" would need the number of FFN experts.
        _checks.check_integer("constant_experts", constant_experts, minimum=0)
        counts = (zero_experts, copy_experts, constant_experts)
        num_ffn_experts = self.num_experts - sum(counts)
        if num_ffn_experts < 1:
            raise ValueError(
                "Expected at least one FFN expert; received: "
                f"num_experts={num_experts}, zero_experts={zero_experts}, "
                f"copy_experts={copy_experts}, constant_experts={constant_experts}"
            )
        self._expert_types = expert_types(num_ffn_experts, *counts)
        self.tau = _checks.check_positive("tau", tau)
        self.gating_residual = _checks.check_bool("gating_residual", gating_residual)
        _checks.check_integer("gate_hidden_dim", gate_hidden_dim, optional=True)
        _checks.check_positive("logits_norm_std", logits_norm_std, optional=True)
        if logits_norm_std is not None:
            _checks.check_integer("num_experts", num_experts, minimum=2)
        self.gate_hidden_dim = gate_hidden_dim
        self.logits_norm_std = logits_norm_std
        self.zero_gates = _checks.check_one_of("zero_gates", zero_gates, ZERO_GATES)

    def default_auxiliary_losses(self):
        return {"heterogeneous_balance": 0.01}

    @property
    def expert_types(self):
        return self._expert_types

    @property
    def balanced_types(self) -> ExpertTypes:
        """Experts over which capacities and shares are balanced."""
        return self.expert_types

    def build(self, input_shape):
        super().build(input_shape)
        shapes = self.weight_shapes(input_shape[-2:])
        if self.gate_hidden_dim is not None:
            self.hidden_kernel = self.add_kernel(
                "hidden_kernel", shapes["hidden_kernel"], self.kernel_initializer
            )
        if self.gating_residual:
            self.residual_kernel = self.add_kernel(
                "residual_kernel", shapes["residual_kernel"], "zeros"
            )

    def call(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        modality_ids: Tensor | None = None,
        previous_logits: Tensor | None = None,
        training: bool | None = None,
    ) -> tuple[Any, Any]:
        self.check_previous_logits(previous_logits, tokens)
        # Equation 6: G(x_j) = W_j x_j + W^g_j G(x_{j-1}).
        logits = self.logits(tokens, modality_ids)
        if self.gating_residual:
            logits = logits + ops.matmul(previous_logits, self.residual_kernel)
        mask = both_masks(mask, self.known_tokens(modality_ids))
        return self.route(logits, None, mask, training, modality_ids)

    def logits(self, tokens: Tensor, modality_ids: Tensor | None = None) -> Tensor:
        if self.gate_hidden_dim is not None:
            tokens = ops.tanh(ops.matmul(tokens, self.hidden_kernel))
        return ops.matmul(tokens, self.kernel)

    def scale_logits(self, logits: Tensor) -> Tensor:
        if self.logits_norm_std is None:
            return logits
        centred = logits - ops.mean(logits, axis=-1, keepdims=True)
        variance = ops.sum(ops.square(centred), axis=-1, keepdims=True)
        variance = variance / (self.num_experts - 1)
        # The epsilon keeps the gradient finite where all logits are equal.
        return logits * self.logits_norm_std * ops.rsqrt(variance + 1e-12)

    def allocate(self, affinity, gates, mask=None, training=None, modality_ids=None):
        expert_types = self.expert_types
        if self.zero_gates == "remove" and expert_types.zero:
            zero = expert_types.slices()["zero"]
            keep = [not zero.start <= e < zero.stop for e in range(expert_types.total)]
            gates = ops.where(ops.convert_to_tensor(keep, "bool"), gates, 0.0)
        arguments: dict[str, Any] = {"in_place_experts": expert_types.zero_computation}
        capacity, in_place_capacity = self.capacities(ops.shape(affinity)[1], training)
        if capacity is not None:
            arguments["in_place_capacity"] = in_place_capacity
        priority = self.served_by(affinity, modality_ids, training)
        return self.choose(affinity, gates, mask, capacity, priority, **arguments)

    def capacities(
        self, num_tokens: int | Tensor, training: bool | None
    ) -> tuple[Any, Any]:
        """Capacities of an FFN and a zero-computation expert (equation 8)."""
        factor, _ = self.limits(training)
        if factor is None:
            return None, None
        return heterogeneous_capacity(
            num_tokens,
            self.balanced_types,
            self.tau,
            factor,
            self.num_selected_experts,
            rounding=self.capacity_rounding,
            multiple_of=self.multiple_of(training),
        )

    def group_capacity(self, num_tokens: int | Tensor, training: bool | None) -> Size:
        return self.capacities(num_tokens, training)[0]

    @property
    def ffn_share(self) -> float:
        """FFN experts' share of assignments under a balanced load (Table 1)."""
        weight = self.tau * self.balanced_types.ffn
        return weight / (weight + self.balanced_types.zero_computation)

    def total_slots(self, num_tokens: int) -> int:
        return round(num_tokens * self.experts_per_token(num_tokens))

    def experts_per_token(self, num_tokens: int) -> float:
        # A token uses an expert at most once, whatever tau is.
        balanced = self.num_selected_experts * self.ffn_share
        return min(balanced, self.balanced_types.ffn)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        hidden = self.gate_hidden_dim
        shapes = {"kernel": (hidden or shape[-1], self.num_experts)}
        if hidden is not None:
            shapes["hidden_kernel"] = (shape[-1], hidden)
        if self.gating_residual:
            shapes["residual_kernel"] = (self.num_experts, self.num_experts)
        return shapes

    def compute_output_spec(self, tokens, **kwargs):
        plan, routing = super().compute_output_spec(tokens, **kwargs)
        in_place = self.expert_types.zero_computation
        if not in_place:
            return plan, routing
        # Two tensors, since a functional model identifies outputs by identity.
        shape = (*tokens.shape[:2], in_place)
        by_expert = [keras.KerasTensor(shape, "float32") for _ in range(2)]
        return HeterogeneousPlan(plan, *by_expert), routing

    def get_config(self):
        config = {**super().get_config(), **self.expert_types.arguments()}
        for name in self.refused_arguments:
            del config[name]
        return config
