"""Coverage by the most used experts, and the choice of those to keep.

Axes: E experts, U groups of tokens (modalities or classes).
"""

from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe.analysis.expert_usage import ExpertUsage, checked_usage
from keras_moe.checks import check_integer, check_one_of

CRITERIA = ("tokens", "mass", "reap")
COVERED = ("tokens", "mass", "first_choices")


class CoverageCurve(NamedTuple):
    """The share of an MoE layer's work that its most used experts do.

    Attributes:
        experts: int (E,), numbers of the experts, the most used first.
        covered: float (E,), share that the first 1, 2, ..., E of them do; the last
            is 1.
    """

    experts: np.ndarray
    covered: np.ndarray

    def to_dict(self) -> dict:
        """A JSON-serialisable dict."""
        return {name: array.tolist() for name, array in self._asdict().items()}


def expert_scores(
    usage: ExpertUsage, criterion: str = "tokens", groups: Any = None
) -> dict[str, np.ndarray]:
    """The score of each expert by a criterion of pruning.

    Args:
        usage: `ExpertUsage`.
        criterion: `"tokens"`, the number of tokens that the expert serves; `"mass"`,
            the sum of its weights in their outputs; or `"reap"`, the mean over these
            tokens of its weight times the norm of its output, 0 without a token.
        groups: names of the groups whose tokens count, such as `"text"`, or a list of
            classes; None takes all.

    Returns:
        Dict from the name of a block to float64 (E,).

    Raises:
        ValueError: if the usage is empty or not finite, a group is unknown, or
            `"reap"` lacks contributions.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, appendix E.4; *REAP the Experts*,
        arXiv 2510.13999.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, expert_scores
    >>> block = BlockUsage(*np.array([[[4.0, 1.0]], [[2.0, 0.9]], [[8.0, 6.0]]]))
    >>> usage = ExpertUsage(["all"], {"block_1": block})
    >>> expert_scores(usage, "reap")["block_1"].tolist()
    [2.0, 6.0]
    """
    check_one_of("criterion", criterion, CRITERIA)
    rows = _rows(checked_usage(usage), groups)
    scores = {}
    for name, block in usage.blocks.items():
        tokens = block.tokens[rows].sum(axis=0)
        if not tokens.sum():
            raise ValueError(
                f"Expected groups with served tokens in {name}; "
                f"received: groups={groups!r} without"
            )
        if criterion == "reap":
            if block.contributions is None:
                raise ValueError(
                    "Expected a usage with contributions for criterion='reap', by "
                    f"expert_usage(contributions=True); received: none in {name}"
                )
            contributions = block.contributions[rows].sum(axis=0)
            scores[name] = contributions / np.maximum(tokens, 1)
        else:
            scores[name] = getattr(block, criterion)[rows].sum(axis=0)
    return scores


def _rows(usage, groups):
    names = list(usage.groups)
    if groups is None:
        return list(range(len(names)))
    wanted = [groups] if isinstance(groups, (str, int)) else list(groups)
    wanted = [str(name) for name in wanted]
    if not wanted or not {*wanted} <= {*names} or len({*wanted}) < len(wanted):
        raise ValueError(
            f"Expected different groups among {names}; received: groups={groups!r}"
        )
    return [names.index(name) for name in wanted]


def coverage_curves(
    usage: ExpertUsage, by: str = "tokens", groups: Any = None, criterion: Any = None
) -> dict[str, CoverageCurve]:
    """How much of the work the 1, 2, ..., E most used experts do.

    Args:
        usage: `ExpertUsage`.
        by: share that is covered, of the served `"tokens"`, of the `"mass"` of gates
            in their outputs, or of the `"first_choices"` of all tokens, as in the
            paper's figure.
        groups: argument of `expert_scores`.
        criterion: argument of `expert_scores` that orders the experts; None takes `by`,
            and `"tokens"` for first choices.

    Returns:
        Dict from the name of a block to its `CoverageCurve`; equal scores put the lower
        number first.

    Raises:
        ValueError: as `expert_scores`.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, Figure 13.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, coverage_curves
    >>> block = BlockUsage(np.array([[1.0, 6.0, 3.0]]), np.ones((1, 3)))
    >>> curve = coverage_curves(ExpertUsage(["all"], {"block_1": block}))["block_1"]
    >>> curve.experts.tolist(), curve.covered.tolist()
    ([1, 2, 0], [0.6, 0.9, 1.0])
    """
    check_one_of("by", by, COVERED)
    if criterion is None:
        criterion = by if by in CRITERIA else "tokens"
    scores = expert_scores(usage, criterion, groups)
    rows, curves = _rows(usage, groups), {}
    for name, block in usage.blocks.items():
        if getattr(block, by) is None:
            raise ValueError(
                f"Expected a usage with {by}, as expert_usage counts them; received: "
                f"none in {name}"
            )
        amounts = getattr(block, by)[rows].sum(axis=0)
        order = np.argsort(-scores[name], kind="stable")
        covered = np.cumsum(amounts[order])
        curves[name] = CoverageCurve(order, covered / covered[-1])
    return curves


def select_experts(
    usage: ExpertUsage,
    count: Any = None,
    coverage: float | None = None,
    criterion: str = "tokens",
    groups: Any = None,
    minimum: int = 1,
) -> dict[str, list[int]]:
    """The experts that each MoE block keeps.

    Args:
        usage: `ExpertUsage`.
        count: number of experts to keep in each block, or a dict from the names of
            blocks to numbers; blocks that it leaves out keep all.
        coverage: share in (0, 1] instead of `count`: each block keeps as few of its
            best experts as cover it, of tokens, or of gate mass by that criterion.
        criterion: argument of `expert_scores`.
        groups: argument of `expert_scores`: the modality or the classes that the pruned
            model is for.
        minimum: smallest number to keep with `coverage`; K of the routers is needed.

    Returns:
        Dict from the name of a block to the numbers of its experts, for
        `prune_experts`.

    Raises:
        ValueError: as `expert_scores`, or if an argument is out of range.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, select_experts
    >>> block = BlockUsage(np.array([[1.0, 6.0, 3.0]]), np.ones((1, 3)))
    >>> usage = ExpertUsage(["all"], {"block_1": block})
    >>> select_experts(usage, count=1), select_experts(usage, coverage=0.8)
    ({'block_1': [1]}, {'block_1': [1, 2]})
    """
    if (count is None) == (coverage is None):
        raise ValueError(
            "Expected count or coverage, one of them; "
            f"received: count={count!r}, coverage={coverage!r}"
        )
    by = "mass" if criterion == "mass" else "tokens"
    curves = coverage_curves(usage, by, groups, criterion)
    if coverage is not None:
        counts = _covering(curves, coverage, check_integer("minimum", minimum))
    else:
        counts = count if isinstance(count, dict) else dict.fromkeys(curves, count)
    kept = {}
    for name, number in counts.items():
        if name not in curves:
            raise ValueError(
                f"Expected blocks among {list(curves)}; received: count of {name!r}"
            )
        experts = curves[name].experts
        if check_integer("count", number) > len(experts):
            raise ValueError(
                f"Expected at most the {len(experts)} experts of {name}; "
                f"received: {number}"
            )
        kept[name] = sorted(experts[:number].tolist())
    return kept


def _covering(curves, coverage, minimum):
    is_number = isinstance(coverage, (int, float)) and not isinstance(coverage, bool)
    if not is_number or not 0 < coverage <= 1:
        raise ValueError(f"Expected 0 < coverage <= 1; received: coverage={coverage!r}")
    counts = {}
    for name, curve in curves.items():
        # A sum of shares may miss the coverage by its rounding.
        needed = int(np.argmax(curve.covered >= coverage - 1e-12)) + 1
        counts[name] = max(needed, minimum)
    return counts


def print_coverage(
    curves: dict[str, CoverageCurve],
    shares: Any = (0.5, 0.8, 0.9, 0.95, 0.99, 1.0),
    console: Console | None = None,
) -> None:
    """Prints how many experts of each block cover each share.

    Args:
        curves: result of `coverage_curves`.
        shares: shares in (0, 1].
        console: a rich console; None takes the terminal.

    Example:

    >>> import numpy as np
    >>> from rich.console import Console
    >>> from keras_moe.analysis import CoverageCurve, print_coverage
    >>> curve = CoverageCurve(np.array([1, 0]), np.array([0.75, 1.0]))
    >>> print_coverage({"block_1": curve}, console=Console(quiet=True))
    """
    table = Table(title="Experts that cover a share")
    table.add_column("block")
    for share in shares:
        table.add_column(f"{share:.0%}", justify="right")
    table.add_column("of", justify="right")
    columns = [_covering(curves, share, 1) for share in shares]
    for name, curve in curves.items():
        counts = (str(column[name]) for column in columns)
        table.add_row(name, *counts, str(len(curve.experts)))
    (console or Console()).print(table)
