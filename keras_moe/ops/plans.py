"""Plans: which tokens each expert gets, and the weights of its outputs.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden, R
rows (G x S x K), Z experts that act in place.

Equation 2 of *Routers in Vision Mixture of Experts* writes an MoE layer with a dispatch
tensor D and a combine tensor C of shape (G, S, E, C),

    MoE(X)[t] = sum over e, c of C[t, e, c] * Expert_e(X^T D[:, e, c]).

Soft routing fills both (`SoftPlan`). The sparse plans keep the nonzero entries, by
token (`RoutingPlan`), by slot (`SlotPlan`) or, without a capacity, by row
(`RaggedPlan`). A `HeterogeneousPlan` adds experts without slots. All are NamedTuples of
tensors with the same methods:

- `dispatch(tokens)` fills the experts' slots or rows, and `combine(outputs)` sums the
  experts' outputs for each token;
- `dense()` is the `DensePlan` with the tensors D and C;
- `assignments()` tells which expert served which token, and with what weight;
- `group_sizes` is the number of rows of each expert, None if experts have slots.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from keras import ops

from keras_moe._checks import fits_shape, unfit
from keras_moe._types import Size, Tensor
from keras_moe.ops._primitives import take_along_axis, vmap_groups
from keras_moe.ops._rows import add_slots, combine_rows, gather_rows, gather_slots


class Routing(NamedTuple):
    """What a router did: float32 arrays for losses, gating residuals and analysis.

    Routers return it by group, MoE layers aligned with their own tokens: (B, N, E).

    Attributes:
        logits: (G, S, E), without noise; (G, S, E, C) for soft routers.
        noisy_logits: the logits that routed, with noise and scaling; same shape.
        affinity: (G, S, E). What allocated the slots: the gates, or a transport plan.
        gates: (G, S, E). The softmax of `noisy_logits`, summed over an expert's slots.
        dispatched: (G, S, E). 1 where the expert served the token, else 0; for soft
            routers the token's share of the expert's slots, summed over these.
        combined: (G, S, E). The weight of the expert in the token's output.

    Example:

    >>> from keras_moe.ops import Routing
    >>> Routing._fields
    ('logits', 'noisy_logits', 'affinity', 'gates', 'dispatched', 'combined')
    """

    logits: Tensor
    noisy_logits: Tensor
    affinity: Tensor
    gates: Tensor
    dispatched: Tensor
    combined: Tensor


class DensePlan(NamedTuple):
    """The dispatch tensor D and the combine tensor C of equation 2, for any plan.

    Its memory grows with G x S x E x C: for inspection, and for small groups on TPUs.

    Attributes:
        dispatch_weights: boolean (G, S, E, C). D, whether the token is in the slot; for
            soft routing float32, the token's weight in the slot.
        combine_weights: float32 (G, S, E, C). C, the slot's weight in the output.

    Example:

    >>> from keras_moe import ops
    >>> gates = np.array([[[0.75, 0.25], [0.5, 0.5]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=1, capacity=1)
    >>> dense = plan.dense()
    >>> np.array(dense.dispatch_weights)[0, :, :, 0].tolist()
    [[True, False], [False, False]]
    >>> slots = dense.dispatch(np.array([[[1.0], [2.0]]], "float32"))
    >>> np.array(dense.combine(slots))[0, :, 0].tolist()
    [0.75, 0.0]
    """

    dispatch_weights: Tensor
    combine_weights: Tensor

    group_sizes = None

    def dispatch(self, tokens: Tensor) -> Tensor:
        """Fills the slots by an einsum; see `RoutingPlan.dispatch`."""
        return _fill_slots(tokens, self.dispatch_weights)

    def combine(self, outputs: Tensor) -> Tensor:
        """Sums each token's slots by an einsum; see `RoutingPlan.combine`."""
        groups, _, *slots = self.combine_weights.shape
        outputs = _check("outputs", outputs, (groups, *slots))
        # In float32: bfloat16 sums over all slots would lose the small weights.
        total = ops.einsum(
            "gecd,gsec->gsd", ops.cast(outputs, "float32"), self.combine_weights
        )
        return ops.cast(total, outputs.dtype)

    def dense(self) -> "DensePlan":
        """The plan itself."""
        return self

    def assignments(self) -> tuple[Tensor, Tensor]:
        """The sums over each expert's slots; see `RoutingPlan.assignments`."""
        dispatched = ops.cast(self.dispatch_weights, "float32")
        return ops.sum(dispatched, axis=-1), ops.sum(self.combine_weights, axis=-1)


class SoftPlan(NamedTuple):
    """Soft routing: slots are mixtures of tokens, and outputs mixtures of slots.

    Attributes:
        dispatch_weights: float32 (G, S, E, C). Sums to 1 over tokens (0 if all masked).
        combine_weights: float32 (G, S, E, C). Sums to 1 over slots (0 if masked).

    Reference: *Routers in Vision Mixture of Experts*, equations 10 and 11.

    Example:

    >>> from keras_moe import ops
    >>> weights = np.full((1, 4, 2, 1), 0.25, "float32")
    >>> plan = ops.SoftPlan(dispatch_weights=weights, combine_weights=2 * weights)
    >>> tokens = np.array([[[0.0], [1.0], [2.0], [5.0]]], "float32")
    >>> np.array(plan.dispatch(tokens))[0, :, 0, 0].tolist()  # the mean
    [2.0, 2.0]
    """

    dispatch_weights: Tensor
    combine_weights: Tensor

    group_sizes = None

    def dispatch(self, tokens: Tensor) -> Tensor:
        """Mixes the tokens in their dtype; see `RoutingPlan.dispatch`."""
        return _fill_slots(tokens, self.dispatch_weights)

    def combine(self, outputs: Tensor) -> Tensor:
        """Mixes the slots' outputs in their dtype; see `RoutingPlan.combine`."""
        groups, _, *slots = self.combine_weights.shape
        outputs = _check("outputs", outputs, (groups, *slots))
        weights = ops.cast(self.combine_weights, outputs.dtype)
        return ops.einsum("gecd,gsec->gsd", outputs, weights)

    def dense(self) -> DensePlan:
        """The same tensors as a plan that combines in float32."""
        return DensePlan(*self)

    def assignments(self) -> tuple[Tensor, Tensor]:
        """The sums over each expert's slots; see `RoutingPlan.assignments`."""
        return self.dense().assignments()


class RoutingPlan(NamedTuple):
    """Token choice: the slots of each token's K choices; memory is S x K + E x C.

    Attributes:
        slot_tokens: int32 (G, E, C). The token in each slot, -1 where empty.
        token_slots: int32 (G, S, K). Each choice's flat slot `expert * C + position`,
            -1 where the choice was dropped.
        combine_weights: float32 (G, S, K). Each choice's weight, 0 where dropped.

    Example:

    >>> from keras_moe import ops
    >>> gates = np.array([[[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]]], "float32")
    >>> plan = ops.token_choice(gates, gates, num_selected_experts=1, capacity=1)
    >>> np.array(plan.slot_tokens).tolist()  # expert 0 was full for token 1
    [[[0], [2]]]
    >>> np.array(plan.token_slots).tolist()
    [[[0], [-1], [1]]]
    >>> slots = plan.dispatch(np.array([[[1.0], [2.0], [4.0]]], "float32"))
    >>> np.array(slots)[0, :, 0, 0].tolist()
    [1.0, 4.0]
    >>> np.array(plan.combine(slots))[0, :, 0].tolist()
    [0.75, 0.0, 3.0]
    """

    slot_tokens: Tensor
    token_slots: Tensor
    combine_weights: Tensor

    group_sizes = None

    def dispatch(self, tokens: Tensor) -> Tensor:
        """Fills the slots from the tokens: `X^T D` of equation 2.

        Tokens (G, S, D) of any float dtype give the experts' inputs (G, E, C, D) in
        that dtype; empty slots hold zeros.
        """
        tokens = _check("tokens", tokens, self.token_slots.shape[:2])

        def gather(tokens, *fields):
            plan, dim = RoutingPlan(*fields), tokens.shape[-1]
            inputs = gather_rows(
                ops.reshape(tokens, (-1, dim)), plan._flat_tokens(), plan._flat_slots()
            )
            return ops.reshape(inputs, (*ops.shape(plan.slot_tokens), dim))

        return vmap_groups(gather, tokens, *self)

    def combine(self, outputs: Tensor) -> Tensor:
        """Sums each token's expert outputs, weighted by `combine_weights`.

        Outputs (G, E, C, D) of any float dtype give tokens (G, S, D) in that dtype,
        summed in float32. A token whose choices were all dropped gets zeros.
        """
        outputs = _check("outputs", outputs, self.slot_tokens.shape)

        def combine(outputs, *fields):
            plan = RoutingPlan(*fields)
            return _combine_choices(
                ops.reshape(outputs, (-1, outputs.shape[-1])),
                plan.combine_weights,
                plan._flat_slots(),
                plan._flat_tokens(),
            )

        return vmap_groups(combine, outputs, *self)

    def dense(self) -> DensePlan:
        """The same plan as equation 2's tensors; `dispatch_weights` are boolean."""
        _, num_experts, capacity = ops.shape(self.slot_tokens)
        _, weights = one_hot_choices(
            self.token_slots, self.combine_weights, num_experts * capacity
        )
        shape = (*ops.shape(weights)[:2], num_experts, capacity)
        num_tokens = ops.shape(self.token_slots)[1]
        return DensePlan(
            _tokens_in_slots(self.slot_tokens, num_tokens), ops.reshape(weights, shape)
        )

    def assignments(self) -> tuple[Tensor, Tensor]:
        """1 where an expert served a token, and its weight, float32 (G, S, E)."""
        _, num_experts, capacity = ops.shape(self.slot_tokens)
        # floor(-1 / C) = -1 matches no expert: dropped choices vanish.
        chosen = ops.floor_divide(self.token_slots, capacity)
        return one_hot_choices(chosen, self.combine_weights, num_experts)

    def of_experts(self, experts: Sequence[int]) -> "RoutingPlan":
        """The plan of experts with these increasing ids only, renumbered from 0."""
        num_experts = self.slot_tokens.shape[1]
        capacity = ops.shape(self.slot_tokens)[2]
        is_served = self.token_slots >= 0
        slots = ops.where(is_served, self.token_slots, 0)
        expert = ops.take(
            _new_ids(experts, num_experts), ops.floor_divide(slots, capacity), axis=0
        )
        return self._replace(
            slot_tokens=ops.take(self.slot_tokens, list(experts), axis=1),
            token_slots=ops.where(is_served, expert * capacity + slots % capacity, -1),
        )

    def _flat_slots(self):
        """The slot of each choice, counted over all groups, (G x S, K), or -1."""
        _, num_experts, capacity = ops.shape(self.slot_tokens)
        slots = _over_groups(self.token_slots, num_experts * capacity)
        return ops.reshape(slots, (-1, slots.shape[-1]))

    def _flat_tokens(self):
        """The token in each slot, counted over all groups, (G x E x C,), or -1."""
        tokens = _over_groups(self.slot_tokens, ops.shape(self.token_slots)[1])
        return ops.reshape(tokens, (-1,))


class SlotPlan(NamedTuple):
    """Expert choice: the tokens that each expert took, and their weights.

    Attributes:
        slot_tokens: int32 (G, E, C). The token in each slot, -1 where empty.
        token_slots: int32 (G, S, E). The flat slot `expert * C + position` in which the
            expert serves the token, -1 where it does not.
        slot_weights: float32 (G, E, C). The slot's weight in its token's output, or 0.

    Example:

    >>> from keras_moe import ops
    >>> gates = np.array([[[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]]], "float32")
    >>> plan = ops.expert_choice(gates, gates, capacity=1)
    >>> np.array(plan.token_slots).tolist()  # token 1 has no slot
    [[[0, -1], [-1, -1], [-1, 1]]]
    >>> slots = plan.dispatch(np.array([[[1.0], [2.0], [4.0]]], "float32"))
    >>> np.array(plan.combine(slots))[0, :, 0].tolist()
    [0.75, 0.0, 3.0]
    """

    slot_tokens: Tensor
    token_slots: Tensor
    slot_weights: Tensor

    group_sizes = None

    def dispatch(self, tokens: Tensor) -> Tensor:
        """Fills the slots from the tokens; see `RoutingPlan.dispatch`."""
        tokens = _check("tokens", tokens, self.token_slots.shape[:2])

        def gather(tokens, *fields):
            plan = SlotPlan(*fields)
            inputs = gather_slots(tokens, plan._owners())
            return ops.reshape(inputs, (*ops.shape(plan.slot_tokens), tokens.shape[-1]))

        return vmap_groups(gather, tokens, *self)

    def combine(self, outputs: Tensor) -> Tensor:
        """Adds each slot's output to its token; see `RoutingPlan.combine`.

        TPUs round the weighted outputs to bfloat16 before the sum if these have it.
        """
        outputs = _check("outputs", outputs, self.slot_tokens.shape)

        def scatter(outputs, *fields):
            # From the slots' side: a token has up to E of them, mostly none.
            plan = SlotPlan(*fields)
            weighted = plan.slot_weights[..., None] * ops.cast(outputs, "float32")
            owners = plan._owners()
            weighted = ops.reshape(weighted, (*ops.shape(owners), outputs.shape[-1]))
            num_tokens = ops.shape(plan.token_slots)[1]
            return add_slots(weighted, owners, num_tokens, outputs.dtype)

        return vmap_groups(scatter, outputs, *self)

    def dense(self) -> DensePlan:
        """The same plan as equation 2's tensors; see `RoutingPlan.dense`."""
        in_slot = _tokens_in_slots(self.slot_tokens, ops.shape(self.token_slots)[1])
        return DensePlan(
            in_slot, ops.cast(in_slot, "float32") * self.slot_weights[:, None]
        )

    def assignments(self) -> tuple[Tensor, Tensor]:
        """The experts that served each token; see `RoutingPlan.assignments`."""
        is_served = self.token_slots >= 0
        slots = ops.where(is_served, self.token_slots, 0)
        # `slot_weights[g].ravel()[slots[g]]`, with sizes in full: without groups there
        # is none to infer.
        shape = ops.shape(slots)
        size, count = (math.prod(ops.shape(x)[1:]) for x in (self.slot_weights, slots))
        flat = ops.reshape(self.slot_weights, (shape[0], size))
        slots = ops.reshape(slots, (shape[0], count))
        weights = ops.reshape(take_along_axis(flat, slots, axis=1), shape)
        return ops.cast(is_served, "float32"), ops.where(is_served, weights, 0.0)

    def _owners(self):
        """The token in each slot of a group, (G, E x C), -1 where empty."""
        num_groups, *slots = ops.shape(self.slot_tokens)
        return ops.reshape(self.slot_tokens, (num_groups, math.prod(slots)))


class RaggedPlan(NamedTuple):
    """Token choice without capacity: as many rows as there are choices, by expert.

    Attributes:
        row_tokens: int32 (R,). The token of each row as `group * S + token`, sorted by
            expert and then by token; rows of masked tokens come last, as -1.
        token_rows: int32 (G, S, K). The row of each choice, -1 where not routed.
        combine_weights: float32 (G, S, K). Each choice's weight, 0 where not routed.
        token_experts: int32 (G, S, K). The expert of each choice, E where not routed.
        group_sizes: int32 (E,). The number of rows of each expert.

    Example:

    >>> from keras_moe import ops
    >>> gates = np.array([[[0.75, 0.25], [0.25, 0.75], [0.5, 0.5]]], "float32")
    >>> plan = ops.dropless_token_choice(gates, gates, num_selected_experts=1)
    >>> np.array(plan.row_tokens).tolist(), np.array(plan.group_sizes).tolist()
    ([0, 2, 1], [2, 1])
    >>> rows = plan.dispatch(np.array([[[1.0], [2.0], [4.0]]], "float32"))
    >>> np.array(rows)[:, 0].tolist()
    [1.0, 4.0, 2.0]
    >>> np.array(plan.combine(rows))[0, :, 0].tolist()
    [0.75, 1.5, 2.0]
    """

    row_tokens: Tensor
    token_rows: Tensor
    combine_weights: Tensor
    token_experts: Tensor
    group_sizes: Tensor

    def dispatch(self, tokens: Tensor) -> Tensor:
        """The experts' inputs (R, D); rows of masked tokens hold zeros."""
        tokens = _check("tokens", tokens, self.token_rows.shape[:2])
        flat = ops.reshape(tokens, (-1, tokens.shape[-1]))
        return gather_rows(flat, self.row_tokens, self._flat_rows())

    def combine(self, outputs: Tensor) -> Tensor:
        """Sums outputs (R, D) of experts; see `RoutingPlan.combine`."""
        outputs = _check("outputs", outputs, self.row_tokens.shape)
        return _combine_choices(
            outputs, self.combine_weights, self._flat_rows(), self.row_tokens
        )

    def dense(self) -> DensePlan:
        """The same plan with room for everyone, C = S; see `RoutingPlan.dense`."""
        dispatched, combined = self.assignments()
        # An expert's tokens keep their order.
        position = ops.cumsum(dispatched, axis=1) - 1.0
        slots = ops.arange(ops.shape(dispatched)[1], dtype="float32")
        in_slot = ops.expand_dims(position, -1) == slots
        in_slot = ops.logical_and(in_slot, ops.expand_dims(dispatched > 0, -1))
        weights = ops.where(in_slot, ops.expand_dims(combined, -1), 0.0)
        return DensePlan(in_slot, weights)

    def assignments(self) -> tuple[Tensor, Tensor]:
        """The experts that served each token; see `RoutingPlan.assignments`."""
        num_experts = ops.shape(self.group_sizes)[0]
        return one_hot_choices(self.token_experts, self.combine_weights, num_experts)

    def of_experts(self, experts: Sequence[int]) -> "RaggedPlan":
        """The plan of some experts only; see `RoutingPlan.of_experts`."""
        # A choice that is not routed has the expert after the last.
        ids = _new_ids(experts, self.group_sizes.shape[0] + 1)
        return self._replace(
            token_experts=ops.take(ids, self.token_experts, axis=0),
            group_sizes=ops.take(self.group_sizes, list(experts), axis=0),
        )

    def _flat_rows(self):
        return ops.reshape(self.token_rows, (-1, self.token_rows.shape[-1]))


class HeterogeneousPlan(NamedTuple):
    """Token choice among experts, the last of which act on tokens in place.

    Dispatch and combine move the tokens of the experts that have slots or rows; the
    outputs of the others are added to these.

    Attributes:
        plan: a `RoutingPlan` or `RaggedPlan` of the experts that have slots or rows.
        in_place: float32 (G, S, Z). 1 where the expert serves the token, else 0.
        in_place_weights: float32 (G, S, Z). The expert's weight, 0 where it does not.

    Reference: *MoE++*, section 3.1: zero-computation experts.

    Example:

    >>> from keras_moe import ops
    >>> gates = np.array([[[0.7, 0.1, 0.2], [0.1, 0.3, 0.6]]], "float32")
    >>> plan = ops.token_choice(gates, gates, 1, capacity=1, in_place_experts=1)
    >>> np.array(plan.plan.slot_tokens).tolist()  # expert 1 has no token
    [[[0], [-1]]]
    >>> np.array(plan.in_place).tolist()  # and token 1 the last
    [[[0.0], [1.0]]]
    """

    plan: Any
    in_place: Tensor
    in_place_weights: Tensor

    @property
    def group_sizes(self) -> Tensor | None:
        """The number of rows of each expert that has rows, or None."""
        return self.plan.group_sizes

    def dispatch(self, tokens: Tensor) -> Tensor:
        """Fills the slots or rows; see `RoutingPlan.dispatch`."""
        return self.plan.dispatch(tokens)

    def combine(self, outputs: Tensor) -> Tensor:
        """Sums the outputs of slots or rows; see `RoutingPlan.combine`."""
        return self.plan.combine(outputs)

    def of_experts(self, experts: Sequence[int]) -> "HeterogeneousPlan":
        """The plan of some experts with slots or rows; see `RoutingPlan.of_experts`."""
        return self._replace(plan=self.plan.of_experts(experts))

    def dense(self) -> "HeterogeneousPlan":
        """The same plan with slots or rows as equation 2's tensors."""
        return self._replace(plan=self.plan.dense())

    def assignments(self) -> tuple[Tensor, Tensor]:
        """Two (G, S, E + Z), experts in place last; see `RoutingPlan.assignments`."""
        dispatched, combined = self.plan.assignments()
        return (
            ops.concatenate([dispatched, self.in_place], axis=-1),
            ops.concatenate([combined, self.in_place_weights], axis=-1),
        )


Plan: TypeAlias = (
    DensePlan | SoftPlan | RoutingPlan | SlotPlan | RaggedPlan | HeterogeneousPlan
)


def in_tiles(plan: Plan) -> Plan:
    """The plan with empty slots up to a multiple of 8, a tile of TPUs' memory."""
    # Without them, TPUs copy the slots more often around each all-to-all. Where they
    # would be more than an eighth, the plan stays as it is.
    if isinstance(plan, HeterogeneousPlan):
        return plan._replace(plan=in_tiles(plan.plan))
    if not isinstance(plan, RoutingPlan | SlotPlan):
        return plan
    capacity = plan.slot_tokens.shape[2]
    padding = -capacity % 8
    if not padding or 8 * padding > capacity:
        return plan
    after = ((0, 0), (0, 0), (0, padding))
    slots = plan.token_slots
    moved = slots + padding * ops.floor_divide(slots, capacity)
    plan = plan._replace(
        slot_tokens=ops.pad(plan.slot_tokens, after, constant_values=-1),
        token_slots=ops.where(slots >= 0, moved, -1),
    )
    if isinstance(plan, RoutingPlan):
        return plan
    return plan._replace(slot_weights=ops.pad(plan.slot_weights, after))


def one_hot_choices(
    chosen: Tensor, weights: Tensor, num_experts: Size
) -> tuple[Tensor, Tensor]:
    """Choices (G, S, K) and their weights as sums of one-hots, two (G, S, E)."""
    experts = ops.arange(num_experts, dtype="int32")
    dispatched: Any = 0.0
    combined: Any = 0.0
    # An unrolled sum over K: one fused pass each, no (S, K, E) tensor.
    for k in range(chosen.shape[-1]):
        one_hot = ops.cast(chosen[..., k : k + 1] == experts, "float32")
        dispatched = dispatched + one_hot
        combined = combined + one_hot * weights[..., k : k + 1]
    return dispatched, combined


def _combine_choices(outputs, weights, rows, owners):
    """Each token's weighted sum of its K rows of `outputs`, (G, S, D)."""
    num_groups, num_tokens, num_choices = ops.shape(weights)
    weights = ops.reshape(weights, (-1, num_choices))
    total = combine_rows(outputs, weights, rows, owners)
    total = ops.reshape(total, (num_groups, num_tokens, outputs.shape[-1]))
    return ops.cast(total, outputs.dtype)


def _over_groups(index, size):
    """Indices into each group's `size` entries as indices into those of all groups."""
    first = ops.arange(ops.shape(index)[0], dtype="int32") * size
    return ops.where(index >= 0, index + first[:, None, None], -1)


def _fill_slots(tokens, dispatch_weights):
    """`X^T D` in the dtype of the tokens."""
    tokens = _check("tokens", tokens, dispatch_weights.shape[:2])
    weights = ops.cast(dispatch_weights, tokens.dtype)
    return ops.einsum("gsd,gsec->gecd", tokens, weights)


def _tokens_in_slots(slot_tokens, num_tokens):
    """D of a sparse plan, boolean (G, S, E, C)."""
    tokens = ops.arange(num_tokens, dtype="int32")[:, None, None]
    return ops.expand_dims(slot_tokens, 1) == tokens


def _new_ids(experts, num_experts):
    """Maps each expert id to its index in `experts`, and others to `len(experts)`."""
    experts = list(experts)
    ids = [
        experts.index(e) if e in experts else len(experts) for e in range(num_experts)
    ]
    return ops.convert_to_tensor(ids, "int32")


def _check(name, value, sizes):
    """The value as a tensor (*sizes, dim); the plan knows the sizes."""
    value = ops.convert_to_tensor(value)
    if not fits_shape(value.shape, (*sizes, None)):
        expected = f"{name} of shape {(*sizes, 'dim')}, as in the plan"
        raise unfit(expected, f"{name}.shape={tuple(value.shape)}")
    return value
