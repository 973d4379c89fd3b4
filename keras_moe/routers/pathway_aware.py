"""The router of MoE++: experts of several kinds, and gating residuals.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import (
    check_bool,
    check_initializer,
    check_integer,
    check_one_of,
    check_positive,
)
from keras_moe.ops.capacity import heterogeneous_capacity
from keras_moe.ops.expert_types import expert_types
from keras_moe.ops.plans import HeterogeneousPlan
from keras_moe.routers.modalities import both
from keras_moe.routers.registry import register_pathway_aware
from keras_moe.routers.token_choice import TokenChoiceRouter

ZERO_GATES = ("keep", "remove")
# Arguments of token choice that do not apply to experts of several kinds.
_NOT_HERE = ("capacity", "eval_capacity", "num_modalities", "expert_pools")


@register_pathway_aware(TokenChoiceRouter)
@keras.saving.register_keras_serializable("keras_moe")
class PathwayAwareRouter(TokenChoiceRouter):
    """Token choice among feed-forward and zero-computation experts, as in MoE++.

    The experts stand in the order FFN, zero, copy, constant. Only FFN experts have
    slots or rows; a `HeterogeneousPlan` has the tokens that the others serve in place.

    While training, equation 8 limits what an expert serves by its kind; a choice that
    overflows is dropped. At inference every token is served by default, also in groups
    of very few tokens.

    The released code is another model than the paper's equations, which are the
    default here. It takes `gate_hidden_dim=8 * num_experts`,
    `normalize_gates="before"`, `zero_gates="remove"`, and an `MoE` layer with
    `input_scale=num_selected_experts`; its "mixtral" gating takes
    `zero_gates="keep"` and no scaling instead. It has no capacity and no balance loss
    (it is inference code), which is what inference does here.

    Args:
        num_experts: E, of all kinds together.
        num_selected_experts: K, experts per token.
        zero_experts: number of the experts that give 0.
        copy_experts: number of the experts that give the token back.
        constant_experts: number of the experts that give a mixture of the token and a
            trained vector.
        tau: tokens for an FFN expert over those for a zero-computation expert.
        gating_residual: whether a trained E x E map of the logits of the MoE layer
            before is added, so that calls take `previous_logits`.
        gate_hidden_dim: hidden size of a gate of two matrices with a tanh between them;
            None has one matrix, as in the paper.
        logits_norm_std: standard deviation over experts to which each token's logits
            are scaled before they route, or None; the next layer gets them unscaled.
        zero_gates: gates of zero experts, `"keep"`, or `"remove"` to count them as 0
            before gates are normalised.
        affinity: argument of `TokenChoiceRouter`.
        combine: argument of `TokenChoiceRouter`.
        normalize_gates: argument of `TokenChoiceRouter`.
        capacity_factor: gamma; 1.1 without this and without `dropless`.
        eval_capacity_factor: gamma at inference; None serves every token.
        batch_invariant: argument of `TokenChoiceRouter`.
        dropless: whether every token is served while training, too.
        capacity_rounding: rounding of the capacity, `"ceil"` or `"round"`.
        capacity_multiple_of: divisor of the FFN experts' capacity, which is rounded up
            to a multiple of it unless each image is a group, or None.
        priority: argument of `TokenChoiceRouter`.
        excluded_experts: argument of `TokenChoiceRouter`; the next layer's gating
            residual gets their logits all the same.
        noise_std: standard deviation of the training noise, times `num_experts`; None
            is MoE++'s, 0.0.
        noisy_combine: argument of `TokenChoiceRouter`.
        kernel_initializer: initializer of the kernels.
        residual_initializer: initializer of the map of previous logits. With zeros the
            router begins like one without it.
        seed: seed of the noise.
        **kwargs: arguments of `keras.layers.Layer`; `dtype` is always float32.

    Call arguments:
        tokens: (G, S, D).
        mask: boolean (G, S), False for tokens that are not routed.
        modality_ids: integers (G, S), where `priority` is by modality.
        previous_logits: float32 (G, S, E), `Routing.logits` of the MoE layer before;
            with `gating_residual` only.
        training: whether noise is added and the capacity limits.

    Output shape:
        `(plan, Routing)`: a `HeterogeneousPlan`; without zero-computation experts the
        plans of `TokenChoiceRouter`.

    Raises:
        ValueError: if an argument is out of range, there is no FFN expert, or
            `previous_logits` are missing, not wanted, or of another number of experts.

    Reference:
        *MoE++*, equations 1, 6 and 8.

    Example:

    >>> import numpy as np
    >>> from keras_moe.routers import PathwayAwareRouter
    >>> router = PathwayAwareRouter(num_experts=6, zero_experts=1, copy_experts=1)
    >>> plan, routing = router(np.ones((1, 5, 8), "float32"))
    >>> tuple(plan.in_place.shape), tuple(routing.gates.shape)
    ((1, 5, 2), (1, 5, 6))
    """

    default_capacity_factor = 1.1
    # MoE++ draws each expert by itself.
    shares_expert_initialization = False

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
        affinity: Any = "softmax",
        combine: str = "softmax",
        normalize_gates: str | None = None,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
        batch_invariant: bool | None = None,
        dropless: bool = False,
        capacity_rounding: str = "ceil",
        capacity_multiple_of: int | None = None,
        priority: Any = "first_come",
        excluded_experts: Any = (),
        noise_std: float | None = None,
        noisy_combine: bool | None = None,
        kernel_initializer: Any = "lecun_normal",
        residual_initializer: Any = "zeros",
        seed: int | None = None,
        **kwargs,
    ):
        for name in _NOT_HERE:
            value = kwargs.pop(name, None)
            if value is not None:
                raise ValueError(
                    "Expected arguments of PathwayAwareRouter, which has one kernel, "
                    "and whose types of experts have capacities of their own, by "
                    "capacity_factor and eval_capacity_factor; "
                    f"received: {name}={value!r}"
                )
        if capacity_factor is None and not dropless:
            capacity_factor = self.default_capacity_factor
        super().__init__(
            num_experts,
            num_selected_experts=num_selected_experts,
            affinity=affinity,
            combine=combine,
            normalize_gates=normalize_gates,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            batch_invariant=batch_invariant,
            dropless=dropless,
            capacity_rounding=capacity_rounding,
            capacity_multiple_of=capacity_multiple_of,
            priority=priority,
            excluded_experts=excluded_experts,
            noise_std=0.0 if noise_std is None else noise_std,
            noisy_combine=noisy_combine,
            kernel_initializer=kernel_initializer,
            seed=seed,
            **kwargs,
        )
        # "auto" needs the number of FFN experts.
        check_integer("constant_experts", constant_experts, minimum=0)
        counts = (zero_experts, copy_experts, constant_experts)
        in_place = expert_types(1, *counts).zero_computation
        if in_place >= self.num_experts:
            raise ValueError(
                "Expected at least one FFN expert; received: "
                f"num_experts={num_experts}, zero_experts={zero_experts}, "
                f"copy_experts={copy_experts}, constant_experts={constant_experts}"
            )
        self._expert_types = expert_types(self.num_experts - in_place, *counts)
        self.tau = check_positive("tau", tau)
        self.gating_residual = check_bool("gating_residual", gating_residual)
        if gate_hidden_dim is not None:
            check_integer("gate_hidden_dim", gate_hidden_dim)
        if logits_norm_std is not None:
            check_positive("logits_norm_std", logits_norm_std)
            if self.num_experts < 2:
                raise ValueError(
                    "Expected num_experts >= 2 for logits_norm_std; "
                    f"received: num_experts={num_experts}"
                )
        self.gate_hidden_dim = gate_hidden_dim
        self.logits_norm_std = logits_norm_std
        self.zero_gates = check_one_of("zero_gates", zero_gates, ZERO_GATES)
        self.residual_initializer = check_initializer(
            "residual_initializer", residual_initializer
        )

    @classmethod
    def own_fields(cls, config, site):
        return {
            **super().own_fields(config, site),
            "tau": config.tau,
            "gating_residual": site.gating_residual,
        }

    def default_auxiliary_losses(self):
        return {"heterogeneous_balance": 0.01}

    @property
    def expert_types(self):
        return self._expert_types

    def build(self, input_shape):
        super().build(input_shape)
        shapes = self.weight_shapes(input_shape[-2:])
        if self.gate_hidden_dim is not None:
            self.hidden_kernel = self.add_kernel(
                "hidden_kernel", shapes["hidden_kernel"], self.kernel_initializer
            )
        if self.gating_residual:
            self.residual_kernel = self.add_kernel(
                "residual_kernel", shapes["residual_kernel"], self.residual_initializer
            )

    def call(
        self,
        tokens: Any,
        mask: Any = None,
        modality_ids: Any = None,
        previous_logits: Any = None,
        training: bool | None = None,
    ) -> tuple[Any, Any]:
        self.check_previous_logits(previous_logits, tokens)
        hidden = tokens
        if self.gate_hidden_dim is not None:
            hidden = ops.tanh(ops.matmul(tokens, self.hidden_kernel))
        logits = ops.matmul(hidden, self.kernel)
        if self.gating_residual:
            logits = logits + ops.matmul(previous_logits, self.residual_kernel)
        mask = both(mask, self.known_tokens(modality_ids))
        return self.route(logits, None, mask, training, modality_ids)

    def scale_logits(self, logits: Any) -> Any:
        if self.logits_norm_std is None:
            return logits
        return _with_deviation(logits, self.logits_norm_std)

    def check_previous_logits(self, previous_logits: Any, tokens: Any) -> None:
        """Raises ValueError if they are missing, not wanted, or do not fit."""
        if not self.gating_residual:
            return super().check_previous_logits(previous_logits, tokens)
        if previous_logits is None:
            raise ValueError(
                "Expected previous_logits with gating_residual=True: the logits of the "
                "MoE layer before, of which the first layer has none; received: "
                "previous_logits=None"
            )
        shape = tuple(previous_logits.shape)
        expected = (*tokens.shape[:2], self.num_experts)
        # Sizes that are not known yet fit any other.
        fits = len(shape) == 3 and all(
            a == b or None in (a, b) for a, b in zip(shape, expected)
        )
        if not fits:
            raise ValueError(
                "Expected previous_logits of a layer with as many experts for the "
                f"same tokens, {expected}, num_experts={self.num_experts}; "
                f"received: shape={shape}"
            )

    def allocate(self, affinity, gates, mask=None, training=None, modality_ids=None):
        expert_types = self.expert_types
        if self.zero_gates == "remove" and expert_types.zero:
            zero = expert_types.slices()["zero"]
            keep = [not zero.start <= e < zero.stop for e in range(expert_types.total)]
            gates = ops.where(ops.convert_to_tensor(keep, "bool"), gates, 0.0)
        arguments = {"in_place_experts": expert_types.zero_computation}
        capacity, in_place_capacity = self.capacities(ops.shape(affinity)[1], training)
        if capacity is not None:
            arguments["in_place_capacity"] = in_place_capacity
        priority = self.served_by(affinity, modality_ids, training)
        return self.choose(affinity, gates, mask, capacity, priority, **arguments)

    def capacities(self, num_tokens: Any, training: bool | None) -> tuple[Any, Any]:
        """The capacities of an FFN and of a zero-computation expert (equation 8).

        Both are None where every token is served.
        """
        if self.serves_every_token(training):
            return None, None
        return heterogeneous_capacity(
            num_tokens,
            self.expert_types,
            self.tau,
            self.capacity_factor if training else self.eval_capacity_factor,
            self.num_selected_experts,
            rounding=self.capacity_rounding,
            multiple_of=self.multiple_of(training),
        )

    def group_capacity(self, num_tokens: Any, training: bool | None) -> Any:
        return self.capacities(num_tokens, training)[0]

    @property
    def ffn_share(self) -> float:
        """The FFN experts' share of assignments under a balanced load (Table 1)."""
        weight = self.tau * self.expert_types.ffn
        return weight / (weight + self.expert_types.zero_computation)

    def total_slots(self, num_tokens: int) -> int:
        return round(num_tokens * self.experts_per_token(num_tokens))

    def experts_per_token(self, num_tokens: int) -> float:
        # A token takes an expert once, whatever tau would have.
        balanced = self.num_selected_experts * self.ffn_share
        return min(balanced, self.expert_types.ffn)

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by name.

        Args:
            shape: (num_tokens, dim).
        """
        hidden = self.gate_hidden_dim
        shapes = {"kernel": (hidden or shape[-1], self.num_experts)}
        if hidden is not None:
            shapes["hidden_kernel"] = (shape[-1], hidden)
        if self.gating_residual:
            shapes["residual_kernel"] = (self.num_experts, self.num_experts)
        return shapes

    def compute_output_spec(
        self,
        tokens,
        mask=None,
        modality_ids=None,
        previous_logits=None,
        training=None,
    ):
        self.check_previous_logits(previous_logits, tokens)
        plan, routing = super().compute_output_spec(tokens, training=training)
        in_place = self.expert_types.zero_computation
        if not in_place:
            return plan, routing
        # Two tensors: a functional model tells its outputs apart by their identity.
        shape = (*tokens.shape[:2], in_place)
        by_expert = [keras.KerasTensor(shape, "float32") for _ in range(2)]
        return HeterogeneousPlan(plan, *by_expert), routing

    def get_config(self):
        config = super().get_config()
        for name in _NOT_HERE:
            del config[name]
        config.update(
            zero_experts=self.expert_types.zero,
            copy_experts=self.expert_types.copy,
            constant_experts=self.expert_types.constant,
            tau=self.tau,
            gating_residual=self.gating_residual,
            gate_hidden_dim=self.gate_hidden_dim,
            logits_norm_std=self.logits_norm_std,
            zero_gates=self.zero_gates,
            residual_initializer=keras.initializers.serialize(
                self.residual_initializer
            ),
        )
        return config


def _with_deviation(logits, std):
    """Logits with this standard deviation over experts for each token."""
    count = logits.shape[-1]
    centred = logits - ops.mean(logits, axis=-1, keepdims=True)
    variance = ops.sum(ops.square(centred), axis=-1, keepdims=True) / (count - 1)
    # Equal logits have a deviation of 0: they stay equal, and the gradient is finite.
    return logits * std * ops.rsqrt(variance + 1e-12)
