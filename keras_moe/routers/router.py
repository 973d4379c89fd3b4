"""The base class of routers: tokens in, plan and record out, all in float32.

Axes: G groups, S group_size, E experts, C capacity, D hidden.
"""

import functools
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import keras
from keras import ops

from keras_moe import _checks
from keras_moe._freezing import KeepsFrozen
from keras_moe._types import Initializer, Tensor
from keras_moe.ops._initializers import PathInitializer
from keras_moe.ops.cost import Cost
from keras_moe.ops.expert_types import ExpertTypes
from keras_moe.ops.plans import Routing


class Router(KeepsFrozen, keras.layers.Layer):
    """Base class of routers: tokens in, `(plan, Routing)` out.

    Routers compute in float32 under every dtype policy. Subclasses implement `call`,
    `groups_per_example`, `total_slots`, `experts_per_token` and `weight_shapes`, and
    set `has_expert_logits` to whether there is one logit per expert, which auxiliary
    losses need.

    Args:
        num_experts: number E of experts.
        noise_std: standard deviation of the training noise; see the subclass.
        seed: seed of the noise; None draws one from Keras's global seed.
        **kwargs: arguments of `keras.layers.Layer`; `dtype` is always float32.

    Call arguments:
        tokens: (G, S, D).
        mask: boolean (G, S), False for tokens that are not routed.
        modality_ids: integers (G, S); tokens with ids outside [0, M) are not routed.
        training: whether noise and capacity limits apply.

    Example:

    >>> from keras_moe import routers
    >>> @routers.register_router("half_as_sharp")
    ... class HalfAsSharp(routers.TokenChoiceRouter):
    ...     def scale_logits(self, logits):
    ...         return logits / 2
    >>> routers.get("half_as_sharp", num_experts=4, priority="max_gate").priority
    'max_gate'
    >>> del routers.ROUTERS["half_as_sharp"]
    """

    has_expert_logits = True
    # The capacity factor c if none is given.
    default_capacity_factor = 1.0
    # Whether experts start from the same values by default.
    shares_expert_initialization = True
    # Whether calls require `previous_logits`.
    gating_residual = False
    # Weight of zero-computation experts in balance and capacity.
    tau = 1.0
    # Number of modalities that the router distinguishes by `modality_ids`.
    modality_count = None
    # M, the members of an ensemble, which `modality_ids` then distinguish.
    ensemble_size = 1
    # Arguments of base classes that a subclass refuses.
    refused_arguments = ()

    def __init__(
        self,
        num_experts: int,
        noise_std: float = 0.0,
        seed: int | None = None,
        **kwargs,
    ):
        _checks.check_concrete(type(self), Router, "TokenChoiceRouter")
        num_experts = _checks.check_integer("num_experts", num_experts)
        kwargs["dtype"] = "float32"
        kwargs.setdefault("name", "router")
        super().__init__(**kwargs)
        self.num_experts = num_experts
        self.noise_std = _checks.check_not_negative("noise_std", noise_std)
        self.seed = _checks.check_seed("seed", seed)
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.supports_masking = True
        self.input_spec = keras.InputSpec(ndim=3)

    def default_auxiliary_losses(self) -> dict | None:
        """Names and weights of the auxiliary losses used in the router's paper."""
        return None

    def add_kernel(
        self, name: str, shape: tuple, initializer: Initializer
    ) -> keras.Variable:
        """Adds a weight that stays float32 under every dtype policy."""
        return self.add_weight(
            name=name,
            shape=shape,
            initializer=PathInitializer(initializer, f"{self.path}/{name}"),
            dtype="float32",
            autocast=False,
        )

    def add_noise(self, logits: Tensor, stddev: float, training: bool | None) -> Tensor:
        """Adds normal noise to the logits, in training only."""
        if not training or stddev == 0:
            return logits
        return logits + keras.random.normal(
            ops.shape(logits), stddev=stddev, dtype="float32", seed=self.seed_generator
        )

    def compute_mask(self, inputs, previous_mask=None):
        # Plans and records have no token axis to mask.
        return None

    @property
    def noise_deviation(self) -> float:
        """Standard deviation of the noise on the logits."""
        return self.noise_std / self.num_experts

    @property
    def choices_per_token(self) -> int | None:
        """Experts that a token of a model's routing record chooses; None if none."""
        return getattr(self, "num_selected_experts", None)

    @property
    def expert_types(self) -> ExpertTypes:
        """Number of experts of each type in the routing record."""
        return ExpertTypes(self.num_experts)

    @property
    def expert_columns(self) -> tuple[int, ...]:
        """Columns of the layer's FFN experts in the routing record."""
        return tuple(range(self.expert_types.ffn))

    def check_previous_logits(
        self, previous_logits: Tensor | None, tokens: Tensor
    ) -> None:
        """Validates the previous MoE layer's logits: (G, S, E) or None."""
        expected = shape = None
        if self.gating_residual:
            expected = (*tokens.shape[:2], self.num_experts)
        if previous_logits is not None:
            shape = tuple(previous_logits.shape)
        if shape == expected or (
            shape and expected and _checks.fits_shape(shape, expected)
        ):
            return
        raise ValueError(
            "Expected previous_logits of the MoE layer before, of shape "
            f"{expected} for gating_residual={self.gating_residual}; "
            f"received: previous_logits.shape={shape}"
        )

    def groups_per_example(self, training: bool | None) -> bool:
        """Whether each example is a group (else `MoE.group_size` applies)."""
        raise NotImplementedError

    def total_slots(self, num_tokens: int) -> int:
        """Slots that all experts fill for a group if no token is dropped."""
        raise NotImplementedError

    def experts_per_token(self, num_tokens: int) -> float:
        """Average number of experts per token, in groups of `num_tokens`."""
        raise NotImplementedError

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        raise NotImplementedError

    def cost(self, shape: tuple) -> Cost:
        weights = Cost.all_active(self.weight_shapes(shape))
        # One multiply-add per weight and token.
        return weights._replace(flops=2 * shape[0] * weights.parameters)

    def routing_spec(self, num_groups: int | None, num_tokens: int | None) -> Routing:
        """The symbolic `Routing`."""
        shape = (num_groups, num_tokens, self.num_experts)
        return Routing(*(keras.KerasTensor(shape, "float32") for _ in Routing._fields))

    def get_config(self):
        # Initializers and affinities are stored as configs.
        values = {
            name: keras.saving.serialize_keras_object(value)
            if callable(value)
            else value
            for name, value in _checks.argument_values(self, keras.layers.Layer).items()
        }
        return {**super().get_config(), **values}


@functools.lru_cache(maxsize=256)
def router_arguments(cls: type[Router]) -> Mapping[str, Any]:
    """Constructor arguments of a router class and its bases; None if required."""
    arguments = {}
    for base in cls.__mro__:
        if base is keras.layers.Layer:
            break
        constructor = vars(base).get("__init__")
        if constructor is None:
            continue
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        kinds = {parameter.kind for parameter in parameters}
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                is_required = parameter.default is parameter.empty
                default = None if is_required else parameter.default
                arguments.setdefault(parameter.name, default)
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    known = {k: v for k, v in arguments.items() if k not in cls.refused_arguments}
    return MappingProxyType(known)
