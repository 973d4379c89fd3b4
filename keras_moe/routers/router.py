"""The base class of routers: tokens in, a plan and a record out, all in float32.

Axes: G groups, S group_size, E experts, C capacity, D hidden.
"""

import inspect
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_moe.checks import (
    check_argument_names,
    check_integer,
    check_not_negative,
    check_seed,
)
from keras_moe.ops.cost import Cost
from keras_moe.ops.expert_types import ExpertTypes
from keras_moe.ops.plans import Routing

# An encoder decides these about its routers, and `router_options` do not.
_ENCODER_ARGUMENTS = (
    "num_experts",
    "seed",
    "num_modalities",
    "expert_pools",
    "tau",
    "gating_residual",
    "zero_experts",
    "copy_experts",
    "constant_experts",
)


class RouterSite(NamedTuple):
    """The place of a router in an encoder.

    Attributes:
        num_tokens: N, the tokens of an example.
        seed: seed of the block's routing noise, or None.
        gating_residual: whether the router gets the logits of an MoE block before it.
    """

    num_tokens: int
    seed: int | None = None
    gating_residual: bool = False


class Router(keras.layers.Layer):
    """Base class of routers: tokens in, `(plan, Routing)` out.

    The arithmetic is float32 under every dtype policy: the layer's own policy is
    float32, and half-precision tokens are cast at its door.

    Subclasses say how they group tokens (`groups_per_example`), how many slots they
    fill (`total_slots`), the shapes of their weights (`weight_shapes`), and whether
    their logits are one per expert (`has_expert_logits`), which auxiliary losses need.
    `from_moe_config` makes the router of an encoder's config; subclasses inherit or
    override it.

    Args:
        num_experts: E.
        noise_std: standard deviation of the training noise; see the subclass.
        seed: seed of the noise; None draws one from Keras's global seed.
        **kwargs: arguments of `keras.layers.Layer`; `dtype` is always float32.

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
    # c where a `MoEConfig` leaves it to the router.
    default_capacity_factor = 1.0
    # Whether a layer's experts start from one draw where a `MoEConfig` leaves it open.
    shares_expert_initialization = True
    # Whether calls take `previous_logits`.
    gating_residual = False
    # The weight of zero-computation experts in balance and capacity.
    tau = 1.0
    # The number of modalities that a router tells apart by `modality_ids`.
    modality_count = None

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

    @classmethod
    def from_moe_config(cls, config: Any, site: RouterSite, **arguments: Any):
        """The router of one block of an encoder.

        Args:
            config: `keras_moe.layers.MoEConfig` of the encoder.
            site: place of the block.
            **arguments: arguments that the router's name stands for; those among the
                config's `router_options` override them.

        Raises:
            ValueError: if a field of the config does not fit the class.
        """
        options = cls.checked_options(config)
        cls.check_not_dropless(config)
        cls.check_no_modalities(config)
        fields = {"seed": site.seed}
        if config.noise_std is not None:
            fields["noise_std"] = config.noise_std
        arguments = {**fields, **arguments, **options}
        return cls(config.num_experts, **arguments)

    @classmethod
    def checked_options(cls, config: Any) -> dict:
        """The config's `router_options`, if they are arguments of the class.

        Raises:
            ValueError: if one is not, or is a field of the config; the nearest names
                are listed.
        """
        names = inspect.signature(cls.__init__).parameters
        names = [n for n in names if n not in ("self", "kwargs", *_ENCODER_ARGUMENTS)]
        options = dict(config.router_options or {})
        check_argument_names(options, names, f"{cls.__name__} in an encoder")
        return options

    @classmethod
    def check_no_eval_capacity(cls, config: Any) -> None:
        """Refuses a capacity of inference for routers that drop nothing."""
        for name in ("eval_capacity_factor", "eval_capacity"):
            if getattr(config, name) is not None:
                raise ValueError(
                    f"Expected {name}=None for router={config.router!r}, which drops "
                    f"nothing; received: {name}={getattr(config, name)}"
                )

    @classmethod
    def check_not_dropless(cls, config: Any) -> None:
        """Refuses `dropless=True` for routers in which tokens do not choose."""
        if config.dropless:
            raise ValueError(
                "Expected a token choice router for dropless=True; "
                f"received: router={config.router!r}"
            )

    @classmethod
    def check_no_modalities(cls, config: Any) -> None:
        """Refuses kernels and pools by modality for routers without them."""
        for name in ("num_modalities", "expert_pools"):
            if getattr(config, name) is not None:
                raise ValueError(
                    f"Expected {name}=None for router={config.router!r}; "
                    f"received: {name}={getattr(config, name)}"
                )

    def default_auxiliary_losses(self) -> dict | None:
        """Names and weights of the auxiliary losses that the router's paper adds."""
        return None

    def at_site(self, site: RouterSite) -> "Router":
        """A new router like this one for one block of an encoder.

        Args:
            site: place of the block.
        """
        config = {**self.get_config(), "seed": site.seed}
        if self.gating_residual and not site.gating_residual:
            config["gating_residual"] = False
        return type(self).from_config(config)

    def build(self, input_shape):
        if len(input_shape) != 3 or input_shape[-1] is None:
            raise ValueError(
                "Expected tokens of shape (groups, tokens, dim); "
                f"received: shape={tuple(input_shape)}"
            )

    def add_noise(self, logits: Any, stddev: float, training: bool | None) -> Any:
        """The logits with normal noise while training.

        Args:
            logits: float32 tensor.
            stddev: standard deviation of the noise.
            training: whether there is noise.
        """
        if not training or stddev == 0:
            return logits
        return logits + keras.random.normal(
            ops.shape(logits), stddev=stddev, dtype="float32", seed=self.seed_generator
        )

    def compute_mask(self, inputs, previous_mask=None):
        # Plans and records have no tokens to mask.
        return None

    @property
    def expert_types(self) -> ExpertTypes:
        """The number of experts of each type."""
        return ExpertTypes(self.num_experts)

    @property
    def expert_columns(self) -> tuple[int, ...]:
        """The columns of the routing record that the layer's FFN experts have."""
        return tuple(range(self.expert_types.ffn))

    def check_previous_logits(self, previous_logits: Any, tokens: Any) -> None:
        """Checks whether there must be logits of the MoE layer before, and their shape.

        Args:
            previous_logits: (G, S, E), or None.
            tokens: (G, S, D).

        Raises:
            ValueError: if they are missing, not wanted, or do not fit.
        """
        if previous_logits is not None:
            raise ValueError(
                "Expected no previous_logits for a router without gating_residual, "
                "gating_residual=False; received: previous_logits of shape "
                f"{tuple(previous_logits.shape)}"
            )

    def groups_per_example(self, training: bool | None) -> bool:
        """Whether each image must be a group; else `MoE.group_size` cuts the batch.

        Args:
            training: whether the router trains.
        """
        raise NotImplementedError

    def total_slots(self, num_tokens: int) -> int:
        """The slots that all experts fill for a group, if no token is dropped.

        Args:
            num_tokens: tokens of the group.
        """
        raise NotImplementedError

    def experts_per_token(self, num_tokens: int) -> float:
        """The number of experts that a token meets, on average.

        Args:
            num_tokens: tokens of the group.
        """
        raise NotImplementedError

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by name.

        Args:
            shape: (num_tokens, dim).
        """
        raise NotImplementedError

    def cost(self, shape: tuple[int, int]) -> Cost:
        """The cost for tokens of one image: one multiply-add per weight and token.

        Args:
            shape: (num_tokens, dim).
        """
        weights = Cost.all_active(self.weight_shapes(shape))
        return weights._replace(flops=2 * shape[0] * weights.parameters)

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
