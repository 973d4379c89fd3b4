"""Expert pruning. Axes: E experts, K selected experts, U groups of tokens."""

from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe._checks import check_integer, check_one_of
from keras_moe.analysis.usage import ExpertUsage

CRITERIA = ("tokens", "mass", "reap")
COVERED = ("tokens", "mass", "first_choices")


class CoverageCurve(NamedTuple):
    """The share of an MoE layer's work done by its most used experts.

    Attributes:
        experts: int (E,), expert numbers, most used first.
        covered: float (E,), share covered by the first 1, 2, ..., E of them.
    """

    experts: np.ndarray
    covered: np.ndarray

    def to_dict(self) -> dict:
        """Returns a JSON-serialisable dict."""
        return {name: array.tolist() for name, array in self._asdict().items()}

    def needed(self, share: float) -> int:
        """Number of experts needed to cover a share."""
        # Allows for rounding errors of the sum.
        return int(np.argmax(self.covered >= share - 1e-12)) + 1


def expert_scores(
    usage: ExpertUsage, criterion: str = "tokens", groups: Any = None
) -> dict[str, np.ndarray]:
    """Scores experts by a pruning criterion, as float64 (E,) by block name.

    Args:
        usage: result of `expert_usage`.
        criterion: `"tokens"` served, `"mass"` (sum of combine weights) or `"reap"`
            (mean over an expert's tokens of combine weight times output norm).
        groups: a name such as `"text"` or a list of names to count; None for all.

    Reference: *Multimodal Contrastive Learning with LIMoE*, appendix E.4; *REAP the
    Experts*, arXiv 2510.13999.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, expert_scores
    >>> block = BlockUsage(*np.array([[[4.0, 1.0]], [[2.0, 0.9]], [[8.0, 6.0]]]))
    >>> usage = ExpertUsage(["all"], {"block_1": block})
    >>> expert_scores(usage, "reap")["block_1"].tolist()
    [2.0, 6.0]
    """
    check_one_of("criterion", criterion, CRITERIA)
    rows = _rows(usage, groups)
    scores = {}
    for name, block in usage.blocks.items():
        if not all(np.isfinite(x).all() for x in block if x is not None):
            raise ValueError(f"Expected a finite usage; received: NaN or Inf in {name}")
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
    """Indices of the rows of a usage for some groups."""
    names = list(usage.groups)
    if groups is None:
        return list(range(len(names)))
    wanted = [groups] if isinstance(groups, (str, int)) else groups
    return [names.index(str(name)) for name in wanted]


def coverage_curves(
    usage: ExpertUsage, by: str = "tokens", groups: Any = None, criterion: Any = None
) -> dict[str, CoverageCurve]:
    """Measures how much work the most used experts do, as curves by block name.

    Args:
        usage: result of `expert_usage`.
        by: the work: `"tokens"` served, `"mass"` of combine weights, or
            `"first_choices"` of all tokens, as in the paper's figure.
        groups: as in `expert_scores`.
        criterion: criterion of `expert_scores` that ranks the experts; None ranks by
            `by` (first choices by `"tokens"`).

    Reference: *Multimodal Contrastive Learning with LIMoE*, Figure 13.

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
    """Selects the experts that each MoE block keeps, for `prune_experts`.

    Args:
        usage: result of `expert_usage`.
        count: number of experts per block, or a dict by block name; others keep all.
        coverage: share in (0, 1], instead of `count`: each block keeps the fewest
            experts that cover it, in gate mass if that is the criterion, else in
            tokens.
        criterion: as in `expert_scores`.
        groups: groups that the pruned model is for, as in `expert_scores`.
        minimum: smallest number to keep with `coverage`; routers need at least K.

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
            "Expected either count or coverage; "
            f"received: count={count!r}, coverage={coverage!r}"
        )
    by = "mass" if criterion == "mass" else "tokens"
    curves = coverage_curves(usage, by, groups, criterion)
    if coverage is not None:
        _check_share(coverage)
        counts = {x: max(y.needed(coverage), minimum) for x, y in curves.items()}
    else:
        counts = count if isinstance(count, dict) else dict.fromkeys(curves, count)
    kept = {}
    for name, number in counts.items():
        experts = curves[name].experts
        check_integer("count", number, 1, len(experts))
        kept[name] = sorted(experts[:number].tolist())
    return kept


def _check_share(coverage):
    if not 0 < coverage <= 1:
        raise ValueError(f"Expected 0 < coverage <= 1; received: coverage={coverage!r}")


def print_coverage(
    curves: dict[str, CoverageCurve],
    shares: Any = (0.5, 0.8, 0.9, 0.95, 0.99, 1.0),
    console: Console | None = None,
) -> None:
    """Prints how many experts of each block cover each share.

    Args:
        curves: result of `coverage_curves`.
        shares: shares in (0, 1].
        console: rich console; None for the terminal.

    Example:

    >>> from keras_moe.analysis import print_coverage
    >>> from rich.console import Console
    >>> print_coverage({}, console=Console(quiet=True))
    """
    table = Table("block", title="Experts that cover a share")
    for share in shares:
        _check_share(share)
        table.add_column(f"{share:.0%}", justify="right")
    table.add_column("of", justify="right")
    for name, curve in curves.items():
        counts = [str(curve.needed(share)) for share in shares]
        table.add_row(name, *counts, str(len(curve.experts)))
    (console or Console()).print(table)


def mask_experts(
    model: Any, kept_experts: dict[str, Any], method: str = "router_drop"
) -> Any:
    """Returns a copy of a model that keeps all weights but uses only some experts.

    Its outputs equal those of `prune_experts`; use it to try out a selection.

    Args:
        model: backbone or task with token choice routers, not pruned; not modified.
        kept_experts: as in `prune_experts`.
        method: as in `prune_experts`.

    Example:

    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("vmoe_digits", task="backbone")
    >>> masked = analysis.mask_experts(model, {"block_1": [0, 3]})
    >>> masked.count_params() == model.count_params()
    True
    """
    return model.with_kept_experts(kept_experts, method, removed=False)


def prune_experts(
    model: Any, kept_experts: dict[str, Any], method: str = "router_drop"
) -> Any:
    """Returns a smaller copy of a model with only some of its experts.

    | method | gates are the softmax over | a token that prefers a pruned expert |
    |---|---|---|
    | `"router_drop"` | the kept experts | goes to the best kept one |
    | `"router_pred"` | all experts | goes to the best kept one, with its small gate |
    | `"router_pred_skip"` | all experts | loses that choice |

    *LIMoE* finds "router-pred" better when many experts are pruned;
    `"router_pred_skip"` is ours. A capacity factor counts the kept experts in
    C = S K c / E, or with `"router_pred_skip"` all E. To train the result, use
    `"router_drop"`: with the other methods auxiliary losses still balance the load over
    pruned experts, so set `auxiliary_losses=None`.

    MoE++ loses only FFN experts; others that are not kept are never chosen. Its routers
    keep all columns, which the next block reads.

    Args:
        model: backbone or task with token choice or MoE++ routers; not modified. A
            pruned model can be pruned further by the same method.
        kept_experts: dict from block name to the numbers of the experts to keep, at
            least K, such as `select_experts` returns; other blocks are unchanged.
        method: `"router_drop"`, `"router_pred"` or `"router_pred_skip"`.

    Reference: *Multimodal Contrastive Learning with LIMoE*, appendix E.4.

    Example:

    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("vmoe_digits", task="backbone")
    >>> pruned = analysis.prune_experts(model, {"block_1": [0, 3]})
    >>> pruned.get_layer("block_1").feed_forward.experts.num_experts
    2
    """
    return model.with_kept_experts(kept_experts, method, removed=True)
