"""Statistics of routing records, and the loads of types of experts.

Axes: B batch, N tokens, S group_size, E experts, K selected experts.
"""

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console

from keras_moe._checks import check_one_of, unfit
from keras_moe._tables import numbers_table
from keras_moe._types import Tensor
from keras_moe.ops import Routing, RoutingPlan, expert_choice, token_choice
from keras_moe.ops.expert_types import EXPERT_TYPES, ExpertTypes

# Limits beyond which a router is unhealthy. An expert is dead if it has less than
# this part of an equal share.
DEAD = 0.01
# A layer has collapsed if the normalised entropy of its loads is below this,
MIN_ENTROPY = 0.5
# if one of more than two experts has a larger share than this,
MAX_SHARE = 0.75
# or if more than this part of its experts is dead.
MAX_DEAD = 0.5


def entropy(shares: ArrayLike) -> np.ndarray:
    """Entropy of shares in nats, along the last axis."""
    shares = np.asarray(shares, "float64")
    # `0.0 -` avoids a result of -0.0.
    return 0.0 - (shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=-1)


def of_patches(values: ArrayLike | Tensor, grid: tuple[int, int]) -> np.ndarray:
    """Values of the patches (B, N, ...), without what is in front, as a class token."""
    values, count = np.asarray(values), grid[0] * grid[1]
    if values.ndim < 2 or values.shape[1] < count:
        expected = f"arrays (batch, at least {count} tokens, ...) for grid={grid}"
        raise unfit(expected, shape=values.shape)
    return values[:, -count:]


class RoutingStatistics(NamedTuple):
    """Routing statistics of one MoE layer.

    Attributes:
        expert_shares: (E,), fraction of all served assignments by expert; sums to 1.
        dropped_tokens: fraction of tokens that no expert served.
        dropped_choices: fraction of the K choices dropped; None unless tokens choose.
        load_entropy: entropy of `expert_shares` over log E; 1 is a balanced load.
        mean_max_gate: mean over tokens of the largest gate.
        affinity_imbalance: largest relative deviation of an expert's total affinity
            from the mean; 0 for a transport plan with exact marginals.
    """

    expert_shares: np.ndarray
    dropped_tokens: float
    dropped_choices: float | None
    load_entropy: float
    mean_max_gate: float
    affinity_imbalance: float

    def to_dict(self) -> dict:
        """Returns a JSON-serialisable dict."""
        return {**self._asdict(), "expert_shares": self.expert_shares.tolist()}


def routing_statistics(
    routing: Routing,
    num_selected_experts: int | None = None,
    mask: ArrayLike | None = None,
) -> RoutingStatistics:
    """Measures a router's load, drops and confidence.

    Args:
        routing: `Routing` of arrays (B, N, E), one of those that
            `keras.Model(backbone.input, backbone.routing).predict(images)` returns.
        num_selected_experts: K; None for expert choice and soft routing.
        mask: boolean (B, N), False for tokens to ignore.

    Example:

    >>> from keras_moe.analysis import routing_statistics
    >>> from keras_moe.ops import Routing
    >>> served = np.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]])
    >>> statistics = routing_statistics(Routing(*[served] * 6), 1)
    >>> statistics.expert_shares.tolist(), round(statistics.dropped_tokens, 3)
    ([1.0, 0.0], 0.333)
    """
    dispatched, gates, affinity = (
        np.asarray(x, "float64")
        for x in (routing.dispatched, routing.gates, routing.affinity)
    )
    counts = np.ones(dispatched.shape[:2], bool) if mask is None else np.asarray(mask)
    if dispatched.ndim != 3 or not counts.any():
        expected = "routing arrays (batch, tokens, experts), and a token that counts"
        raise unfit(expected, f"{counts.sum()} tokens", shape=dispatched.shape)
    dispatched, gates, affinity = (x[counts] for x in (dispatched, gates, affinity))
    num_experts = dispatched.shape[-1]
    loads = dispatched.sum(axis=0)
    shares = loads / max(loads.sum(), 1.0)
    dropped_choices = None
    if num_selected_experts is not None:
        choices = len(dispatched) * num_selected_experts
        dropped_choices = float(1.0 - loads.sum() / choices)
    masses = affinity.sum(axis=0)
    mean = masses.mean()
    return RoutingStatistics(
        shares,
        float((dispatched.sum(axis=-1) == 0).mean()),
        dropped_choices,
        float(entropy(shares) / np.log(num_experts)) if num_experts > 1 else 1.0,
        float(gates.max(axis=-1).mean()),
        float(np.abs(masses / mean - 1.0).max()) if mean > 0 else 0.0,
    )


def print_statistics(
    statistics: dict[str, RoutingStatistics], console: Console | None = None
) -> None:
    """Prints a table with one row per MoE block.

    Args:
        statistics: dict from block name to `RoutingStatistics`.
        console: rich console; None for the terminal.

    Example:

    >>> from keras_moe.analysis import print_statistics
    >>> from rich.console import Console
    >>> print_statistics({}, Console(quiet=True))
    """
    head = ["block", "% of tokens per expert", "no expert", "dropped"]
    rows = [
        [
            name,
            " ".join(f"{100 * share:.0f}" for share in row.expert_shares),
            f"{row.dropped_tokens:.1%}",
            "-" if row.dropped_choices is None else f"{row.dropped_choices:.1%}",
            f"{row.load_entropy:.3f}",
            f"{row.mean_max_gate:.3f}",
        ]
        for name, row in statistics.items()
    ]
    head += ["entropy", "max gate"]
    (console or Console()).print(numbers_table("Routing", head, rows, texts=(0, 1)))


def expert_queues(
    affinity: ArrayLike | Tensor,
    num_selected_experts: int | None = None,
    priority: str | ArrayLike = "first_come",
    examples_per_group: int = 1,
    mask: ArrayLike | None = None,
) -> np.ndarray:
    """Finds each token's position in the queue of each expert.

    An expert with capacity C serves positions 0 to C - 1, so one call gives the drops
    at every capacity, as in *CLIP-UP*, Figure 7.

    Args:
        affinity: (B, N, E), `Routing.affinity` of a record.
        num_selected_experts: K for token choice; None for expert choice.
        priority: order of token choice, as in `keras_moe.ops.token_choice`, or numbers
            (B, N), smallest first.
        examples_per_group: number of consecutive examples that compete; divides B.
        mask: boolean (B, N), False for tokens that are not routed.

    Returns: int32 (B, N, E): 0 for the first in a queue, -1 for tokens not in it.

    Reference: *Routers in Vision Mixture of Experts*, Algorithms 1 and 2; *LIMoE*,
    appendix F.5.

    Example:

    >>> from keras_moe.analysis import expert_queues
    >>> affinity = np.array([[[0.6, 0.4], [0.9, 0.1], [0.2, 0.8]]], "float32")
    >>> expert_queues(affinity, 1, priority="max_gate").tolist()
    [[[1, -1], [0, -1], [-1, 0]]]
    """
    affinity = np.asarray(affinity, "float32")
    _, length, num_experts = affinity.shape
    size = examples_per_group * length
    grouped = affinity.reshape(-1, size, num_experts)
    mask = None if mask is None else np.asarray(mask, bool).reshape(-1, size)
    # With capacity S every token gets a slot: its position in the queue.
    if num_selected_experts is None:
        slots = np.array(expert_choice(grouped, grouped, size, mask).token_slots)
        positions = np.where(slots < 0, -1, slots % size)
    else:
        if not isinstance(priority, str):
            priority = np.asarray(priority, "float32").reshape(-1, size)
        own = (grouped, grouped, num_selected_experts, size, priority, mask)
        slots = np.array(cast(RoutingPlan, token_choice(*own)).token_slots)
        positions = np.full((*grouped.shape[:2], num_experts + 1), -1, "int32")
        # Choices of masked tokens go to an extra column, which is dropped.
        experts = np.where(slots < 0, num_experts, slots // size)
        np.put_along_axis(positions, experts, np.where(slots < 0, -1, slots % size), -1)
        positions = positions[..., :-1]
    return positions.reshape(affinity.shape).astype("int32")


def served_at(positions: np.ndarray, capacity: ArrayLike) -> np.ndarray:
    """Which positions of `expert_queues` are served at a capacity."""
    return (positions >= 0) & (positions < np.asarray(capacity))


def expert_load(routing: Routing, threshold: float = 0.5) -> np.ndarray:
    """Counts the tokens for which each expert has a large coefficient, int (E,).

    Args:
        routing: muMoE `Routing` of arrays (B, N, E); the gates are the coefficients.
        threshold: smallest coefficient that counts, in (0, 1].

    Reference: *Multilinear Mixture of Experts*, Figure 22.

    Example:

    >>> from keras_moe.analysis import expert_load
    >>> from keras_moe.ops import Routing
    >>> gates = np.array([[[0.9, 0.1, 0.0]], [[0.5, 0.5, 0.0]]])
    >>> expert_load(Routing(*[gates] * 6)).tolist()
    [2, 1, 0]
    """
    gates = np.asarray(routing.gates)
    return (gates >= threshold).sum(axis=(0, 1))


# Types of experts, of MoE++


class TypeLoads(NamedTuple):
    """Loads of the expert types in one MoE layer.

    Attributes:
        shares: fraction of all served assignments by type; sums to 1.
        experts_per_token: mean number of experts that serve a token, by type.
        dropped_choices: fraction of the tokens' K choices that were dropped.
    """

    shares: dict[str, float]
    experts_per_token: dict[str, float]
    dropped_choices: float


class RoutingScores(NamedTuple):
    """The largest and second largest gates, `highest` and `second`, of each token."""

    highest: np.ndarray
    second: np.ndarray

    def to_dict(self) -> dict:
        """Returns means and variances as a JSON-serialisable dict."""
        return {
            f"{name}_{what}": float(getattr(values, method)())
            for name, values in self._asdict().items()
            for what, method in (("mean", "mean"), ("variance", "var"))
        }


def experts_per_token(
    routing: Routing | dict[str, Routing],
    expert_types: ExpertTypes,
    expert_type: str = "ffn",
) -> np.ndarray:
    """Counts the experts of a type that serve each token, float64 (B, N) from 0 to K.

    Args:
        routing: `Routing` of arrays (B, N, E), or a dict of these to average over.
        expert_types: number of experts of each type, `backbone.expert_types`.
        expert_type: `"ffn"`, `"zero"`, `"copy"` or `"constant"`.

    Reference: *MoE++*, Figures 5 and A.

    Example:

    >>> from keras_moe.analysis import experts_per_token
    >>> from keras_moe.ops import ExpertTypes, Routing
    >>> served = np.array([[[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]])
    >>> experts_per_token(Routing(*[served] * 6), ExpertTypes(ffn=2, zero=1)).tolist()
    [[2.0, 1.0]]
    """
    check_one_of("expert_type", expert_type, EXPERT_TYPES)
    layers = _layers(routing, expert_types)
    part = expert_types.slices()[expert_type]
    return np.mean(
        [served[..., part].sum(axis=-1) for served in layers.values()], axis=0
    )


def compute_map(
    routing: Routing | dict[str, Routing],
    expert_types: ExpertTypes,
    grid: tuple[int, int],
    expert_type: str = "ffn",
) -> np.ndarray:
    """Arranges `experts_per_token` as a map of each image, float64 (B, rows, columns).

    Args:
        routing: `Routing` (B, N, E) of N patches, plus one for a class token in front.
        expert_types: number of experts of each type, `backbone.expert_types`.
        grid: number of patches down and across.
        expert_type: type of experts to count.

    Example:

    >>> from keras_moe.analysis import compute_map
    >>> from keras_moe.ops import ExpertTypes, Routing
    >>> routing = Routing(*[np.ones((1, 5, 3))] * 6)
    >>> compute_map(routing, ExpertTypes(ffn=2, zero=1), grid=(2, 2)).tolist()
    [[[2.0, 2.0], [2.0, 2.0]]]
    """
    counts = experts_per_token(routing, expert_types, expert_type)
    return of_patches(counts, grid).reshape(-1, *grid)


def load_by_type(
    routing: dict[str, Routing],
    expert_types: ExpertTypes,
    num_selected_experts: int,
    mask: ArrayLike | None = None,
) -> dict[str, TypeLoads]:
    """Measures the load of each expert type, as `TypeLoads` by block name.

    Args:
        routing: dict from block name to `Routing` of arrays (B, N, E).
        expert_types: number of experts of each type, `backbone.expert_types`.
        num_selected_experts: number K of experts of a token.
        mask: boolean (B, N), False for tokens to ignore.

    Reference: *MoE++*, Figure 4.

    Example:

    >>> from keras_moe.analysis import load_by_type
    >>> from keras_moe.ops import ExpertTypes, Routing
    >>> served = np.array([[[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]])
    >>> routing = {"block_0": Routing(*[served] * 6)}
    >>> loads = load_by_type(routing, ExpertTypes(ffn=2, zero=1), 2)
    >>> loads["block_0"].shares["zero"], loads["block_0"].experts_per_token["ffn"]
    (0.25, 1.5)
    """
    loads = {}
    for name, served in _layers(routing, expert_types).items():
        tokens = served.reshape(-1, expert_types.total)
        if mask is not None:
            tokens = tokens[np.asarray(mask, bool).ravel()]
        if not len(tokens):
            raise ValueError(f"Expected tokens that count; received: none in {name}")
        loads[name] = type_loads(
            tokens.sum(axis=0), len(tokens), expert_types, num_selected_experts
        )
    return loads


def type_loads(
    served: np.ndarray,
    num_tokens: int,
    expert_types: ExpertTypes,
    num_selected_experts: int,
) -> TypeLoads:
    """`TypeLoads` of one MoE layer from counts of served tokens (E,)."""
    by_type = {
        expert_type: float(served[part].sum() / num_tokens)
        for expert_type, part in expert_types.slices().items()
    }
    total = sum(by_type.values())
    return TypeLoads(
        {expert_type: value / (total or 1.0) for expert_type, value in by_type.items()},
        by_type,
        1.0 - total / num_selected_experts,
    )


def print_load_by_type(
    loads: dict[str, TypeLoads], console: Console | None = None
) -> None:
    """Prints a table with one row per MoE block.

    Args:
        loads: result of `load_by_type`.
        console: rich console; None for the terminal.

    Example:

    >>> from keras_moe.analysis import print_load_by_type
    >>> from rich.console import Console
    >>> print_load_by_type({}, Console(quiet=True))
    """
    head = ("block", *(f"{x} %" for x in EXPERT_TYPES), "FFN per token", "dropped")
    rows = [
        [
            name,
            *(f"{100 * row.shares[expert_type]:.1f}" for expert_type in EXPERT_TYPES),
            f"{row.experts_per_token['ffn']:.3f}",
            f"{row.dropped_choices:.1%}",
        ]
        for name, row in loads.items()
    ]
    table = numbers_table("Load by type of expert", head, rows)
    (console or Console()).print(table)


def routing_scores(routing: Routing) -> RoutingScores:
    """Finds each token's two largest gates, whose variance gating residuals reduce.

    Args:
        routing: `Routing` of arrays (B, N, E), with at least two experts.

    Reference: *MoE++*, Figure 6.

    Example:

    >>> from keras_moe.analysis import routing_scores
    >>> from keras_moe.ops import Routing
    >>> gates = np.array([[[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]]])
    >>> routing_scores(Routing(*[gates] * 6)).second.tolist()
    [0.3, 0.1]
    """
    gates = np.asarray(routing.gates, "float64")
    highest = np.sort(gates.reshape(-1, gates.shape[-1]), axis=-1)[:, :-3:-1]
    return RoutingScores(highest[:, 0], highest[:, 1])


def _layers(routing, expert_types):
    """The arrays `dispatched` by block, after checking their shapes."""
    layers = routing if isinstance(routing, dict) else {"": routing}
    dispatched = {}
    for name, record in layers.items():
        served = np.asarray(record.dispatched, "float64")
        if served.ndim != 3 or served.shape[-1] != expert_types.total:
            expected = f"routing arrays (batch, tokens, {expert_types.total})"
            raise unfit(f"{expected} for {expert_types}", shape=served.shape)
        dispatched[name] = served
    return dispatched
