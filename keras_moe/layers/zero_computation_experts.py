"""MoE++'s zero-computation experts: zero, copy and constant.

Axes: B batch, N tokens, D hidden, J constant experts, Z zero-computation experts.
"""

import keras
from keras import ops

from keras_moe._types import Tensor
from keras_moe.layers._layer import Layer
from keras_moe.ops._initializers import PerExpert
from keras_moe.ops.cost import Cost
from keras_moe.ops.expert_types import expert_types


@keras.saving.register_keras_serializable("keras_moe")
class ZeroComputationExperts(Layer):
    """Weighted sum of zero, copy and constant experts, computed in place.

    A zero expert returns 0, a copy expert the token x, and a constant expert `a_1 x +
    a_2 v` with a trained vector v and `[a_1, a_2] = softmax(W_c x)`. Their sum is one
    factor of x and one of each v, so no slots or buffers are needed.

    Args:
        zero_experts: number of zero experts.
        copy_experts: number of copy experts.
        constant_experts: J, number of constant experts.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        weights: float32 (B, N, Z), in the order zero, copy, constant.

    Reference: *MoE++*, equations 3 to 5.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import ZeroComputationExperts
    >>> experts = ZeroComputationExperts(zero_experts=1, copy_experts=1)
    >>> weights = np.array([[[0.0, 0.5], [1.0, 0.0]]], "float32")
    >>> np.array(experts(np.ones((1, 2, 1), "float32"), weights)).ravel().tolist()
    [0.5, 0.0]
    """

    def __init__(
        self,
        zero_experts: int = 0,
        copy_experts: int = 0,
        constant_experts: int = 0,
        **kwargs,
    ):
        # The weights stay float32, like all routing.
        super().__init__(autocast=False, **kwargs)
        types = expert_types(1, zero_experts, copy_experts, constant_experts)
        _, self.zero_experts, self.copy_experts, self.constant_experts = types

    @property
    def num_experts(self) -> int:
        """Z."""
        return self.zero_experts + self.copy_experts + self.constant_experts

    def build(self, tokens_shape, weights_shape=None):
        shapes = self.weight_shapes(tokens_shape[-2:])
        if shapes:
            self.kernel = self.add_weight(
                name="kernel",
                shape=shapes["kernel"],
                initializer=PerExpert("lecun_normal"),
            )
            self.vector = self.add_weight(
                name="vector",
                shape=shapes["vector"],
                # As in the released code.
                initializer=keras.initializers.RandomNormal(stddev=1.0),
            )

    def call(self, tokens: Tensor, weights: Tensor) -> Tensor:
        if weights.shape[-1] != self.num_experts:
            raise ValueError(
                f"Expected weights of num_experts={self.num_experts}; "
                f"received: weights.shape={tuple(weights.shape)}"
            )
        tokens = ops.cast(tokens, self.compute_dtype)
        first = self.zero_experts
        copied = weights[..., first : first + self.copy_experts]
        token_weight = ops.sum(copied, axis=-1, keepdims=True)
        if not self.constant_experts:
            return ops.cast(token_weight, self.compute_dtype) * tokens
        weights = weights[..., first + self.copy_experts :]
        # softmax([p, q]) = [sigmoid(p - q), 1 - sigmoid(p - q)]: one column, not two.
        # The difference is taken in full precision, since the common part cancels.
        kernel = ops.transpose(self.kernel[..., 0] - self.kernel[..., 1])
        kernel = ops.cast(kernel, self.compute_dtype)
        kept = ops.sigmoid(ops.cast(ops.matmul(tokens, kernel), "float32"))
        token_weight = token_weight + ops.sum(weights * kept, axis=-1, keepdims=True)
        vector_weights = ops.cast(weights * (1.0 - kept), self.compute_dtype)
        vector = ops.cast(self.vector, self.compute_dtype)
        token_weight = ops.cast(token_weight, self.compute_dtype)
        return token_weight * tokens + ops.matmul(vector_weights, vector)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        _, dim = shape
        if not self.constant_experts:
            return {}
        return {
            "kernel": (self.constant_experts, dim, 2),
            "vector": (self.constant_experts, dim),
        }

    def cost(self, shape: tuple) -> Cost:
        num_assignments, dim = shape
        share = self.constant_experts / self.num_experts
        weights = Cost.all_active(self.weight_shapes(shape))
        return Cost(
            weights.parameters,
            round(weights.parameters / self.num_experts),
            round(6 * num_assignments * dim * share),
        )
