"""Auxiliary losses as objects: a function's name, a weight and options.

The table has how each function reads a routing record and its router.

Axes: G groups, S group_size, E experts, K selected experts.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_moe import _checks
from keras_moe._types import Tensor
from keras_moe.losses import router_losses
from keras_moe.ops.plans import Routing
from keras_moe.ops.token_choice import selected_experts

CLASSIC = ("importance", "load", "router_z")
LOCAL = ("local_entropy", "target_entropy", "merged_entropy")


class _Function(NamedTuple):
    """A loss `compute(routing, router, mask, modality_ids, **options)`, (G,)."""

    compute: Callable[..., Tensor]
    options: dict[str, object] = {}
    reads: tuple[str, ...] = ()  # of a router: "selected" (K) or "noise"


def _load(routing, router, mask):
    return router_losses.load_loss(
        routing.logits,
        routing.noisy_logits,
        router.noise_deviation,
        router.num_selected_experts,
        mask,
    )


def _load_balance(routing, router, mask, choices):
    counted = router.num_selected_experts if choices == "all" else 1
    return router_losses.load_balance_loss(routing.gates, mask, counted)


def _heterogeneous_balance(routing, router, mask):
    # The router knows which experts are zero-computation experts, and tau.
    selected = selected_experts(routing.affinity, router.num_selected_experts)
    return router_losses.heterogeneous_balance_loss(
        routing.gates, selected, router.expert_types, router.tau, mask
    )


def _global_entropy(routing, router, mask, threshold):
    # `check_router` has warned of the threshold.
    return router_losses.entropy_to_threshold(routing.logits, threshold, mask)


def _mutual_information(routing, router, mask, modality_ids, num_modalities):
    _check_modality_ids(modality_ids)
    losses = router_losses.mutual_information_loss(
        routing.logits, modality_ids, num_modalities, mask
    )
    # Groups with tokens of fewer than two modalities say nothing about these.
    present = [
        ops.any(router_losses.modality_mask(modality_ids, modality, mask), axis=1)
        for modality in range(num_modalities)
    ]
    several = ops.sum(ops.cast(ops.stack(present), "int32"), axis=0) >= 2
    return router_losses.over_counted_groups(losses, several)


def _of_logits(loss):
    return lambda routing, router, mask: loss(routing.logits, mask)


def _of_selected(loss):
    return lambda routing, router, mask: loss(
        routing.logits, router.num_selected_experts, mask
    )


def _function(loss, *reads, **options):
    """A loss over all tokens or one modality's; groups without these do not count."""

    def compute(routing, router, mask, modality_ids, modality=None, **options):
        if modality is not None:
            _check_modality_ids(modality_ids)
            mask = router_losses.modality_mask(modality_ids, modality, mask)
        losses = loss(routing, router, mask, **options)
        if mask is None:
            return losses
        return router_losses.over_counted_groups(losses, ops.any(mask, axis=1))

    return _Function(compute, options, reads)


def _check_modality_ids(modality_ids):
    if modality_ids is None:
        raise _checks.unfit(
            "modality_ids for a loss of modalities", "modality_ids=None"
        )


FUNCTIONS = {
    "importance": _function(_of_logits(router_losses.importance_loss)),
    "load": _function(_load, "selected", "noise"),
    "load_balance": _function(_load_balance, choices="first"),
    "heterogeneous_balance": _function(_heterogeneous_balance, "selected"),
    "router_z": _function(_of_logits(router_losses.router_z_loss)),
    "local_entropy": _function(
        _of_logits(router_losses.local_entropy_loss), modality=None
    ),
    "global_entropy": _function(_global_entropy, threshold=None, modality=None),
    "mutual_information": _Function(_mutual_information, {"num_modalities": 2}),
    "target_entropy": _function(
        _of_selected(router_losses.target_entropy_loss), "selected", modality=None
    ),
    "merged_entropy": _function(
        _of_selected(router_losses.merged_entropy_loss), "selected", modality=None
    ),
}
_CHECKS = {
    "choices": lambda x: _checks.check_one_of("choices", x, ("first", "all")),
    "modality": lambda x: _checks.check_integer("modality", x, 0, optional=True),
    "num_modalities": lambda x: _checks.check_integer("num_modalities", x),
    "threshold": router_losses.check_threshold,
}


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

    The docstring of `keras_moe.losses.<name>_loss` has the equation and the paper.

    Args:
        function: name of a loss in the table, or a function `(routing, router, mask,
            modality_ids, **options)` to float32 (G,), which must be registered with
            Keras to be saved.
        weight: factor of the loss in the model's total loss. V-MoE has 0.005 for
            importance and load, Switch and MoE++ 0.01 for their balance, ST-MoE 0.001
            for router z, and CLIP-UP 0.01 for balance and 0.0001 for router z.
        **options: options of the function. `choices` counts each token's `"first"`
            choice, as in GShard, Switch and ST-MoE, or `"all"` K. `modality` is the id
            of the modality whose tokens count, or None for all tokens. `threshold` is
            the entropy above which the loss is 0, or None; LIMoE-H/14 has log(4) for
            text and log(25) for images. `num_modalities` is M. The MoE layer warns of
            thresholds above log E, whose loss cannot reach 0.

    Call arguments:
        routing: the `Routing`, by group.
        router: the router layer that made it.
        mask: boolean (G, S), False for tokens that do not count.
        modality_ids: int (G, S), the modality of each token.

    Example:

    >>> from keras_moe import losses
    >>> losses.AuxiliaryLoss("load_balance", 0.01).get_config()
    {'function': 'load_balance', 'weight': 0.01, 'choices': 'first'}
    >>> losses.AuxiliaryLoss("local_entropy", modality=1).options
    {'modality': 1}
    """

    def __init__(
        self, function: str | Callable | dict, weight: float = 1.0, **options: object
    ):
        if isinstance(function, dict):
            function = keras.saving.deserialize_keras_object(function)
        self.function: Any = function
        self.weight = float(_checks.check_not_negative("weight", weight))
        self.options: dict[str, Any] = options
        if not callable(function):
            _checks.check_one_of("function", function, sorted(FUNCTIONS))
            defaults = FUNCTIONS[self.function].options
            owner = f"the auxiliary loss {function!r}"
            _checks.check_argument_names(options, list(defaults), owner)
            options = {**defaults, **options}
            self.options = {k: _CHECKS[k](value) for k, value in options.items()}

    @property
    def name(self) -> str:
        """The name of the loss's function."""
        return getattr(self.function, "__name__", None) or str(self.function)

    def __call__(
        self,
        routing: Routing,
        router: keras.layers.Layer,
        mask: Tensor | None = None,
        modality_ids: Tensor | None = None,
    ) -> Tensor:
        """Weighted losses of groups (G,), whose mean is that of counted groups."""
        compute = self.function
        if isinstance(compute, str):
            compute = FUNCTIONS[compute].compute
        options, members = self.options, getattr(router, "ensemble_size", 1)
        if members == 1:
            return self.weight * compute(routing, router, mask, modality_ids, **options)
        # The mean over an ensemble's members, each a router of its own experts.
        losses = [
            compute(*_of_member(routing, router, mask, modality_ids, member), **options)
            for member in range(members)
        ]
        return self.weight * ops.mean(ops.stack(losses), axis=0)

    def check_modalities(self, count: int) -> None:
        """Raises ValueError if the loss is of a modality above `count - 1`."""
        if (self.options.get("modality") or 0) >= count:
            expected = f"losses of the modalities 0 to {count - 1}"
            raise _checks.unfit(
                expected, modality=self.options["modality"], loss=self.name
            )

    def check_router(self, router: keras.layers.Layer) -> None:
        """Raises ValueError if the router lacks what a loss of weight > 0 reads."""
        if self.weight == 0 or callable(self.function):
            return
        if getattr(router, "modality_count", None):
            self.check_modalities(router.modality_count)
        reads = FUNCTIONS[self.function].reads
        counts_all = "selected" in reads or self.options.get("choices") == "all"
        missing = None
        if not getattr(router, "has_expert_logits", True):
            missing = "one logit per expert"
        elif counts_all and getattr(router, "num_selected_experts", None) is None:
            missing = "num_selected_experts"
        elif "noise" in reads and not getattr(router, "noise_std", 0.0) > 0:
            missing = "noise_std > 0, which defines the load"
        if missing:
            raise ValueError(
                f"Expected a router with {missing}; received: "
                f"router={type(router).__name__}, loss={self.name!r}. Leave the loss "
                "out of auxiliary_losses."
            )
        if "threshold" in self.options and hasattr(router, "num_experts"):
            num_experts = router.num_experts // getattr(router, "ensemble_size", 1)
            modality = self.options["modality"]
            pools = getattr(router, "expert_pools", None)
            if pools is not None and modality is not None:
                num_experts = len(pools[modality])
            threshold = self.options["threshold"]
            router_losses.warn_of_unreachable_threshold(threshold, num_experts)

    def get_config(self) -> dict:
        function = self.function
        if callable(function):
            function = keras.saving.serialize_keras_object(function)
        return {"function": function, "weight": self.weight, **self.options}

    @classmethod
    def from_config(cls, config: dict) -> "AuxiliaryLoss":
        return cls(**config)


def _of_member(routing, router, mask, modality_ids, member):
    """What a loss reads, for one member of an ensemble: its tokens and experts."""
    _check_modality_ids(modality_ids)
    own = router_losses.modality_mask(modality_ids, member, mask)
    size = router.num_experts // router.ensemble_size
    columns = slice(member * size, (member + 1) * size)
    # The logits of other tokens are minus infinity here, of which the softmax is NaN.
    kept = ops.expand_dims(own, -1)
    record = Routing(*(ops.where(kept, x[..., columns], 0.0) for x in routing))
    return record, router, own, None


def limoe_losses(
    thresholds: dict[str, float | None],
    local_loss: str = "local_entropy",
    *,
    local_modalities: Iterable[str] = ("text",),
    classic: Iterable[str] = CLASSIC,
    modalities: Iterable[str] = ("image", "text"),
    weight: float = 0.04,
) -> list[AuxiliaryLoss]:
    """The auxiliary losses that LIMoE trains with: their plain mean, times a weight.

    These are the importance, load and z losses over all tokens, a local entropy loss
    for text, and a global entropy loss with a threshold for each modality. The losses
    of a modality are averaged over the groups that have it, and each loss counts once
    in the mean. The load loss needs noise: the router's `noise_std=1.0`.

    In configs and presets the arguments go under the name `"limoe"`:
    `"auxiliary_losses": {"limoe": {"thresholds": {"text": 2.4849, "image": 2.8332}}}`.
    `LIMOE_LOSSES` has them for each published model, and for other routers:
    `"several_experts"` for K > 1, `"by_modality"` for a router per modality, and
    `"expert_pools"` for disjoint experts, which need no entropy losses (appendix E.3).

    Args:
        thresholds: entropy of each modality above which its global loss is 0, such as
            `{"image": math.log(20), "text": math.log(9)}`, or None for no threshold.
            Other modalities have no global loss. For log(0.8) of table 5, which is
            negative, use 0.
        local_loss: `"local_entropy"`, or for K > 1 `"target_entropy"` or
            `"merged_entropy"` (appendix E.1), of which the paper prefers the latter.
        local_modalities: names of the modalities with a local loss.
        classic: names of losses over all tokens; without noise, leave out `"load"`.
        modalities: names of the modalities in the order of their ids.
        weight: factor of the mean.

    Reference: *LIMoE*, appendices B.1 and E.1; its table 5 has the thresholds.

    Example:

    >>> import math
    >>> from keras_moe import losses
    >>> made = losses.limoe_losses({"text": math.log(4), "image": math.log(25)})
    >>> [loss.name for loss in made][3:]
    ['local_entropy', 'global_entropy', 'global_entropy']
    >>> preset = losses.get(losses.LIMOE_LOSSES["limoe_h14"])
    >>> losses.serialize(preset) == losses.serialize(made)
    True
    """
    local_modalities = tuple(local_modalities)
    ids = {name: number for number, name in enumerate(modalities)}
    _checks.check_one_of("local_loss", local_loss, LOCAL)
    for name in (*thresholds, *local_modalities):
        _checks.check_one_of("modality", name, ids)
    _checks.check_not_negative("weight", weight)
    parts: list[tuple[str, dict]] = [(name, {}) for name in classic]
    parts += [(local_loss, {"modality": ids[name]}) for name in local_modalities]
    parts += [
        ("global_entropy", {"threshold": threshold, "modality": ids[name]})
        for name, threshold in thresholds.items()
    ]
    return [AuxiliaryLoss(name, weight / len(parts), **x) for name, x in parts]


def _settings(text, image, **options):
    """`auxiliary_losses` of a config with thresholds of so many experts."""
    thresholds = {"text": math.log(text), "image": math.log(image)}
    return {"limoe": {"thresholds": thresholds, **options}}


# `auxiliary_losses` by preset. Table 5 has the thresholds up to L/16, and those of
# routers that differ; appendix A.3 has H/14's. All take noise_std=1.0, for the load.
LIMOE_LOSSES = {
    "limoe_s32": _settings(text=12, image=17),
    "limoe_s16": _settings(text=9, image=20),
    "limoe_b32": _settings(text=12, image=17),
    "limoe_b16": _settings(text=9, image=20),
    "limoe_l32": _settings(text=20, image=1),
    "limoe_l16": _settings(text=28, image=8),
    "limoe_h14": _settings(text=4, image=25),
    # The merged entropy did best, with priority="sum_gates" (table 6).
    "several_experts": _settings(text=4, image=25, local_loss="merged_entropy"),
    "by_modality": _settings(text=4, image=25),
    "expert_pools": {"limoe": {"thresholds": {}, "local_modalities": []}},
}


def get(identifier: Any) -> list[AuxiliaryLoss]:
    """Makes a list of auxiliary losses from what users write.

    Args:
        identifier: None; a dict from the names of `AuxiliaryLoss` to weights, or to
            dicts of `weight` and options, and from `"limoe"` to arguments of
            `limoe_losses`; or a list of `AuxiliaryLoss` and their serialised configs.

    Example:

    >>> from keras_moe import losses
    >>> clip_up = {"load_balance": 0.01, "router_z": 1e-4}
    >>> [loss.name for loss in losses.get(clip_up)]
    ['load_balance', 'router_z']
    >>> losses.get({"load_balance": {"weight": 0.01, "choices": "all"}})[0].options
    {'choices': 'all'}
    >>> len(losses.get({"limoe": {"thresholds": {"text": 2.2}}}))
    5
    """
    if identifier is None:
        return []
    if isinstance(identifier, dict):
        named = (_by_name(name, options) for name, options in identifier.items())
        return [loss for losses in named for loss in losses]
    losses = [
        keras.saving.deserialize_keras_object(loss) if isinstance(loss, dict) else loss
        for loss in identifier
    ]
    if not all(isinstance(loss, AuxiliaryLoss) for loss in losses):
        raise ValueError(
            "Expected auxiliary_losses to be None, a dict from name to weight or a "
            f"list of AuxiliaryLoss; received: auxiliary_losses={identifier!r}"
        )
    return losses


def _by_name(name, options):
    """The losses of a name, from its weight or a dict of its options."""
    if not isinstance(options, dict):
        options = {"weight": options}
    if name in FUNCTIONS:
        return [AuxiliaryLoss(name, **options)]
    if name != "limoe":
        names = sorted([*FUNCTIONS, "limoe"])
        expected = f"names of auxiliary losses among {names}"
        raise _checks.unfit(expected, f"{name!r} ({_checks.nearest(str(name), names)})")
    arguments = list(inspect.signature(limoe_losses).parameters)
    _checks.check_argument_names(options, arguments, "the auxiliary loss 'limoe'")
    return limoe_losses(**options)


def check_modalities(auxiliary_losses: object, count: int) -> None:
    """Checks that all losses are of modalities below `count`."""
    for loss in get(auxiliary_losses):
        loss.check_modalities(count)


def serialize(losses: list[AuxiliaryLoss]) -> list:
    """The configs from which `get` makes the same losses again.

    Args:
        losses: list of `AuxiliaryLoss`.

    Example:

    >>> from keras_moe import losses
    >>> loss = losses.AuxiliaryLoss("router_z", 0.01)
    >>> losses.get(losses.serialize([loss]))[0].weight
    0.01
    """
    return [keras.saving.serialize_keras_object(loss) for loss in losses]
