"""Soft routing: every slot is a mixture of all tokens of an image.

Axes: G groups (images), S tokens of an image, E experts, C slots per expert, D hidden.
"""

import keras
from keras import ops

from keras_moe import _checks
from keras_moe._types import Tensor
from keras_moe.ops.capacity import ROUNDINGS, expert_capacity
from keras_moe.ops.cost import Cost
from keras_moe.ops.plans import Routing, SoftPlan
from keras_moe.routers.router import Router

# As in the released code.
EPSILON = 1e-6


@keras.saving.register_keras_serializable("keras_moe")
class SoftRouter(Router):
    """Soft MoE: slots are convex combinations of tokens, and outputs of slots.

    Each image is a group. Every slot has a learned vector, whose product with the
    tokens gives its logits: a softmax over tokens fills the slots, a softmax over all
    slots combines their outputs.

    Args:
        num_experts: number E of experts.
        num_slots: C, slots per expert.
        capacity_factor: c in C = S K c / E, instead of `num_slots`; 1.0 by default.
        num_selected_experts: K in the capacity; 1 in the papers.
        capacity_rounding: `"ceil"`, or `"round"` as in the released code.
        normalize: whether to normalise tokens and slot vectors, with a learned scale.
        noise_std: standard deviation of the training noise on the logits.
        seed: seed of the noise.
        **kwargs: arguments of `keras.layers.Layer`; `dtype` is always float32.

    Output shape: `(SoftPlan, Routing)`; see their attributes.

    Reference: *Routers in Vision Mixture of Experts*, equations 10 and 11; *From Sparse
    to Soft Mixtures of Experts*, section 2.3 (normalisation).

    Example:

    >>> from keras_moe.routers import SoftRouter
    >>> router = SoftRouter(num_experts=4, num_slots=2)
    >>> plan, routing = router(np.ones((1, 6, 8), "float32"))
    >>> tuple(plan.combine_weights.shape)
    (1, 6, 4, 2)
    """

    has_expert_logits = False

    def __init__(
        self,
        num_experts: int,
        num_slots: int | None = None,
        capacity_factor: float | None = None,
        num_selected_experts: int = 1,
        capacity_rounding: str = "round",
        normalize: bool = True,
        noise_std: float = 0.0,
        seed: int | None = None,
        **kwargs,
    ):
        super().__init__(num_experts, noise_std=noise_std, seed=seed, **kwargs)
        if num_slots is not None:
            num_slots = _checks.check_integer("num_slots", num_slots)
            if capacity_factor is not None:
                received = {"num_slots": num_slots, "capacity_factor": capacity_factor}
                raise _checks.unfit(f"{' or '.join(received)}, not both", **received)
        elif capacity_factor is None:
            capacity_factor = self.default_capacity_factor
        else:
            _checks.check_positive("capacity_factor", capacity_factor)
        self.slots_per_expert = num_slots
        self.capacity_factor = capacity_factor
        # Private, because a public `num_selected_experts` marks token choice.
        self._selected = _checks.check_integer(
            "num_selected_experts", num_selected_experts
        )
        self.capacity_rounding = _checks.check_one_of(
            "capacity_rounding", capacity_rounding, sorted(ROUNDINGS)
        )
        self.normalize = _checks.check_bool("normalize", normalize)

    def group_capacity(self, num_tokens: int | None, training: bool | None = None):
        """Slots per expert C for images of `num_tokens` tokens."""
        if self.slots_per_expert is not None:
            return self.slots_per_expert
        if self.built:
            return self.slots.shape[-1]
        if num_tokens is None or self.capacity_factor is None:
            raise _checks.unfit(
                "num_slots, or a known number of tokens", num_tokens=num_tokens
            )
        return expert_capacity(
            num_tokens,
            self.num_experts,
            self.capacity_factor,
            self._selected,
            rounding=self.capacity_rounding,
        )

    def build(self, input_shape):
        shapes = self.weight_shapes(input_shape[-2:])
        self.slots = self.add_kernel("slots", shapes["slots"], "lecun_normal")
        if self.normalize:
            self.scale = self.add_kernel("scale", shapes["scale"], "ones")

    def call(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        modality_ids: Tensor | None = None,
        training: bool | None = None,
    ) -> tuple[SoftPlan, Routing]:
        if modality_ids is not None:
            raise ValueError("Expected no modality_ids for soft routing; received some")
        slots = self.slots
        num_groups, num_tokens, dim = ops.shape(tokens)
        _, num_experts, capacity = slots.shape
        if self.normalize:
            tokens = _unit(tokens, axis=-1)
            slots = self.scale * _unit(slots, axis=0)
        slots = ops.reshape(slots, (dim, num_experts * capacity))
        # With slot vectors P, D = softmax(X P) over tokens fills the slots (equation
        # 10), and C = softmax(X P) over all slots combines their outputs (equation 11).
        # (G, S, E x C), so that both softmaxes run without a transpose.
        logits = ops.matmul(tokens, slots)
        noisy_logits = self.add_noise(logits, self.noise_std, training)
        routed = noisy_logits
        if mask is not None:
            mask = ops.expand_dims(ops.cast(mask, "bool"), -1)
            routed = ops.where(mask, noisy_logits, -1e30)
        # Equations 10 and 11: D is a softmax over tokens, C a softmax over all slots.
        dispatch = ops.softmax(routed, axis=1)
        combine = ops.softmax(noisy_logits, axis=2)
        if mask is not None:
            dispatch = ops.where(mask, dispatch, 0.0)
            combine = ops.where(mask, combine, 0.0)

        def by_slot(x):
            return ops.reshape(x, (num_groups, num_tokens, num_experts, capacity))

        plan = SoftPlan(by_slot(dispatch), by_slot(combine))
        dispatched, combined = plan.assignments()
        return plan, Routing(
            by_slot(logits),
            by_slot(noisy_logits),
            combined,
            combined,
            dispatched,
            combined,
        )

    def groups_per_example(self, training: bool | None) -> bool:
        return True

    def total_slots(self, num_tokens: int) -> int:
        return self.num_experts * self.group_capacity(num_tokens)

    def experts_per_token(self, num_tokens: int) -> float:
        return self.num_experts

    @property
    def summary(self) -> str:
        """A short label such as "soft, C=2"."""
        if self.slots_per_expert is None:
            return f"soft, c={self._selected * self.capacity_factor:g}"
        return f"soft, C={self.slots_per_expert}"

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        num_tokens, dim = shape
        slots = (dim, self.num_experts, self.group_capacity(num_tokens))
        shapes: dict[str, tuple] = {"slots": slots}
        if self.normalize:
            shapes["scale"] = ()
        return shapes

    def cost(self, shape: tuple) -> Cost:
        num_tokens, dim = shape
        # Logits, dispatch and combine.
        flops = 6 * num_tokens * dim * self.total_slots(num_tokens)
        return Cost.all_active(self.weight_shapes(shape), flops)

    def routing_spec(self, num_groups, num_tokens) -> Routing:
        by_expert = super().routing_spec(num_groups, num_tokens)
        capacity = self.group_capacity(num_tokens)
        shape = (num_groups, num_tokens, self.num_experts, capacity)
        logits, noisy_logits = (keras.KerasTensor(shape, "float32") for _ in range(2))
        return by_expert._replace(logits=logits, noisy_logits=noisy_logits)

    def get_config(self):
        own = {
            "num_slots": self.slots_per_expert,
            "num_selected_experts": self._selected,
        }
        return {**super().get_config(), **own}


def _unit(x, axis):
    squared = ops.sum(ops.square(x), axis=axis, keepdims=True)
    return x * ops.rsqrt(squared + EPSILON)
