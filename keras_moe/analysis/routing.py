"""Routing statistics. Axes: B batch, N tokens, S group_size, E experts, K selected."""

from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe.ops import expert_capacity, expert_choice, token_choice

# Limits beyond which a router is unhealthy. An expert is dead if it has less than
# this part of an equal share.
DEAD = 0.01
# A layer has collapsed if the normalised entropy of its loads is below this,
MIN_ENTROPY = 0.5
# if one of more than two experts has a larger share than this,
MAX_SHARE = 0.75
# or if more than this part of its experts is dead.
MAX_DEAD = 0.5


def entropy(shares: Any) -> Any:
    """Entropy of shares in nats, along the last axis."""
    shares = np.asarray(shares, "float64")
    # `0.0 -` avoids a result of -0.0.
    return 0.0 - (shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=-1)


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
    routing: Any, num_selected_experts: int | None = None, mask: Any = None
) -> RoutingStatistics:
    """Measures a router's load, drops and confidence.

    Args:
        routing: `Routing` of arrays (B, N, E), one of those that
            `keras.Model(backbone.input, backbone.routing).predict(images)` returns.
        num_selected_experts: K; None for expert choice and soft routing.
        mask: boolean (B, N), False for tokens to ignore.

    Example:

    >>> import numpy as np
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
        raise ValueError(
            "Expected routing arrays of shape (batch, tokens, experts), and a token "
            f"that counts; received: shape={dispatched.shape}, {counts.sum()} tokens"
        )
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
    table = Table("block", "% of tokens per expert", title="Routing")
    for column in ("no expert", "dropped", "entropy", "max gate"):
        table.add_column(column, justify="right")
    for name, row in statistics.items():
        table.add_row(
            name,
            " ".join(f"{100 * share:.0f}" for share in row.expert_shares),
            f"{row.dropped_tokens:.1%}",
            "-" if row.dropped_choices is None else f"{row.dropped_choices:.1%}",
            f"{row.load_entropy:.3f}",
            f"{row.mean_max_gate:.3f}",
        )
    (console or Console()).print(table)


def expert_queues(
    affinity: Any,
    num_selected_experts: int | None = None,
    priority: Any = "first_come",
    examples_per_group: int = 1,
    mask: Any = None,
) -> np.ndarray:
    """Finds each token's position in the queue of each expert.

    An expert with capacity C serves positions 0 to C - 1, so one call gives the drops
    at every capacity.

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

    >>> import numpy as np
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
        plan = token_choice(
            grouped, grouped, num_selected_experts, size, priority, mask
        )
        slots = np.array(plan.token_slots)
        positions = np.full((*grouped.shape[:2], num_experts + 1), -1, "int32")
        # Choices of masked tokens go to an extra column, which is dropped.
        experts = np.where(slots < 0, num_experts, slots // size)
        np.put_along_axis(positions, experts, np.where(slots < 0, -1, slots % size), -1)
        positions = positions[..., :-1]
    return positions.reshape(affinity.shape).astype("int32")


def served_at(positions: Any, capacity: Any) -> np.ndarray:
    """Which positions of `expert_queues` are served at a capacity."""
    return (positions >= 0) & (positions < np.asarray(capacity))


def dropped_at_capacities(
    routing: Any,
    capacity_factors: Any,
    num_selected_experts: int | None = None,
    priority: Any = "first_come",
    examples_per_group: int = 1,
    mask: Any = None,
) -> np.ndarray:
    """Finds the tokens dropped at given capacity factors, boolean (F, B, N).

    Routes again from the affinity, which at inference usually has no noise or limit.

    Args:
        routing: `Routing` of arrays (B, N, E).
        capacity_factors: F numbers c, for capacities of c S K / E, rounded up.
        num_selected_experts: K for token choice, None for expert choice.
        priority: as in `expert_queues`.
        examples_per_group: as in `expert_queues`.
        mask: boolean (B, N), False for tokens that are not routed and not counted.

    Reference: *CLIP-UP*, Figure 7.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import dropped_at_capacities
    >>> from keras_moe.ops import Routing
    >>> gates = np.array([[[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]], "float32")
    >>> dropped_at_capacities(Routing(*[gates] * 6), (0.5, 1.0), 1).tolist()
    [[[False, True, True, False]], [[False, False, True, False]]]
    """
    positions = expert_queues(
        routing.affinity, num_selected_experts, priority, examples_per_group, mask
    )
    batch, length, num_experts = positions.shape
    size, selected = examples_per_group * length, num_selected_experts or 1
    dropped = [
        ~served_at(positions, expert_capacity(size, num_experts, factor, selected)).any(
            axis=-1
        )
        for factor in capacity_factors
    ]
    dropped = np.array(dropped, bool).reshape(-1, batch, length)
    return dropped if mask is None else dropped & np.asarray(mask, bool)
