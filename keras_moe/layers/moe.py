"""The mixture-of-experts layer: route, dispatch, experts, combine.

Axes: B batch, N tokens per example, G groups, S group_size, E experts, C capacity, D
hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe import _checks, losses, routers
from keras_moe._compat import get_keras_mask
from keras_moe._types import Config, Tensor
from keras_moe.layers._layer import Layer, build_once, inner_call, layer_argument
from keras_moe.layers.experts import ZeroComputationExperts, by_device
from keras_moe.ops._nn import is_bfloat16_on_tpus
from keras_moe.ops._primitives import is_transformed
from keras_moe.ops.cost import Cost
from keras_moe.ops.plans import Routing, in_tiles

DISPATCHERS = ("index", "einsum")


@keras.saving.register_keras_serializable("keras_moe")
class MoE(Layer):
    """Routes each token to its experts and combines their outputs.

    During training the batch is cut into groups of `group_size` tokens, which compete
    for the experts' capacity. At inference each example is a group by default, so that
    its result does not depend on the batch. Dropped tokens get zeros and rely on the
    residual connection.

    Args:
        router: a `Router`, or a name or dict for `keras_moe.routers.get`.
        experts: `Experts` layer with the router's number of feed-forward experts.
        group_size: S, tokens per group; None for one group of the whole batch.
        auxiliary_losses: dict from name to weight, such as `{"importance": 0.005,
            "load": 0.005}`, or a list of `AuxiliaryLoss`; see `keras_moe.losses.get`.
            Added in training only, averaged over groups.
        dispatcher: `"index"` (gathers, memory linear in tokens) or `"einsum"` (dense
            one-hot tensors, for small groups on TPUs).
        input_scale: factor on the experts' input; K in the released MoE++ code.
        shared_experts: layer such as `MLP` that every token passes through in addition
            to its experts, without a gate or a slot; or None. An MLP of hidden size
            n x H is n shared experts of size H.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        mask: boolean (B, N), False for tokens that are not routed; they get zeros.
        modality_ids: integers (B, N), the tokens' modalities.
        previous_logits: float32 (B, N, E), `Routing.logits` of the previous MoE layer.
        training: whether capacity, noise and auxiliary losses apply.

    Output shape:
        `(tokens, Routing)`: (B, N, D), and a record of float32 arrays (B, N, E).

    Reference:
        *Routers in Vision Mixture of Experts*, equation 2; *MoE++*, equations 1 to 6;
        *DeepSeekMoE*, section 3.2, for shared experts.

    Example:

    >>> from keras_moe.layers import Experts, MoE
    >>> from keras_moe.routers import TokenChoiceRouter
    >>> moe = MoE(
    ...     router=TokenChoiceRouter(num_experts=4, num_selected_experts=1),
    ...     experts=Experts(num_experts=4, mlp_dim=16),
    ... )
    >>> tokens, routing = moe(np.ones((2, 6, 8), "float32"))
    >>> tuple(tokens.shape), tuple(routing.gates.shape)
    ((2, 6, 8), (2, 6, 4))
    """

    def __init__(
        self,
        router: routers.Router | str | Config,
        experts: keras.layers.Layer | Config,
        group_size: int | None = None,
        auxiliary_losses: object = None,
        dispatcher: str = "index",
        input_scale: float = 1.0,
        shared_experts: keras.layers.Layer | Config | None = None,
        **kwargs,
    ):
        # Tokens are cast in `call`; `previous_logits` stay float32.
        super().__init__(autocast=False, **kwargs)
        self.group_size = _checks.check_integer("group_size", group_size, optional=True)
        self.dispatcher = _checks.check_one_of("dispatcher", dispatcher, DISPATCHERS)
        self.input_scale = _checks.check_positive("input_scale", input_scale)
        self.experts = layer_argument(experts, "experts")
        if isinstance(router, str) or (isinstance(router, dict) and "name" in router):
            router = routers.get(router, self.experts.num_experts)
        self.router = layer_argument(router, "router")
        self.shared_experts = None
        if shared_experts is not None:
            self.shared_experts = layer_argument(shared_experts, "shared_experts")
        types = self.router.expert_types
        num_ffn_experts = len(self.router.expert_columns)
        if num_ffn_experts != self.experts.num_experts:
            raise ValueError(
                "Expected router and experts of one num_experts; received: a router of "
                f"{num_ffn_experts} FFN experts, "
                f"experts.num_experts={self.experts.num_experts}"
            )
        self.zero_computation_experts = None
        if types.zero_computation:
            self.zero_computation_experts = ZeroComputationExperts(
                *types[1:], dtype=self.dtype_policy, name="zero_computation_experts"
            )
        self.auxiliary_losses = losses.get(auxiliary_losses)
        for loss in self.auxiliary_losses:
            loss.check_router(self.router)
        self.supports_masking = True

    def build(self, input_shape):
        if len(input_shape) != 3 or input_shape[-1] is None:
            expected = "tokens of shape (batch, tokens, dim)"
            raise _checks.unfit(expected, shape=tuple(input_shape))
        dim = input_shape[-1]
        # A soft router's number of slots may depend on the tokens per example.
        length = input_shape[1] if self.router.groups_per_example(True) else None
        build_once(self.router, (None, length, dim))
        build_once(self.experts, (None, self.experts.num_experts, None, dim))
        if self.zero_computation_experts is not None:
            self.zero_computation_experts.build((None, length, dim))
        if self.shared_experts is not None:
            build_once(self.shared_experts, (None, length, dim))

    def call(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        modality_ids: Tensor | None = None,
        previous_logits: Tensor | None = None,
        training: bool | None = None,
    ) -> tuple[Any, Routing]:
        if mask is None:
            # Keras passes masks only to calls with a single tensor.
            mask = get_keras_mask(tokens)
        shape = tuple(tokens.shape)[:2]
        mask = _checks.check_mask("mask", mask, shape)
        _checks.check_ids("modality_ids", modality_ids, shape)
        plan: Any
        grouped: Any
        tokens = ops.cast(tokens, self.compute_dtype)
        residual = self._residual(tokens, previous_logits, mask)
        if mask is not None:
            tokens = _without_padding(tokens, mask)
        by_example = self.router.groups_per_example(training)
        grouped, group_mask, group_ids, residual = (
            (tokens, mask, modality_ids, residual)
            if by_example
            else self._group(tokens, mask, modality_ids, residual)
        )
        plan, routing = inner_call(
            self.router,
            grouped,
            mask=group_mask,
            modality_ids=group_ids,
            training=training,
            **residual,
        )
        for loss in self.auxiliary_losses if training and self.trainable else ():
            if loss.weight:
                value = loss(routing, self.router, group_mask, group_ids)
                self.add_loss(ops.mean(value))
        if self.input_scale != 1:
            grouped = self.input_scale * grouped
        plan = in_tiles(plan) if is_bfloat16_on_tpus(grouped) else plan
        plan = by_device(plan, self.experts, training)
        # Equation 2: MoE(X)[t] = sum over r, c of C[t,r,c] * Expert_r(X^T D[:,r,c]).
        slots, group_sizes = plan, plan.group_sizes
        if is_transformed():
            # `torch.func` has no form for ragged rows, nor for gradients of our own.
            slots, group_sizes = plan.dense(), None
        elif self.dispatcher == "einsum" and group_sizes is None:
            # Only with a capacity: without one, the dense tensors have no bound.
            slots = plan.dense()
        outputs = inner_call(
            self.experts, slots.dispatch(grouped), group_sizes, training=training
        )
        # The experts' policy may be another.
        outputs = ops.cast(slots.combine(outputs), self.compute_dtype)
        if self.zero_computation_experts is not None:
            outputs = outputs + inner_call(
                self.zero_computation_experts, grouped, plan.in_place_weights
            )
        if not by_example:
            routing = Routing(*(self._ungroup(x, tokens) for x in routing))
            outputs = self._ungroup(outputs, tokens)
        if self.shared_experts is not None:
            shared = inner_call(self.shared_experts, tokens, training=training)
            shared = ops.cast(shared, self.compute_dtype)
            # Biases would give padding a value.
            shared = shared if mask is None else _without_padding(shared, mask)
            outputs = outputs + shared
        return outputs, routing

    def _residual(self, tokens, previous_logits, mask):
        """Checks `previous_logits` and returns them as arguments of the router."""
        if previous_logits is not None:
            previous_logits = ops.convert_to_tensor(previous_logits)
        self.router.check_previous_logits(previous_logits, tokens)
        if previous_logits is None:
            return {}
        previous_logits = ops.cast(previous_logits, "float32")
        if mask is not None:
            previous_logits = _without_padding(previous_logits, mask)
        return {"previous_logits": previous_logits}

    def compute_output_spec(
        self, tokens, mask=None, modality_ids=None, previous_logits=None, training=None
    ):
        self.router.check_previous_logits(previous_logits, tokens)
        routing = self.router.routing_spec(*tokens.shape[:2])
        return keras.KerasTensor(tokens.shape, self.compute_dtype), routing

    def _group(self, tokens, mask, modality_ids, residual):
        """Cuts (B, N, D) into padded (G, S, D), with a mask of the real tokens."""
        batch, length, dim = ops.shape(tokens)
        num_tokens = batch * length
        # An empty batch becomes one group of padding, large enough for a slot.
        size_if_empty = self.group_size or length * self.router.num_experts
        if ops.is_tensor(num_tokens):
            # The batch size is symbolic while TensorFlow traces.
            size = ops.minimum(self.group_size or num_tokens, num_tokens)
            size = ops.where(num_tokens == 0, size_if_empty, size)
            padding = ops.where(num_tokens == 0, size, -num_tokens % size)
        elif isinstance(num_tokens, int) and num_tokens == 0:
            size = padding = size_if_empty
        elif self.group_size is None:
            size, padding = num_tokens, 0
        else:
            size = min(self.group_size, num_tokens)
            padding = -num_tokens % size
        is_padded = not isinstance(padding, int) or padding > 0
        if is_padded and mask is None:
            mask = ops.ones((batch, length), "bool")

        def group(x, *dim):
            if x is None:
                return None
            x = ops.reshape(x, (num_tokens, *dim))
            if is_padded:
                zeros = ops.zeros((padding, *dim), x.dtype)
                x = ops.concatenate([x, zeros], axis=0)
            return ops.reshape(x, (-1, size, *dim))

        residual = {name: group(x, x.shape[-1]) for name, x in residual.items()}
        return group(tokens, dim), group(mask), group(modality_ids), residual

    def _ungroup(self, x, tokens):
        """Removes the padding from (G, S, X) and restores (B, N, X)."""
        batch, length, _ = ops.shape(tokens)
        x = ops.reshape(x, (-1, x.shape[-1]))
        return ops.reshape(x[: batch * length], (batch, length, x.shape[-1]))

    def parts(self, shape: tuple) -> dict[Any, tuple]:
        parts = (
            self.router,
            self.experts,
            self.zero_computation_experts,
            self.shared_experts,
        )
        return {part: shape for part in parts if part is not None}

    def cost(self, shape: tuple) -> Cost:
        num_tokens, dim = shape
        router, in_place = self.router, self.zero_computation_experts
        # Tokens per group at inference.
        competing = num_tokens
        if self.group_size is not None and not router.groups_per_example(False):
            competing = self.group_size
        # The example's share of its group's slots.
        num_slots = router.total_slots(competing) * num_tokens // competing
        per_token = router.experts_per_token(competing)
        experts = self.experts.cost((num_slots, dim))
        experts = experts._replace(routed_flops=experts.flops)
        active = per_token * experts.active_parameters
        if in_place is not None:
            selected = router.num_selected_experts
            others = in_place.cost((num_tokens * selected - num_slots, dim))
            # Not rounded, since these experts have few parameters.
            active += (selected - per_token) * others.parameters / in_place.num_experts
            experts += others
        cost = router.cost(shape) + experts._replace(active_parameters=round(active))
        if self.shared_experts is not None:
            cost += self.shared_experts.cost(shape)
        return cost

    def get_config(self):
        auxiliary_losses = losses.serialize(self.auxiliary_losses)
        return {**super().get_config(), "auxiliary_losses": auxiliary_losses}


def _without_padding(x, mask):
    """Zeroes padding with `where`, since 0 * NaN would be NaN."""
    real = ops.expand_dims(ops.cast(mask, "bool"), -1)
    return ops.where(real, x, ops.zeros_like(x))
