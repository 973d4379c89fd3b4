"""Auxiliary losses as objects: a function's name, a weight and options.

Axes: G groups, S group_size, E experts.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_moe.checks import check_argument_names, check_not_negative, nearest
from keras_moe.losses.auxiliary_functions import (
    FUNCTIONS,
    AuxiliaryFunction,
    checked_options,
)
from keras_moe.ops.plans import Routing


@keras.saving.register_keras_serializable("keras_moe")
class AuxiliaryLoss:
    """A weighted loss of what a router did, which an MoE layer adds in training.

    | function | what it asks for | reads of the router | options |
    |---|---|---|---|
    | `"importance"` | equal sums of gates | | |
    | `"load"` | equal expected loads | noise, K | |
    | `"load_balance"` | equal loads and gates | K, if all count | `choices` |
    | `"heterogeneous_balance"` | the same of MoE++ | K, expert_types, tau | |
    | `"router_z"` | small logits | | |
    | `"local_entropy"` | tokens sure of their expert | | `modality` |
    | `"global_entropy"` | many experts in use | | `threshold`, `modality` |
    | `"mutual_information"` | experts by modality | | `num_modalities` |
    | `"target_entropy"` | tokens sure of K experts | K | `modality` |
    | `"merged_entropy"` | gates on K experts alone | K | `modality` |

    Each is the function of `keras_moe.losses` of that name, with `_loss` behind it,
    whose docstring has the equation and the paper.

    Args:
        function: name of a loss in the table, or a function `(routing, router, mask,
            modality_ids, **options)` to the loss of each group, float32 (G,). A
            function that is registered with Keras can be saved.
        weight: factor of the loss in the model's total loss. V-MoE has 0.005 for
            importance and load, Switch and MoE++ 0.01 for their balance, ST-MoE 0.001
            for router z, and CLIP-UP 0.01 for balance and 0.0001 for router z.
        **options: options of the function. `choices` is `"first"`, to count each
            token's first choice as GShard, Switch and ST-MoE do whatever K is, or
            `"all"`, to count all K. `modality` is the id of the modality whose tokens
            count, None for all tokens: groups without any do not count. `threshold` is
            the entropy from which on the loss is 0, None for no such entropy;
            LIMoE-H/14 has log(4) for text and log(25) for images. `num_modalities` is
            M.

    Call arguments:
        routing: the `Routing`, by group.
        router: the router layer that made it.
        mask: boolean (G, S), False for tokens that do not count.
        modality_ids: int (G, S), the modality of each token.

    Raises:
        ValueError: if an argument is out of range or the function has no such option;
            from the MoE layer, if its router has not what the loss reads; from the
            call, if a modality's tokens count and there are no `modality_ids`.

    Warns:
        UserWarning: from the MoE layer, if `threshold` is above the logarithm of the
            number of experts that the tokens may go to: the loss cannot reach 0.

    Example:

    >>> from keras_moe import losses
    >>> losses.AuxiliaryLoss("load_balance", 0.01).get_config()
    {'function': 'load_balance', 'weight': 0.01, 'choices': 'first'}
    >>> losses.AuxiliaryLoss("local_entropy", modality=1).options
    {'modality': 1}
    """

    def __init__(
        self, function: str | Callable | dict, weight: float = 1.0, **options: Any
    ):
        if isinstance(function, dict):
            function = keras.saving.deserialize_keras_object(function)
        self.function = function
        self.weight = float(check_not_negative("weight", weight))
        if callable(function):
            self._definition, self.options = AuxiliaryFunction(function), options
        elif function in FUNCTIONS:
            self._definition = FUNCTIONS[function]
            self.options = checked_options(function, options)
        else:
            raise ValueError(
                f"Expected an auxiliary loss among {sorted(FUNCTIONS)}, or a function; "
                f"received: function={function!r}"
            )

    @property
    def name(self) -> str:
        """The name of the loss's function."""
        return getattr(self.function, "__name__", None) or str(self.function)

    def __call__(
        self,
        routing: Routing,
        router: Any,
        mask: Any = None,
        modality_ids: Any = None,
    ) -> Any:
        """The weighted loss of each group, float32 (G,); the MoE layer takes the mean.

        Where groups do not count, such as those without a loss's modality, theirs are
        0, and the others' are multiplied so that the mean is of these alone.
        """
        return self.weight * self._definition.compute(
            routing, router, mask, modality_ids, **self.options
        )

    def check_modalities(self, count: int) -> None:
        """Raises ValueError if the loss is of a modality above `count - 1`."""
        if (self.options.get("modality") or 0) >= count:
            raise ValueError(
                f"Expected losses of the modalities 0 to {count - 1}; received: "
                f"modality={self.options['modality']}, loss={self.name!r}"
            )

    def check_router(self, router: Any) -> None:
        """Raises ValueError if the loss is not defined for this router.

        A loss of weight 0 is never computed, and fits every router.
        """
        if self.weight == 0:
            return
        for check in self._definition.checks:
            check(router, self.name, self.options)

    def get_config(self) -> dict:
        function = self.function
        if callable(function):
            function = keras.saving.serialize_keras_object(function)
        return {"function": function, "weight": self.weight, **self.options}

    @classmethod
    def from_config(cls, config: dict) -> "AuxiliaryLoss":
        return cls(**config)


@keras.saving.register_keras_serializable("keras_moe")
class AggregateLoss:
    """The weighted mean of losses, with one weight for all: LIMoE's recipe.

    The loss is `weight * sum_i w_i L_i / sum_i w_i` for losses L_i of weights w_i;
    with equal weights that is the plain mean of the paper. It is called as an
    `AuxiliaryLoss` is.

    Args:
        losses: argument of `keras_moe.losses.get`: a dict from name to weight, or a
            list of `AuxiliaryLoss`.
        weight: factor of the mean in the model's total loss; LIMoE uses 0.04.

    Raises:
        ValueError: if `weight` is out of range, or no loss has a weight above 0.

    Reference:
        *LIMoE*, appendix B.1, "Final aggregated auxiliary loss".

    Example:

    >>> from keras_moe import losses
    >>> parts = losses.get({"router_z": 1.0, "local_entropy": 1.0})
    >>> losses.AggregateLoss(parts).weight
    0.04
    """

    def __init__(self, losses: Any, weight: float = 0.04):
        self.weight = float(check_not_negative("weight", weight))
        self.losses = get(losses)
        self.total_weight = sum(loss.weight for loss in self.losses)
        if not 0 < self.total_weight < float("inf"):
            raise ValueError(
                "Expected losses of which one has a weight above 0, and a finite sum "
                f"of weights; received: weights={[x.weight for x in self.losses]}"
            )

    def __call__(
        self,
        routing: Routing,
        router: Any,
        mask: Any = None,
        modality_ids: Any = None,
    ) -> Any:
        """The weighted mean for each group, float32 (G,); see `AuxiliaryLoss`."""
        # A loss of weight 0 need not be defined: load without noise is not.
        used = [loss for loss in self.losses if loss.weight > 0]
        total = sum(loss(routing, router, mask, modality_ids) for loss in used)
        return self.weight * (total / self.total_weight)

    def check_modalities(self, count: int) -> None:
        """Raises ValueError if a loss is of a modality above `count - 1`."""
        for loss in self.losses:
            loss.check_modalities(count)

    def check_router(self, router: Any) -> None:
        """Raises ValueError if one of the losses is not defined for this router."""
        if self.weight > 0:
            for loss in self.losses:
                loss.check_router(router)

    def get_config(self) -> dict:
        return {"losses": serialize(self.losses), "weight": self.weight}

    @classmethod
    def from_config(cls, config: dict) -> "AggregateLoss":
        return cls(**config)


# Name -> function that makes an aggregate loss of its options.
AGGREGATES: dict[str, Callable[..., AggregateLoss]] = {}


def register_aggregate(name: str) -> Callable[[Callable], Callable]:
    """Registers a function that makes an `AggregateLoss` under a name, as a decorator.

    The name then stands in dicts of `get`, with the function's arguments.
    """

    def register(make):
        if name in FUNCTIONS or AGGREGATES.get(name, make) is not make:
            raise ValueError(
                f"Expected a new name of auxiliary losses; received: name={name!r}"
            )
        AGGREGATES[name] = make
        return make

    return register


def get(identifier: Any) -> list[AuxiliaryLoss | AggregateLoss]:
    """Makes a list of auxiliary losses from what users write.

    Args:
        identifier: None; a dict from name to weight, or to a dict of `weight` and
            options, with the names of `AuxiliaryLoss` and `"limoe"` for the arguments
            of `limoe_losses`; or a list of `AuxiliaryLoss`, of `AggregateLoss` and of
            their serialised configs.

    Returns:
        A list of `AuxiliaryLoss` and `AggregateLoss`.

    Raises:
        ValueError: if a name or an option is unknown, or an entry is none of these.

    Example:

    >>> from keras_moe import losses
    >>> clip_up = {"load_balance": 0.01, "router_z": 1e-4}
    >>> [loss.name for loss in losses.get(clip_up)]
    ['load_balance', 'router_z']
    >>> losses.get({"load_balance": {"weight": 0.01, "choices": "all"}})[0].options
    {'choices': 'all'}
    >>> losses.get({"limoe": {"thresholds": {"text": 2.2}}})[0].weight
    0.04
    """
    if identifier is None:
        return []
    if isinstance(identifier, dict):
        return [_by_name(name, options) for name, options in identifier.items()]
    if not isinstance(identifier, (list, tuple)):
        raise ValueError(
            "Expected auxiliary_losses to be None, a dict from name to weight or a "
            f"list of AuxiliaryLoss; received: auxiliary_losses={identifier!r}"
        )
    losses = [
        keras.saving.deserialize_keras_object(loss) if isinstance(loss, dict) else loss
        for loss in identifier
    ]
    for loss in losses:
        if not isinstance(loss, (AuxiliaryLoss, AggregateLoss)):
            raise ValueError(f"Expected an AuxiliaryLoss; received: {loss!r}")
    return losses


def _by_name(name, options):
    """The loss of a name, from its weight or a dict of its options."""
    if not isinstance(options, dict):
        options = {"weight": options}
    owner = f"the auxiliary loss {name!r}"
    if name in FUNCTIONS:
        check_argument_names(options, ["weight", *FUNCTIONS[name].options], owner)
        return AuxiliaryLoss(name, **options)
    if name not in AGGREGATES:
        names = sorted({*FUNCTIONS, *AGGREGATES})
        raise ValueError(
            f"Expected names of auxiliary losses among {names}; "
            f"received: {name!r} ({nearest(str(name), names)})"
        )
    make = AGGREGATES[name]
    signature = inspect.signature(make)
    check_argument_names(options, list(signature.parameters), owner)
    missing = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty and parameter.name not in options
    ]
    if missing:
        raise ValueError(
            f"Expected {', '.join(missing)} among the options of {owner}; "
            f"received: {options}"
        )
    return make(**options)


def check_modalities(auxiliary_losses: Any, count: int) -> None:
    """Checks that all losses are of modalities that a model has.

    Args:
        auxiliary_losses: argument of `get`.
        count: M, the number of modalities.

    Raises:
        ValueError: if one is of another modality, or as `get`.

    Example:

    >>> from keras_moe import losses
    >>> losses.check_modalities({"global_entropy": {"modality": 1}}, count=2)
    """
    for loss in get(auxiliary_losses):
        loss.check_modalities(count)


def serialize(losses: list[AuxiliaryLoss | AggregateLoss]) -> list[dict]:
    """The configs from which `get` makes the same losses again.

    Args:
        losses: list of `AuxiliaryLoss` and `AggregateLoss`.

    Returns:
        A list of JSON-serialisable configs.

    Example:

    >>> from keras_moe import losses
    >>> loss = losses.AuxiliaryLoss("router_z", 0.01)
    >>> losses.get(losses.serialize([loss]))[0].weight
    0.01
    """
    return [keras.saving.serialize_keras_object(loss) for loss in losses]
