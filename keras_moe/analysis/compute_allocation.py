"""The compute of an MoE++ by token and by kind of expert.

Axes: B batch, N tokens, E experts.
"""

from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe.analysis.patches import of_patches
from keras_moe.checks import check_integer, check_one_of
from keras_moe.ops.expert_types import EXPERT_TYPES, ExpertTypes


class KindLoads(NamedTuple):
    """The loads of the types of experts in one MoE layer.

    Attributes:
        shares: fraction of all served assignments by kind; they sum to 1.
        experts_per_token: mean number of experts that serve a token, by kind.
        dropped_choices: fraction of the tokens' K choices that were dropped.
    """

    shares: dict[str, float]
    experts_per_token: dict[str, float]
    dropped_choices: float


class RoutingScores(NamedTuple):
    """The highest and the second-highest gate of each token of one layer.

    Attributes:
        highest: (tokens,).
        second: (tokens,).
    """

    highest: np.ndarray
    second: np.ndarray

    def to_dict(self) -> dict:
        """Means and variances, JSON-serialisable."""
        return {
            f"{name}_{what}": float(getattr(values, method)())
            for name, values in self._asdict().items()
            for what, method in (("mean", "mean"), ("variance", "var"))
        }


def ffn_experts_per_token(routing: Any, expert_types: ExpertTypes) -> np.ndarray:
    """The number of FFN experts that served each token, 0 to K.

    Args:
        routing: `Routing` of arrays (B, N, E), or a dict of these by block, whose mean
            over blocks is taken.
        expert_types: numbers of experts of each type, such as `backbone.expert_types`.

    Returns:
        float64 (B, N).

    Raises:
        ValueError: if the arrays do not fit `expert_types`, or there is no block.

    Reference:
        *MoE++*, Figure 5.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import ffn_experts_per_token
    >>> from keras_moe.ops import ExpertTypes, Routing
    >>> served = np.array([[[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]])
    >>> routing = Routing(*[served] * 6)
    >>> ffn_experts_per_token(routing, ExpertTypes(ffn=2, zero=1)).tolist()
    [[2.0, 1.0]]
    """
    return experts_per_token(routing, expert_types, "ffn")


def experts_per_token(routing: Any, expert_types: ExpertTypes, kind: str) -> np.ndarray:
    """The number of experts of a kind that served each token, 0 to K.

    Args:
        routing: `Routing` of arrays (B, N, E), or a dict of these by block, whose mean
            over blocks is taken.
        expert_types: numbers of experts of each type, such as `backbone.expert_types`.
        kind: `"ffn"`, `"zero"`, `"copy"` or `"constant"`.

    Returns:
        float64 (B, N).

    Raises:
        ValueError: if there is no such kind, the arrays do not fit `expert_types`, or
            there is no block.

    Reference:
        *MoE++*, Figures 5 and A.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import experts_per_token
    >>> from keras_moe.ops import ExpertTypes, Routing
    >>> served = np.array([[[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]])
    >>> expert_types = ExpertTypes(ffn=2, zero=1)
    >>> experts_per_token(Routing(*[served] * 6), expert_types, "zero").tolist()
    [[0.0, 1.0]]
    """
    check_one_of("kind", kind, EXPERT_TYPES)
    part = (
        expert_types.slices()[kind] if isinstance(expert_types, ExpertTypes) else None
    )
    layers = _layers(routing, expert_types)
    return np.mean(
        [served[..., part].sum(axis=-1) for served in layers.values()], axis=0
    )


def compute_map(
    routing: Any, expert_types: ExpertTypes, grid: tuple[int, int], kind: str = "ffn"
) -> np.ndarray:
    """`experts_per_token` at the patches' places in the image.

    Args:
        routing: `Routing` of arrays (B, N, E), or a dict of these by block. N is the
            number of patches in the grid, and one more with a class token before them.
        expert_types: numbers of experts of each type, such as `backbone.expert_types`.
        grid: numbers of patches down and across.
        kind: kind of the experts that are counted.

    Returns:
        float64 (B, rows, columns).

    Raises:
        ValueError: if the tokens do not fit the grid.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import compute_map
    >>> from keras_moe.ops import ExpertTypes, Routing
    >>> routing = Routing(*[np.ones((1, 5, 3))] * 6)
    >>> compute_map(routing, ExpertTypes(ffn=2, zero=1), grid=(2, 2)).tolist()
    [[[2.0, 2.0], [2.0, 2.0]]]
    """
    counts = experts_per_token(routing, expert_types, kind)
    return of_patches(counts, grid).reshape(-1, *grid)


def load_by_kind(
    routing: dict[str, Any],
    expert_types: ExpertTypes,
    num_selected_experts: int,
    mask: Any = None,
) -> dict[str, KindLoads]:
    """The loads of the types of experts in each MoE block.

    Args:
        routing: dict from a block to its `Routing` of arrays (B, N, E).
        expert_types: numbers of experts of each type, such as `backbone.expert_types`.
        num_selected_experts: K.
        mask: boolean (B, N), False for tokens that do not count.

    Returns:
        `KindLoads` by block.

    Raises:
        ValueError: if the arrays do not fit `expert_types`, or there is no block.

    Reference:
        *MoE++*, Figure 4.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import load_by_kind
    >>> from keras_moe.ops import ExpertTypes, Routing
    >>> served = np.array([[[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]])
    >>> routing = {"block_0": Routing(*[served] * 6)}
    >>> loads = load_by_kind(routing, ExpertTypes(ffn=2, zero=1), 2)
    >>> loads["block_0"].shares["zero"], loads["block_0"].experts_per_token["ffn"]
    (0.25, 1.5)
    """
    check_integer("num_selected_experts", num_selected_experts)
    loads = {}
    for name, served in _layers(routing, expert_types).items():
        tokens = served.reshape(-1, expert_types.total)
        if mask is not None:
            tokens = tokens[np.asarray(mask, bool).ravel()]
        if not len(tokens):
            raise ValueError("Expected at least one token; received: none that counts")
        loads[name] = kind_loads(
            tokens.sum(axis=0), len(tokens), expert_types, num_selected_experts
        )
    return loads


def kind_loads(
    served: np.ndarray,
    num_tokens: int,
    expert_types: ExpertTypes,
    num_selected_experts: int,
) -> KindLoads:
    """The loads of the types of experts in one MoE layer, by counts of tokens."""
    by_kind = {
        kind: float(served[part].sum() / num_tokens)
        for kind, part in expert_types.slices().items()
    }
    total = sum(by_kind.values())
    return KindLoads(
        {kind: value / (total or 1.0) for kind, value in by_kind.items()},
        by_kind,
        1.0 - total / num_selected_experts,
    )


def print_load_by_kind(
    loads: dict[str, KindLoads], console: Console | None = None
) -> None:
    """Prints a table with a row for each MoE block.

    Args:
        loads: result of `load_by_kind`.
        console: a rich console; None takes the terminal.

    Example:

    >>> from keras_moe.analysis import print_load_by_kind
    >>> from rich.console import Console
    >>> print_load_by_kind({}, console=Console(quiet=True))
    """
    table = Table(title="Load by kind of expert")
    table.add_column("block")
    for kind in EXPERT_TYPES:
        table.add_column(f"{kind} %", justify="right")
    table.add_column("FFN per token", justify="right")
    table.add_column("dropped", justify="right")
    for name, row in loads.items():
        table.add_row(
            name,
            *(f"{100 * row.shares[kind]:.1f}" for kind in EXPERT_TYPES),
            f"{row.experts_per_token['ffn']:.3f}",
            f"{row.dropped_choices:.1%}",
        )
    (console or Console()).print(table)


def routing_scores(routing: Any) -> RoutingScores:
    """The two highest gates of each token, whose variance gating residuals lower.

    Args:
        routing: `Routing` of arrays (B, N, E).

    Returns:
        `RoutingScores`.

    Raises:
        ValueError: if the arrays are not (B, N, E) with two experts at least.

    Reference:
        *MoE++*, Figure 6.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import routing_scores
    >>> from keras_moe.ops import Routing
    >>> gates = np.array([[[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]]])
    >>> routing_scores(Routing(*[gates] * 6)).second.tolist()
    [0.3, 0.1]
    """
    if isinstance(routing, dict):
        raise ValueError(
            "Expected the Routing of one block; received: a dict of "
            f"{', '.join(map(str, routing))}"
        )
    gates = np.asarray(routing.gates, "float64")
    if gates.ndim != 3 or gates.shape[-1] < 2:
        raise ValueError(
            "Expected gates of shape (batch, tokens, experts), of two experts at "
            f"least; received: shape={gates.shape}"
        )
    highest = np.sort(gates.reshape(-1, gates.shape[-1]), axis=-1)[:, :-3:-1]
    return RoutingScores(highest[:, 0], highest[:, 1])


def _layers(routing, expert_types):
    """The arrays `dispatched` by block, if they fit."""
    if not isinstance(expert_types, ExpertTypes):
        raise ValueError(
            "Expected the ExpertTypes of a model with MoE blocks; "
            f"received: expert_types={expert_types}"
        )
    layers = routing if isinstance(routing, dict) else {"": routing}
    if not layers:
        raise ValueError("Expected at least one MoE block; received: none")
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
