"""Token choice routing: the router of V-MoE.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.ops.capacity import ROUNDINGS, expert_capacity
from keras_moe.ops.checks import check_integer, check_positive, check_selected
from keras_moe.ops.routing import Routing, RoutingPlan, served
from keras_moe.ops.token_choice import PRIORITIES, token_choice
from keras_moe.routers.router import Router

DEFAULT_CAPACITY_FACTOR = 1.05


@keras.saving.register_keras_serializable("keras_moe")
class TokenChoiceRouter(Router):
    """Every token takes its K experts of largest gate, as in V-MoE.

    While training an expert serves at most its capacity of tokens per group. At
    inference every token is served by default, so that an image's result does not
    depend on its neighbours in the batch; with `eval_capacity_factor` inference is
    capacity-limited as in the paper's evaluation.

    Args:
        num_experts: E.
        num_selected_experts: K, experts per token.
        capacity_factor: C = S K c / E while training; 1.05 if neither this nor
            `capacity` is given.
        capacity: C itself, instead of `capacity_factor`.
        eval_capacity_factor: c at inference; None serves every token.
        capacity_rounding: `"ceil"` or `"round"`.
        capacity_multiple_of: round the capacity up to a multiple of this.
        priority: who is served first: `"first_come"`, `"max_gate"` (batch priority
            routing) or `"sum_gates"`; see `keras_moe.ops.token_choice`.
        noise_std: standard deviation of the training noise, times `num_experts`.
        kernel_initializer: of the kernel (D, E).
        seed: of the noise.
        **kwargs: see `keras.layers.Layer`; `dtype` is always float32.

    Call arguments:
        tokens: (G, S, D).
        mask: boolean (G, S), False for tokens that are not routed.
        training: adds noise and limits capacity.

    Output shape:
        `(RoutingPlan, Routing)`; see their attributes.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        *Routers in Vision Mixture of Experts*, section 2.2 and Algorithm 1.

    Example:

    >>> import numpy as np
    >>> from keras_moe.routers import TokenChoiceRouter
    >>> router = TokenChoiceRouter(num_experts=4, num_selected_experts=2)
    >>> plan, routing = router(np.ones((1, 6, 8), "float32"))
    >>> tuple(routing.gates.shape)
    (1, 6, 4)
    """

    def __init__(
        self,
        num_experts: int,
        num_selected_experts: int = 2,
        capacity_factor: float | None = None,
        capacity: int | None = None,
        eval_capacity_factor: float | None = None,
        capacity_rounding: str = "ceil",
        capacity_multiple_of: int | None = None,
        priority: str = "first_come",
        noise_std: float = 1.0,
        kernel_initializer: Any = "lecun_normal",
        seed: int | None = None,
        **kwargs,
    ):
        super().__init__(
            num_experts,
            noise_std=noise_std,
            kernel_initializer=kernel_initializer,
            seed=seed,
            **kwargs,
        )
        num_selected_experts = check_selected(num_selected_experts, self.num_experts)
        if capacity is not None and capacity_factor is not None:
            raise ValueError(
                "Expected capacity or capacity_factor, not both; received: "
                f"capacity={capacity}, capacity_factor={capacity_factor}"
            )
        if capacity is not None:
            capacity = check_integer("capacity", capacity)
        if capacity is None and capacity_factor is None:
            capacity_factor = DEFAULT_CAPACITY_FACTOR
        for name, factor in (
            ("capacity_factor", capacity_factor),
            ("eval_capacity_factor", eval_capacity_factor),
        ):
            if factor is not None:
                check_positive(name, factor)
        if capacity_rounding not in ROUNDINGS:
            raise ValueError(
                f"Expected capacity_rounding to be one of {sorted(ROUNDINGS)}; "
                f"received: capacity_rounding={capacity_rounding!r}"
            )
        if capacity_multiple_of is not None:
            check_integer("capacity_multiple_of", capacity_multiple_of)
        if priority not in PRIORITIES:
            raise ValueError(
                f"Expected priority to be one of {PRIORITIES}; "
                f"received: priority={priority!r}"
            )
        self.num_selected_experts = num_selected_experts
        self.capacity_factor = capacity_factor
        self.capacity = capacity
        self.eval_capacity_factor = eval_capacity_factor
        self.capacity_rounding = capacity_rounding
        self.capacity_multiple_of = capacity_multiple_of
        self.priority = priority

    def serves_every_token(self, training: bool | None) -> bool:
        return not training and self.eval_capacity_factor is None

    def group_capacity(self, num_tokens: Any, training: bool | None) -> Any:
        """The capacity C for groups of `num_tokens` tokens."""
        if self.serves_every_token(training):
            # A token takes an expert at most once.
            return num_tokens
        if training and self.capacity is not None:
            return self.capacity
        return expert_capacity(
            num_tokens,
            self.num_experts,
            self.capacity_factor if training else self.eval_capacity_factor,
            num_selected_experts=self.num_selected_experts,
            rounding=self.capacity_rounding,
            multiple_of=self.capacity_multiple_of,
        )

    def allocate(self, logits, noisy_logits, mask=None, training=None):
        gates = ops.softmax(noisy_logits, axis=-1)
        plan = token_choice(
            gates,
            gates,
            self.num_selected_experts,
            self.group_capacity(ops.shape(gates)[1], training),
            priority=self.priority,
            mask=mask,
        )
        return plan, Routing(logits, noisy_logits, gates, *served(plan))

    def compute_output_spec(self, tokens, mask=None, training=None):
        num_groups, num_tokens, _ = tokens.shape
        num_slots = num_tokens
        if num_tokens is not None:
            num_slots = self.group_capacity(num_tokens, training)
        by_choice = (num_groups, num_tokens, self.num_selected_experts)
        by_expert = (num_groups, num_tokens, self.num_experts)
        plan = (
            keras.KerasTensor((num_groups, self.num_experts, num_slots), "int32"),
            keras.KerasTensor(by_choice, "int32"),
            keras.KerasTensor(by_choice, "float32"),
        )
        return RoutingPlan(*plan), Routing(
            *(keras.KerasTensor(by_expert, "float32") for _ in Routing._fields)
        )

    def get_config(self):
        config = super().get_config()
        config.update(
            num_selected_experts=self.num_selected_experts,
            capacity_factor=self.capacity_factor,
            capacity=self.capacity,
            eval_capacity_factor=self.eval_capacity_factor,
            capacity_rounding=self.capacity_rounding,
            capacity_multiple_of=self.capacity_multiple_of,
            priority=self.priority,
        )
        return config
