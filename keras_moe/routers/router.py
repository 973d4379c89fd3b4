"""What every router is: tokens in, a plan and a record out, all in float32.

Axes: G groups, S group_size, E experts, C capacity, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_integer, check_not_negative, check_seed
from keras_moe.ops.expert_kinds import ExpertKinds
from keras_moe.ops.routing import Routing


class Router(keras.layers.Layer):
    """Base class of routers: tokens in, `(plan, Routing)` out.

    The arithmetic is float32 under every dtype policy: the layer's own policy is
    float32, and half-precision tokens are cast at its door.

    Subclasses say how they group tokens (`groups_by_image`), how many slots they
    fill (`num_slots`), and whether their logits are one per expert
    (`has_expert_logits`), which auxiliary losses need.

    Args:
        num_experts: E.
        noise_std: of the training noise; see the subclass.
        seed: of the noise; None draws one from Keras's global seed.
        **kwargs: see `keras.layers.Layer`; `dtype` is always float32.

    Input shape:
        (G, S, D).

    Raises:
        ValueError: if an argument is out of range.

    Example:

    >>> from keras_moe.routers import Router, SoftRouter
    >>> issubclass(SoftRouter, Router)
    True
    """

    has_expert_logits = True
    # Whether calls take `previous_logits`.
    gating_residual = False
    # The weight of zero-computation experts in balance and capacity.
    tau = 1.0

    def __init__(
        self,
        num_experts: int,
        noise_std: float = 0.0,
        seed: int | None = None,
        **kwargs,
    ):
        num_experts = check_integer("num_experts", num_experts)
        kwargs["dtype"] = "float32"
        kwargs.setdefault("name", "router")
        super().__init__(**kwargs)
        self.num_experts = num_experts
        self.noise_std = check_not_negative("noise_std", noise_std)
        self.seed = check_seed("seed", seed)
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.supports_masking = True

    def build(self, input_shape):
        if len(input_shape) != 3 or input_shape[-1] is None:
            raise ValueError(
                "Expected tokens of shape (groups, tokens, dim); "
                f"received: shape={tuple(input_shape)}"
            )

    def add_noise(self, logits: Any, stddev: float, training: bool | None) -> Any:
        """The logits with normal noise while training."""
        if not training or stddev == 0:
            return logits
        return logits + keras.random.normal(
            ops.shape(logits), stddev=stddev, dtype="float32", seed=self.seed_generator
        )

    def compute_mask(self, inputs, previous_mask=None):
        # Plans and records are not sequences of tokens to mask.
        return None

    @property
    def kinds(self) -> ExpertKinds:
        """How many of the experts are of each kind."""
        return ExpertKinds(self.num_experts)

    def check_previous_logits(self, previous_logits: Any, tokens: Any) -> None:
        """Raises ValueError if they are missing, not wanted, or do not fit."""
        if previous_logits is not None:
            raise ValueError(
                "Expected no previous_logits for a router without gating_residual, "
                "gating_residual=False; received: previous_logits of shape "
                f"{tuple(previous_logits.shape)}"
            )

    def groups_by_image(self, training: bool | None) -> bool:
        """True if each image must be a group; else `MoE.group_size` cuts the batch."""
        raise NotImplementedError

    def num_slots(self, num_tokens: int) -> int:
        """How many slots the experts fill for `num_tokens` tokens, if none drops."""
        raise NotImplementedError

    def experts_per_token(self, num_tokens: int) -> float:
        """How many experts a token meets, on average, of a group of `num_tokens`."""
        raise NotImplementedError

    def parameters(self, dim: int) -> int:
        """The number of parameters for tokens of size `dim`."""
        raise NotImplementedError

    def flops(self, num_tokens: int, dim: int) -> int:
        """Floating-point operations of the router's matmuls (2 per multiply-add)."""
        raise NotImplementedError

    def routing_spec(self, num_groups, num_tokens, logits=None) -> Routing:
        """The symbolic `Routing`; `logits` if they are more than one per expert."""
        by_expert = (num_groups, num_tokens, self.num_experts)
        logits = logits or by_expert
        shapes = Routing(logits, logits, *[by_expert] * (len(Routing._fields) - 2))
        return Routing(*(keras.KerasTensor(shape, "float32") for shape in shapes))

    def get_config(self):
        config = super().get_config()
        config.update(
            num_experts=self.num_experts, noise_std=self.noise_std, seed=self.seed
        )
        return config
