"""Compute of MoE++. Axes: B batch, N tokens, E experts, K selected experts."""

from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe._checks import check_one_of
from keras_moe.analysis.tokens import of_patches
from keras_moe.ops.expert_types import EXPERT_TYPES, ExpertTypes


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
    routing: Any, expert_types: ExpertTypes, expert_type: str = "ffn"
) -> np.ndarray:
    """Counts the experts of a type that serve each token, float64 (B, N) from 0 to K.

    Args:
        routing: `Routing` of arrays (B, N, E), or a dict of these to average over.
        expert_types: number of experts of each type, `backbone.expert_types`.
        expert_type: `"ffn"`, `"zero"`, `"copy"` or `"constant"`.

    Reference: *MoE++*, Figures 5 and A.

    Example:

    >>> import numpy as np
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
    routing: Any,
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

    >>> import numpy as np
    >>> from keras_moe.analysis import compute_map
    >>> from keras_moe.ops import ExpertTypes, Routing
    >>> routing = Routing(*[np.ones((1, 5, 3))] * 6)
    >>> compute_map(routing, ExpertTypes(ffn=2, zero=1), grid=(2, 2)).tolist()
    [[[2.0, 2.0], [2.0, 2.0]]]
    """
    counts = experts_per_token(routing, expert_types, expert_type)
    return of_patches(counts, grid).reshape(-1, *grid)


def load_by_type(
    routing: dict[str, Any],
    expert_types: ExpertTypes,
    num_selected_experts: int,
    mask: Any = None,
) -> dict[str, TypeLoads]:
    """Measures the load of each expert type, as `TypeLoads` by block name.

    Args:
        routing: dict from block name to `Routing` of arrays (B, N, E).
        expert_types: number of experts of each type, `backbone.expert_types`.
        num_selected_experts: K.
        mask: boolean (B, N), False for tokens to ignore.

    Reference: *MoE++*, Figure 4.

    Example:

    >>> import numpy as np
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
    table = Table("block", title="Load by type of expert")
    for title in (
        *(f"{expert_type} %" for expert_type in EXPERT_TYPES),
        "FFN per token",
        "dropped",
    ):
        table.add_column(title, justify="right")
    for name, row in loads.items():
        table.add_row(
            name,
            *(f"{100 * row.shares[expert_type]:.1f}" for expert_type in EXPERT_TYPES),
            f"{row.experts_per_token['ffn']:.3f}",
            f"{row.dropped_choices:.1%}",
        )
    (console or Console()).print(table)


def routing_scores(routing: Any) -> RoutingScores:
    """Finds each token's two largest gates, whose variance gating residuals reduce.

    Args:
        routing: `Routing` of arrays (B, N, E), with at least two experts.

    Reference: *MoE++*, Figure 6.

    Example:

    >>> import numpy as np
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
            raise ValueError(
                f"Expected routing arrays (batch, tokens, {expert_types.total}) for "
                f"{tuple(expert_types)} experts of each type; "
                f"received: shape={served.shape}"
            )
        dispatched[name] = served
    return dispatched
