"""The feed-forward layer of every block of a backbone: an MLP or an MoE.

Axes: S group_size, E experts, C capacity, K selected experts.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_moe.checks import (
    check_argument_names,
    check_bool,
    check_integer,
    check_one_of,
    check_positive,
)
from keras_moe.layers.block_plan import resolve_moe_layers
from keras_moe.layers.experts import Experts
from keras_moe.layers.mlp import MLP
from keras_moe.layers.moe import MoE
from keras_moe.layers.mumoe import MuMoEBlock
from keras_moe.ops.expert_kinds import expert_kinds
from keras_moe.routers import (
    PathwayAwareRouter,
    SoftmaxAffinity,
    SoftRouter,
    TokenChoiceRouter,
)
from keras_moe.routers.names import class_of_kinds

# In the place of a router's name: a block in which every expert takes part.
MUMOE = "mumoe"
# In the place of a value: the default of the router's class.
AUTO = "auto"
EVALUATIONS = ("batch_invariant", "official")


def feed_forward_layers(
    num_layers: int,
    num_tokens: int,
    mlp_dim: int,
    moe_layers: Any,
    num_experts: Any,
    router: str,
    router_options: dict | None,
    num_selected_experts: int,
    expert_mlp_dim: int | None,
    capacity_factor: Any,
    evaluation: str | None,
    eval_capacity_factor: float | None,
    eval_capacity: int | None,
    dropless: bool,
    capacity_rounding: str,
    capacity_multiple_of: int | None,
    priority: str,
    noise_std: float | None,
    images_per_group: int | None,
    auxiliary_losses: Any,
    expert_dropout: float,
    shared_expert_initialization: Any,
    dispatcher: str,
    zero_experts: int,
    copy_experts: int,
    constant_experts: Any,
    tau: float,
    gating_residual: Any,
    gated_experts: bool,
    expert_use_bias: bool,
    expert_activation: Any,
    activation: Any,
    dropout_rate: float,
    seeds: Callable,
    dtype: Any,
) -> list[keras.layers.Layer]:
    """The feed-forward layers of a backbone's blocks, not built.

    Args:
        num_layers: blocks.
        num_tokens: N, the tokens of an image.
        seeds: a function of the block's index and a small number that gives the seed of
            a site: 2 the feed-forward layer, 3 the router.
        dtype: dtype policy.
        mlp_dim, moe_layers, ..., dropout_rate: see `keras_moe.models.ViTBackbone`.

    Returns:
        An `MLP`, an `MoE` or a `MuMoEBlock` for each block.

    Raises:
        ValueError: if an argument is out of range or arguments do not fit together,
            also those of MoE layers where there are none.
    """
    if images_per_group is not None:
        check_integer("images_per_group", images_per_group)
    if evaluation is not None:
        check_one_of("evaluation", evaluation, EVALUATIONS)
    check_bool("expert_use_bias", expert_use_bias)
    if expert_mlp_dim is not None:
        check_integer("expert_mlp_dim", expert_mlp_dim)
    moe_indices = resolve_moe_layers(moe_layers, num_layers)

    def mlp(index):
        return MLP(
            mlp_dim, activation, dropout_rate, seeds(index, 2), dtype=dtype, name="mlp"
        )

    if router == MUMOE:
        check_no_routing(zero_experts, copy_experts, constant_experts, gating_residual)
        check_no_eval_capacity(router, eval_capacity_factor, eval_capacity)
        block = {
            "mlp_dim": expert_mlp_dim or mlp_dim,
            "num_experts": num_experts,
            "hidden_activation": expert_activation or activation,
            "dtype": dtype,
            "name": "moe",
        }
        mumoe_block(router_options, **block)  # A dense model refuses the same.
        return [
            mumoe_block(router_options, **block) if index in moe_indices else mlp(index)
            for index in range(num_layers)
        ]
    kinds = expert_kinds(num_experts, zero_experts, copy_experts, constant_experts)
    check_positive("tau", tau)
    if gating_residual == AUTO:
        gating_residual = kinds.zero_computation > 0 and len(moe_indices) > 1
    check_bool("gating_residual", gating_residual)
    check_bool("gated_experts", gated_experts)
    if gating_residual and len(moe_indices) == 1:
        raise ValueError(
            "Expected at least two MoE blocks for gating_residual=True, which adds the "
            f"logits of the one before; received: moe_layers={moe_layers}"
        )
    # Of one class in all blocks, also in the first, which has none before it.
    cls, arguments = class_of_kinds(router, kinds, gating_residual)
    if shared_expert_initialization == AUTO:
        # MoE++ draws each expert by itself, V-MoE one for all.
        shared_expert_initialization = cls is not PathwayAwareRouter
    check_bool("shared_expert_initialization", shared_expert_initialization)

    def moe(index):
        router_layer = _router(
            router,
            cls,
            arguments,
            num_tokens,
            kinds,
            tau,
            gating_residual and index != min(moe_indices, default=index),
            num_selected_experts,
            capacity_factor,
            evaluation,
            eval_capacity_factor,
            eval_capacity,
            dropless,
            capacity_rounding,
            capacity_multiple_of,
            priority,
            noise_std,
            seeds(index, 3),
            given=dict(router_options or {}),
        )
        return MoE(
            router_layer,
            Experts(
                num_experts,
                expert_mlp_dim or mlp_dim,
                activation=expert_activation or activation,
                dropout=expert_dropout,
                shared_initialization=shared_expert_initialization,
                gated=gated_experts,
                use_bias=expert_use_bias,
                seed=seeds(index, 2),
                dtype=dtype,
                name="experts",
            ),
            group_size=images_per_group and images_per_group * num_tokens,
            auxiliary_losses=_losses(auxiliary_losses, router_layer),
            dispatcher=dispatcher,
            dtype=dtype,
            name="moe",
        )

    if not moe_indices:
        moe(0)  # A dense model refuses the same arguments.
    return [
        moe(index) if index in moe_indices else mlp(index)
        for index in range(num_layers)
    ]


def mumoe_block(options: dict | None, **arguments: Any) -> MuMoEBlock:
    """A `MuMoEBlock` with `router_options`, such as `{"factorization": "tr"}`."""
    options = dict(options or {})
    names = inspect.signature(MuMoEBlock.__init__).parameters
    given = ("self", "kwargs", "units", *arguments)
    names = [name for name in names if name not in given]
    check_argument_names(options, names, "MuMoEBlock in a backbone")
    return MuMoEBlock(**arguments, **options)


def check_no_routing(zero_experts, copy_experts, constant_experts, gating_residual):
    """Refuses what has no meaning where every expert takes part."""
    for name, value in {
        "zero_experts": zero_experts,
        "copy_experts": copy_experts,
        "constant_experts": constant_experts,
        "gating_residual": gating_residual,
    }.items():
        if value and value != AUTO:
            raise ValueError(
                f"Expected {name}={type(value)()!r} for router='mumoe'; "
                f"received: {name}={value!r}"
            )


def _router(
    name,
    cls,
    arguments,
    num_tokens,
    kinds,
    tau,
    gating_residual,
    num_selected_experts,
    capacity_factor,
    evaluation,
    eval_capacity_factor,
    eval_capacity,
    dropless,
    capacity_rounding,
    capacity_multiple_of,
    priority,
    noise_std,
    seed,
    given,
):
    """The router of that name; `given` arguments of its class go before ours."""
    names = inspect.signature(cls.__init__).parameters
    # An image is one modality, and every block has a seed of its own.
    not_here = ("self", "kwargs", "num_experts", "seed")
    not_here = (*not_here, "num_modalities", "expert_pools", "tau", "gating_residual")
    not_here = (*not_here, "zero_experts", "copy_experts", "constant_experts")
    names = [name for name in names if name not in not_here]
    check_argument_names(given, names, f"{cls.__name__} in a backbone")
    dropless = given.get("dropless", dropless)
    is_token_choice = issubclass(cls, TokenChoiceRouter)
    if not is_token_choice and dropless:
        raise ValueError(
            "Expected a token choice router for dropless=True; "
            f"received: router={name!r}"
        )
    if capacity_factor == AUTO:
        capacity_factor = cls.default_capacity_factor
    ours = {"seed": seed}
    if capacity_rounding != AUTO:
        ours["capacity_rounding"] = capacity_rounding
    capacities = ("capacity", "capacity_factor", "num_slots")
    has_capacity = any(given.get(argument) is not None for argument in capacities)
    if capacity_factor is None and not dropless and not has_capacity:
        raise ValueError(
            "Expected capacity_factor, or a capacity or number of slots in "
            f"router_options, for router={name!r}; received: capacity_factor=None"
        )
    if not has_capacity and given.get("eval_capacity_factor") is None:
        ours["num_selected_experts"] = num_selected_experts
    elif not is_token_choice:
        # A factor among the router's own arguments is all that there is to it, and
        # so the router has no K: the backbone's own factors bring theirs along.
        if not has_capacity and capacity_factor is not None:
            capacity_factor *= num_selected_experts
        if eval_capacity_factor is not None:
            eval_capacity_factor *= num_selected_experts
    if cls is SoftRouter:
        check_no_eval_capacity(name, eval_capacity_factor, eval_capacity)
        return _soft_router(kinds.ffn, num_tokens, capacity_factor, {**ours, **given})
    if given.get("capacity") is not None or dropless:
        capacity_factor = None
    ours.update(
        capacity_factor=capacity_factor,
        capacity_multiple_of=capacity_multiple_of,
        eval_capacity_factor=eval_capacity_factor,
        eval_capacity=eval_capacity,
    )
    if noise_std is not None:
        ours["noise_std"] = noise_std
    if evaluation is not None:
        ours["batch_invariant"] = evaluation == "batch_invariant"
        if given.get("batch_invariant") not in (None, ours["batch_invariant"]):
            raise ValueError(
                "Expected evaluation, or batch_invariant in router_options, not both; "
                f"received: evaluation={evaluation!r}, "
                f"batch_invariant={given['batch_invariant']}"
            )
    if cls is PathwayAwareRouter:
        ours.update(tau=tau, gating_residual=gating_residual)
    if is_token_choice:
        ours.update(
            num_selected_experts=num_selected_experts,
            dropless=dropless,
            priority=priority,
        )
    ours = {**arguments, **ours, **given}
    of_evaluation = (ours["eval_capacity_factor"], ours["eval_capacity"])
    if evaluation == "official" and of_evaluation == (None, None):
        # That of training.
        ours["eval_capacity_factor"] = ours["capacity_factor"]
        ours["eval_capacity"] = ours.get("capacity")
    return cls(kinds.total, **ours)


def check_no_eval_capacity(router, eval_capacity_factor, eval_capacity):
    """Refuses a capacity of inference for a router that drops nothing."""
    for name, value in (
        ("eval_capacity_factor", eval_capacity_factor),
        ("eval_capacity", eval_capacity),
    ):
        if value is not None:
            raise ValueError(
                f"Expected {name}=None for router={router!r}, which drops nothing; "
                f"received: {name}={value}"
            )


def _soft_router(num_experts, num_tokens, capacity_factor, arguments):
    if arguments.get("num_slots") is None:
        # A number of slots gives the weights a shape before they are built. The seed
        # keeps this router from drawing one.
        factor = arguments.pop("capacity_factor", None) or capacity_factor
        sizes = {**arguments, "capacity_factor": factor, "seed": 0}
        slots = SoftRouter(num_experts, **sizes).group_capacity(num_tokens)
        arguments["num_slots"] = slots
    return SoftRouter(num_experts, **arguments)


def _losses(auxiliary_losses, router):
    """The auxiliary losses; `"auto"` is V-MoE's or MoE++'s for the routers of these."""
    if not isinstance(auxiliary_losses, str):
        return auxiliary_losses
    check_one_of("auxiliary_losses", auxiliary_losses, ("auto",))
    if isinstance(router, PathwayAwareRouter):
        return {"heterogeneous_balance": 0.01}
    is_vmoe = isinstance(router, TokenChoiceRouter) and isinstance(
        router.affinity, SoftmaxAffinity
    )
    if not is_vmoe:
        return None
    # The noise defines the load loss.
    return {"importance": 0.005, **({"load": 0.005} if router.noise_std > 0 else {})}


def plain_options(options: dict | None) -> dict | None:
    """Options of which each value is plain data, as a config needs them."""
    if options is None:
        return None
    if not isinstance(options, dict):
        raise ValueError(
            "Expected router_options to be None or a dict of arguments; "
            f"received: router_options={options!r}"
        )
    return {
        name: value
        if value is None
        or isinstance(value, (bool, int, float, str, list, tuple, dict))
        else keras.saving.serialize_keras_object(value)
        for name, value in options.items()
    }
