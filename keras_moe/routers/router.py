"""What every router has: a float32 kernel that turns tokens into logits.

Axes: G groups, S group_size, E experts, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.ops.checks import check_integer
from keras_moe.ops.routing import Routing, RoutingPlan


class Router(keras.layers.Layer):
    """Base class of routers: tokens in, `(RoutingPlan, Routing)` out.

    The arithmetic is float32 under every dtype policy: the layer's own policy is
    float32, and half-precision tokens are cast at its door. While training, noise
    of standard deviation `noise_std / num_experts` is added to the logits.

    Subclasses implement `allocate`, and say by `serves_every_token` whether a
    token's result can depend on the other tokens of its group.

    Args:
        num_experts: E.
        noise_std: standard deviation of the training noise, times `num_experts`;
            V-MoE uses 1.0, that is noise of 1 / E.
        kernel_initializer: of the kernel (D, E).
        seed: of the noise; None draws one from Keras's global seed.
        **kwargs: see `keras.layers.Layer`; `dtype` is always float32.

    Input shape:
        (G, S, D).

    Raises:
        ValueError: if an argument is out of range.

    Example:

    >>> from keras_moe.routers import Router, TokenChoiceRouter
    >>> issubclass(TokenChoiceRouter, Router)
    True
    """

    def __init__(
        self,
        num_experts: int,
        noise_std: float = 1.0,
        kernel_initializer: Any = "lecun_normal",
        seed: int | None = None,
        **kwargs,
    ):
        num_experts = check_integer("num_experts", num_experts)
        if not 0 <= noise_std < float("inf"):
            raise ValueError(
                f"Expected a finite noise_std >= 0; received: noise_std={noise_std}"
            )
        kwargs["dtype"] = "float32"
        kwargs.setdefault("name", "router")
        super().__init__(**kwargs)
        self.num_experts = num_experts
        self.noise_std = noise_std
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.supports_masking = True

    def build(self, input_shape):
        if len(input_shape) != 3 or input_shape[-1] is None:
            raise ValueError(
                "Expected tokens of shape (groups, tokens, dim); "
                f"received: shape={tuple(input_shape)}"
            )
        self.kernel = self.add_weight(
            name="kernel",
            shape=(input_shape[-1], self.num_experts),
            initializer=self.kernel_initializer,
            dtype="float32",
            autocast=False,
        )

    def call(
        self, tokens: Any, mask: Any = None, training: bool | None = None
    ) -> tuple[RoutingPlan, Routing]:
        logits = ops.matmul(tokens, self.kernel)
        noisy_logits = logits
        if training and self.noise_std > 0:
            noisy_logits = logits + keras.random.normal(
                ops.shape(logits),
                stddev=self.noise_std / self.num_experts,
                dtype="float32",
                seed=self.seed_generator,
            )
        return self.allocate(logits, noisy_logits, mask=mask, training=training)

    def compute_mask(self, inputs, previous_mask=None):
        # Plans and records are not sequences of tokens to mask.
        return None

    def allocate(
        self,
        logits: Any,
        noisy_logits: Any,
        mask: Any = None,
        training: bool | None = None,
    ) -> tuple[RoutingPlan, Routing]:
        """Fills the plan from the logits, both float32 (G, S, E)."""
        raise NotImplementedError

    def serves_every_token(self, training: bool | None) -> bool:
        """True if a token's result does not depend on the rest of its group."""
        raise NotImplementedError

    def parameters(self, dim: int) -> int:
        """The number of parameters for tokens of size `dim`."""
        return dim * self.num_experts

    def flops(self, num_tokens: int, dim: int) -> int:
        """Floating-point operations of the logits (2 per multiply-add)."""
        return 2 * num_tokens * dim * self.num_experts

    def get_config(self):
        config = super().get_config()
        config.update(
            num_experts=self.num_experts,
            noise_std=self.noise_std,
            kernel_initializer=keras.initializers.serialize(self.kernel_initializer),
            seed=self.seed,
        )
        return config
