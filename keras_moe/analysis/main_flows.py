"""The largest flows of tokens through experts, placed for a picture.

Axes: E experts of a layer.
"""

from typing import Any, NamedTuple

import numpy as np

REST, NOBODY = "rest", "none"


class Node(NamedTuple):
    """The tokens of one expert in one layer.

    Attributes:
        name: number of the expert; `"rest"` for small experts taken together, `"none"`
            for tokens that no expert serves.
        bottom: lower end, of a column from 0 to 1.
        height: share of the layer's tokens, times the part of the column that is not
            between nodes.
    """

    name: str
    bottom: float
    height: float


class Ribbon(NamedTuple):
    """The tokens that go from one node to a node of the next layer.

    Attributes:
        layer: number of the layer that they leave.
        source: number of the node there.
        target: number of the node in the next layer.
        start: lower end at the source.
        stop: lower end at the target.
        height: its width at the source.
        end_height: its width at the target, whose layer may have more room between
            nodes.
    """

    layer: int
    source: int
    target: int
    start: float
    stop: float
    height: float
    end_height: float


class MainFlows(NamedTuple):
    """An alluvial diagram.

    Attributes:
        columns: list of the nodes of each layer, from the top down.
        ribbons: list of the ribbons, the broadest first.
        shown: share of the tokens' steps that these carry.
    """

    columns: list[list[Node]]
    ribbons: list[Ribbon]
    shown: float


def main_flows(
    flows: list[Any],
    max_experts: int = 24,
    min_share: float = 0.022,
    max_ribbons: int = 300,
    gap: float = 0.008,
) -> MainFlows:
    """The largest flows of tokens through experts, placed for a picture.

    Nodes stand beside those that their tokens come from, so that few ribbons cross.
    """
    flows = [np.asarray(each, "float64") for each in flows]
    if not flows:
        raise ValueError("Expected flows between two layers or more; received: none")
    totals = [flows[0].sum(axis=1), *(each.sum(axis=0) for each in flows)]
    merged = [_merged(total, max_experts, min_share) for total in totals]
    # Flows between nodes, as shares of all tokens.
    steps = [
        _matrix(rows, each.shape[0])
        @ (each / max(each.sum(), 1.0))
        @ _matrix(columns, each.shape[1]).T
        for each, rows, columns in zip(flows, merged, merged[1:])
    ]
    shares = [steps[0].sum(axis=1), *(step.sum(axis=0) for step in steps)]
    columns = [_placed(merged[0], shares[0], np.arange(len(merged[0])), gap)]
    for groups, share, step, above in zip(merged[1:], shares[1:], steps, merged):
        middles = {node.name: node.bottom + node.height / 2 for node in columns[-1]}
        middle = np.array([middles[name] for name, _ in above])
        heights = middle @ step / np.maximum(share, 1e-12)
        columns.append(_placed(groups, share, np.argsort(-heights, kind="stable"), gap))
    places = [{node.name: number for number, node in enumerate(c)} for c in columns]
    ribbons, shown, per_step = [], 0.0, max(max_ribbons // len(steps), 1)
    for layer, step in enumerate(steps):
        rows = [places[layer][name] for name, _ in merged[layer]]
        targets = [places[layer + 1][name] for name, _ in merged[layer + 1]]
        placed = np.zeros_like(step)
        placed[np.ix_(rows, targets)] = step
        new = _ribbons(layer, placed, columns[layer], columns[layer + 1])
        new = sorted(new, key=lambda pair: -pair[0])[:per_step]
        shown += sum(share for share, _ in new)
        ribbons += [ribbon for _, ribbon in new]
    ribbons.sort(key=lambda ribbon: -ribbon.height)
    return MainFlows(columns, ribbons, shown / len(steps))


def _merged(total, max_experts, min_share):
    """Names of nodes with their experts: the largest, the rest, and those of nobody."""
    experts, unserved = total[:-1], total[-1]
    large = np.argsort(-experts, kind="stable")[:max_experts]
    large = sorted(e for e in large if experts[e] >= min_share * max(total.sum(), 1.0))
    groups = [(str(expert), [expert]) for expert in large if experts[expert] > 0]
    small = [e for e in range(len(experts)) if e not in large]
    if experts[small].sum() > 0:
        # One small expert alone keeps its number.
        alone = [e for e in small if experts[e] > 0]
        groups.append((str(alone[0]) if len(alone) == 1 else REST, small))
    if unserved > 0:
        groups.append((NOBODY, [len(experts)]))
    return groups


def _matrix(groups, size):
    matrix = np.zeros((len(groups), size))
    for row, (_, experts) in enumerate(groups):
        matrix[row, experts] = 1.0
    return matrix


def _placed(groups, shares, order, gap):
    """The nodes from the top down, with room between them."""
    room = 1.0 - gap * (len(groups) - 1)
    nodes, top = [], 1.0
    # The small ones and the unserved stand below all others.
    for number in sorted(order, key=lambda node: groups[node][0] in (REST, NOBODY)):
        height = float(shares[number]) * room
        top -= height
        nodes.append(Node(groups[number][0], top, height))
        top -= gap
    return nodes


def _ribbons(layer, step, sources, targets):
    """Pairs of a share and its ribbon; at each node they leave and arrive in order."""
    shares = np.maximum(step.sum(axis=1), 1e-12), np.maximum(step.sum(axis=0), 1e-12)
    scale = np.array([node.height for node in sources]) / shares[0]
    out = np.array([node.bottom + node.height for node in sources])
    into = np.array([node.bottom + node.height for node in targets])
    for source, row in enumerate(step):
        for target, share in enumerate(row):
            if share <= 0:
                continue
            height = share * scale[source]
            out[source] -= height
            arrived = share * targets[target].height / shares[1][target]
            into[target] -= arrived
            ends = float(out[source]), float(into[target]), height, arrived
            yield float(share), Ribbon(layer, source, target, *ends)
