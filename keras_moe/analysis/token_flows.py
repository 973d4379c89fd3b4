"""The ways of tokens through the experts of successive layers.

Axes: B batch, N tokens, E and F experts of two layers.
"""

from typing import Any, NamedTuple

import numpy as np

from keras_moe.analysis.entropy import entropy


class FlowStatistics(NamedTuple):
    """Relation of the experts of one layer to those of the next.

    Attributes:
        information: share of the uncertainty about a token's expert in the next layer
            that its expert in this one takes away: 0 where the two are independent, 1
            where one follows from the other (mutual information over entropy).
        kept_company: probability that two tokens of one expert are in one expert of
            the next layer, too.
        company_by_chance: the same probability for any two tokens.
    """

    information: float
    kept_company: float
    company_by_chance: float


def main_experts(routing: Any) -> np.ndarray:
    """The expert with the largest weight in each token's output.

    Args:
        routing: `Routing` of arrays (B, N, E).

    Returns:
        Integers (B, N); E for tokens that no expert serves.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import main_experts
    >>> from keras_moe.ops import Routing
    >>> weights = np.array([[[0.2, 0.5], [0.3, 0.0], [0.0, 0.0]]])
    >>> record = Routing(*[weights] * 4, dispatched=weights > 0, combined=weights)
    >>> main_experts(record).tolist()
    [[1, 0, 2]]
    """
    served = np.asarray(routing.dispatched) > 0
    # A served token may have a weight of 0.
    weights = np.where(served, np.asarray(routing.combined), -np.inf)
    return np.where(served.any(axis=-1), weights.argmax(axis=-1), served.shape[-1])


def token_flows(source: Any, target: Any, mask: Any = None) -> np.ndarray:
    """The number of tokens that go from each expert to each expert of another layer.

    A token counts once in each layer, at its `main_experts`.

    Args:
        source: `Routing` of arrays (B, N, E) of one layer.
        target: `Routing` of arrays (B, N, F) of a later layer, for the same tokens.
        mask: boolean (B, N), False for tokens that do not count, or None.

    Returns:
        Integers (E + 1, F + 1). The last row and column are tokens that no expert
        serves.

    Raises:
        ValueError: if the records are not of the same tokens.

    Reference:
        *LIMoE*, Figures 30 and 31.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import token_flows
    >>> from keras_moe.ops import Routing
    >>> one = Routing(*[np.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]])] * 6)
    >>> two = Routing(*[np.array([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])] * 6)
    >>> token_flows(one, two).tolist()
    [[1, 1, 0], [0, 0, 0], [0, 1, 0]]
    """
    sources, targets = main_experts(source), main_experts(target)
    if sources.shape != targets.shape:
        raise ValueError(
            "Expected records of the same tokens; received: shapes "
            f"{sources.shape} and {targets.shape} without experts"
        )
    rows = np.asarray(source.dispatched).shape[-1] + 1
    columns = np.asarray(target.dispatched).shape[-1] + 1
    pairs = sources * columns + targets
    pairs = pairs.ravel() if mask is None else pairs[np.asarray(mask, bool)]
    return np.bincount(pairs, minlength=rows * columns).reshape(rows, columns)


def flow_statistics(flows: Any) -> FlowStatistics:
    """How far the experts of one layer determine those of the next.

    Args:
        flows: integers (E + 1, F + 1), result of `token_flows`.

    Returns:
        `FlowStatistics`; zeros where there are no two tokens.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import flow_statistics
    >>> flow_statistics(np.array([[5, 0, 0], [0, 5, 0], [0, 0, 0]])).information
    1.0
    """
    flows = np.asarray(flows, "float64")
    sources, targets = flows.sum(axis=1), flows.sum(axis=0)
    total = max(flows.sum(), 1.0)
    unknown = entropy(targets / total)
    left = entropy(flows.ravel() / total) - entropy(sources / total)
    information = (unknown - left) / unknown if unknown > 1e-12 else 0.0
    return FlowStatistics(
        float(np.clip(information, 0.0, 1.0)),
        _ratio(_pairs(flows), _pairs(sources)),
        _ratio(_pairs(targets), _pairs(flows.sum())),
    )


def _pairs(counts):
    return float(np.sum(counts * (counts - 1)))


def _ratio(part, whole):
    return part / whole if whole else 0.0
