"""Statistics of routers, as functions of routing records.

Axes: B batch, N tokens, E experts, K selected experts.
"""

from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe.analysis.entropy import entropy


class RoutingStatistics(NamedTuple):
    """Statistics of the routing of one MoE layer.

    Attributes:
        expert_shares: (E,), fractions of all served assignments by expert; sum 1.
        dropped_tokens: fraction of tokens that no expert served.
        dropped_choices: fraction of the tokens' K choices that were dropped; None
            where tokens do not choose.
        load_entropy: entropy of `expert_shares` over log E: 1 is a balanced load.
        mean_max_gate: mean over tokens of the largest gate.
        affinity_imbalance: largest relative deviation of an expert's mass in the
            affinity from the mean of all: 0 for a transport plan with exact marginals.
    """

    expert_shares: np.ndarray
    dropped_tokens: float
    dropped_choices: float | None
    load_entropy: float
    mean_max_gate: float
    affinity_imbalance: float

    def to_dict(self) -> dict:
        """A JSON-serialisable dict."""
        return {**self._asdict(), "expert_shares": self.expert_shares.tolist()}


def routing_statistics(
    routing: Any, num_selected_experts: int | None = None, mask: Any = None
) -> RoutingStatistics:
    """Load, drops and confidence of a router.

    Args:
        routing: `Routing` of arrays (B, N, E), which
            `keras.Model(backbone.input, backbone.routing).predict(images)` returns
            for each block.
        num_selected_experts: K; None for expert choice and soft routing.
        mask: boolean (B, N), False for tokens that do not count.

    Returns:
        `RoutingStatistics`.

    Raises:
        ValueError: if the arrays are not (B, N, E), or no token counts.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import routing_statistics
    >>> from keras_moe.ops import Routing
    >>> served = np.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]])
    >>> statistics = routing_statistics(Routing(*[served] * 6), 1)
    >>> statistics.expert_shares.tolist(), round(statistics.dropped_tokens, 3)
    ([1.0, 0.0], 0.333)
    """
    dispatched = np.asarray(routing.dispatched, "float64")
    gates = np.asarray(routing.gates, "float64")
    affinity = np.asarray(routing.affinity, "float64")
    if dispatched.ndim != 3:
        raise ValueError(
            "Expected routing arrays of shape (batch, tokens, experts); "
            f"received: shape={dispatched.shape}"
        )
    counts = np.ones(dispatched.shape[:2], bool) if mask is None else np.asarray(mask)
    if not counts.any():
        raise ValueError("Expected at least one token; received: none that counts")
    dispatched, gates, affinity = (x[counts] for x in (dispatched, gates, affinity))
    num_experts = dispatched.shape[-1]
    loads = dispatched.sum(axis=0)
    shares = loads / max(loads.sum(), 1.0)
    return RoutingStatistics(
        expert_shares=shares,
        dropped_tokens=float((dispatched.sum(axis=-1) == 0).mean()),
        dropped_choices=None
        if num_selected_experts is None
        else float(1.0 - loads.sum() / (len(dispatched) * num_selected_experts)),
        load_entropy=float(entropy(shares) / np.log(num_experts))
        if num_experts > 1
        else 1.0,
        mean_max_gate=float(gates.max(axis=-1).mean()),
        affinity_imbalance=_imbalance(affinity.sum(axis=0)),
    )


def _imbalance(masses):
    mean = masses.mean()
    return float(np.abs(masses / mean - 1.0).max()) if mean > 0 else 0.0


def print_statistics(
    statistics: dict[str, RoutingStatistics], console: Console | None = None
) -> None:
    """Prints a table with a row for each MoE block.

    Args:
        statistics: dict from the name of a block to its `RoutingStatistics`.
        console: a rich console; None takes the terminal.

    Example:

    >>> from keras_moe.analysis import print_statistics
    >>> from rich.console import Console
    >>> print_statistics({}, console=Console(quiet=True))
    """
    table = Table(title="Routing")
    table.add_column("block")
    table.add_column("% of tokens per expert")
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
