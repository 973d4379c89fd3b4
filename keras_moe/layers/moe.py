"""The mixture-of-experts layer: route, dispatch, experts, combine.

Axes: B batch, N tokens of an image, G groups, S group_size, E experts, C capacity,
D hidden.
"""

from typing import Any

import keras
from keras import ops, tree

from keras_moe import losses, routers
from keras_moe.layers.nested import build_once, layer_argument
from keras_moe.ops.checks import check_integer
from keras_moe.ops.dispatch import (
    combine,
    combine_einsum,
    dispatch,
    dispatch_einsum,
)
from keras_moe.ops.routing import RaggedPlan, Routing

DISPATCHERS = {
    "index": (dispatch, combine),
    "einsum": (dispatch_einsum, combine_einsum),
}


@keras.saving.register_keras_serializable("keras_moe")
class MoE(keras.layers.Layer):
    """Sends each token to its experts and brings their outputs home.

    While training, the tokens of the batch are cut into groups of `group_size`,
    within which they compete for the experts' capacity. The last group is filled
    with padding that is not routed, so any batch size works. At inference each image
    is its own group by default and its result does not depend on the batch; for a
    `SoftRouter` it is always. A token that no expert serves gets zeros: in a
    transformer the residual carries it.

    Args:
        router: the name of a router, such as `"softmax_token_choice"` or `"soft"` (see
            `keras_moe.routers.get`), or a router layer such as `TokenChoiceRouter`.
        experts: an `Experts` layer with the router's number of experts.
        group_size: S, tokens per group; None makes one group of the whole batch.
            Images stay whole groups where the router wants them so.
        auxiliary_losses: a dict from name to weight such as
            `{"importance": 0.005, "load": 0.005}`, or a list of `AuxiliaryLoss`.
            They are added, averaged over groups, in training only, so that
            `evaluate` reports the task's loss, and not if the layer is frozen.
        dispatcher: how experts with a capacity get their tokens: `"index"` (gathers;
            memory linear in tokens) or `"einsum"` (dense one-hot tensors; for small
            groups on TPUs).
        **kwargs: see `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        mask: boolean (B, N), False for tokens that are not routed; they get zeros.
        modality_ids: integers (B, N), for routers and losses that tell modalities
            apart.
        training: whether capacity, noise and auxiliary losses apply.

    Output shape:
        `(tokens, Routing)`: tokens (B, N, D), and the routing record with
        float32 arrays (B, N, E); a `SoftRouter`'s logits have a slot axis behind.

    Raises:
        ValueError: if an argument is out of range or the parts do not fit.

    Reference:
        *Routers in Vision Mixture of Experts*, equation 2.

    Example:

    >>> import numpy as np
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
        router: Any,
        experts: Any,
        group_size: int | None = None,
        auxiliary_losses: Any = None,
        dispatcher: str = "index",
        **kwargs,
    ):
        super().__init__(**kwargs)
        if group_size is not None:
            group_size = check_integer("group_size", group_size)
        if dispatcher not in DISPATCHERS:
            raise ValueError(
                f"Expected dispatcher to be one of {sorted(DISPATCHERS)}; "
                f"received: dispatcher={dispatcher!r}"
            )
        self.experts = layer_argument(experts, "experts")
        if isinstance(router, str):
            router = routers.get(router, self.experts.num_experts)
        self.router = layer_argument(router, "router")
        if self.router.num_experts != self.experts.num_experts:
            raise ValueError(
                "Expected router and experts of one num_experts; received: "
                f"router.num_experts={self.router.num_experts}, "
                f"experts.num_experts={self.experts.num_experts}"
            )
        self.group_size = group_size
        self.auxiliary_losses = losses.get(auxiliary_losses)
        for loss in self.auxiliary_losses:
            loss.check_router(self.router)
        self.dispatcher = dispatcher
        self.supports_masking = True

    def build(self, input_shape):
        if len(input_shape) != 3 or input_shape[-1] is None:
            raise ValueError(
                "Expected tokens of shape (batch, tokens, dim); "
                f"received: shape={tuple(input_shape)}"
            )
        dim = input_shape[-1]
        # A soft router's slots may depend on the tokens of an image.
        length = input_shape[1] if self.router.groups_by_image(True) else None
        build_once(self.router, (None, length, dim))
        build_once(self.experts, (None, self.experts.num_experts, None, dim))

    def call(
        self,
        tokens: Any,
        mask: Any = None,
        modality_ids: Any = None,
        training: bool | None = None,
    ) -> tuple[Any, Routing]:
        if mask is not None:
            # Padding may hold anything, and 0 times NaN is NaN.
            real = ops.expand_dims(ops.cast(mask, "bool"), -1)
            tokens = ops.where(real, tokens, ops.zeros_like(tokens))
        by_image = self.router.groups_by_image(training)
        grouped, group_mask, group_ids = (
            (tokens, mask, modality_ids)
            if by_image
            else self._group(tokens, mask, modality_ids)
        )
        plan, routing = self.router(
            grouped, mask=group_mask, modality_ids=group_ids, training=training
        )
        if training and self.trainable:
            self._add_losses(routing, group_mask, group_ids)
        if isinstance(plan, RaggedPlan):
            outputs = self.experts(
                dispatch(grouped, plan), plan.group_sizes, training=training
            )
            outputs = combine(outputs, plan)
        else:
            dispatch_tokens, combine_outputs = DISPATCHERS[self.dispatcher]
            outputs = self.experts(dispatch_tokens(grouped, plan), training=training)
            outputs = combine_outputs(outputs, plan)
        if by_image:
            return outputs, routing
        return tree.map_structure(
            lambda x: self._ungroup(x, tokens), (outputs, routing)
        )

    def compute_output_spec(self, tokens, mask=None, modality_ids=None, training=None):
        _, routing = self.router.compute_output_spec(tokens, training=training)
        return keras.KerasTensor(tokens.shape, self.compute_dtype), routing

    def _group(self, tokens, mask, modality_ids):
        """Cuts (B, N, D) into (G, S, D), padded, and says which tokens are real."""
        batch, length, dim = ops.shape(tokens)
        num_tokens = batch * length
        if self.group_size is None:
            size, padding = num_tokens, 0
        elif isinstance(num_tokens, int):
            size = min(self.group_size, num_tokens)
            padding = -num_tokens % size
        else:
            # The batch size is unknown while TensorFlow traces: pad as needed then.
            size = ops.minimum(self.group_size, num_tokens)
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

        return group(tokens, dim), group(mask), group(modality_ids)

    def _ungroup(self, x, tokens):
        """Takes the padding off (G, S, X) and returns (B, N, X)."""
        batch, length, _ = ops.shape(tokens)
        x = ops.reshape(x, (-1, x.shape[-1]))
        return ops.reshape(x[: batch * length], (batch, length, x.shape[-1]))

    def _add_losses(self, routing, mask, modality_ids):
        for loss in self.auxiliary_losses:
            if loss.weight == 0:
                continue
            self.add_loss(ops.mean(loss(routing, self.router, mask, modality_ids)))

    def parameters(self, dim: int) -> int:
        """The number of parameters for tokens of size `dim`."""
        return self.router.parameters(dim) + self.experts.parameters(dim)

    def active_parameters(self, num_tokens: int, dim: int) -> int:
        """The parameters that a token meets, on average: router and its experts."""
        experts = self.router.experts_per_token(num_tokens)
        experts = round(experts * self.experts.expert_parameters(dim))
        return self.router.parameters(dim) + experts

    def flops(self, num_tokens: int, dim: int) -> int:
        """Floating-point operations if no token is dropped (2 per multiply-add)."""
        num_slots = self.router.num_slots(num_tokens)
        return self.router.flops(num_tokens, dim) + self.experts.flops(num_slots, dim)

    def get_config(self):
        config = super().get_config()
        config.update(
            router=keras.saving.serialize_keras_object(self.router),
            experts=keras.saving.serialize_keras_object(self.experts),
            group_size=self.group_size,
            auxiliary_losses=losses.serialize(self.auxiliary_losses),
            dispatcher=self.dispatcher,
        )
        return config
