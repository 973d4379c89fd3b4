"""How tokens move between consecutive layers. Axes: E experts of a layer."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_moe.analysis.plots._figure import EXPERT_COLOURS, GREY, new_figure
from keras_moe.analysis.tokens import flow_statistics, token_flows
from keras_moe.report.model import shortened
from keras_moe.report.section import NO_TOKENS, Figure, Section, SectionContent, Table

if TYPE_CHECKING:
    import matplotlib.figure

REST, UNSERVED = "rest", "none"
LAYERS_IN_A_ROW = 5
_MAX_RIBBONS = 300
# Between nodes, in a column from 0 to 1.
_GAP = 0.008
_DEEP = 6
_WIDTH = 3.6
_BAR = 0.15
# Not pure black or white, which a page replaces by its own colours.
_DARK, _LIGHT = "#101010", "#fefefe"
_INKS = (_LIGHT, _DARK, _LIGHT, _DARK, _DARK, _LIGHT, _DARK, _DARK, _LIGHT)
_INK = dict(zip((*EXPERT_COLOURS, GREY), _INKS))


class ExpertTransitions(Section):
    """The section on transitions between experts of consecutive layers."""

    title = "Expert transitions"
    anchor = "transitions"
    intro = (
        "Each bar is an expert, as high as its share of the tokens, and each ribbon is "
        "the tokens that go from it to an expert of the next layer. Broad ribbons that "
        "stay together are paths that many tokens take."
    )

    def __init__(self, model, options):
        super().__init__(model, options)
        self.paths = _paths(model)
        self.flows: dict[str, list[Any]] = {
            x: [0] * (len(blocks) - 1) for x, blocks in self.paths.items()
        }

    @classmethod
    def fits(cls, model):
        return bool(_paths(model))

    def update(self, batch):
        for modality, blocks in self.paths.items():
            flows = self.flows[modality]
            for step, (source, target) in enumerate(itertools.pairwise(blocks)):
                records = batch.routing[source.key], batch.routing[target.key]
                mask = batch.mask_of(source) & batch.mask_of(target)
                flows[step] = flows[step] + token_flows(*records, mask)

    def finish(self):
        figures, rows, data = [], [], {}
        for modality, blocks in self.paths.items():
            flows = self.flows[modality]
            if not np.sum(flows[0]):
                continue
            names = [block.short_key for block in blocks]
            figures.append(self._figure(modality, names, flows))
            data[modality] = []
            for source, target, counts in zip(names, names[1:], flows):
                statistics = flow_statistics(counts)
                ends = {"source": source, "target": target, "tokens": counts.tolist()}
                data[modality].append({**ends, **statistics._asdict()})
                shares = [f"{share:.0%}" for share in statistics]
                rows.append([modality, f"{source} to {target}", *shares])
        if not figures:
            return NO_TOKENS
        head = [
            "tokens",
            "layers",
            "known from the expert before",
            "tokens that stay together",
            "by chance",
        ]
        caption = (
            "How far an expert determines the next one: the share of the uncertainty "
            "about the next expert that it removes, and how often two tokens of one "
            "expert meet again in the next layer, compared with any two tokens"
        )
        return SectionContent([*figures, Table(head, rows, caption)], data)

    def _figure(self, modality, names, flows):
        diagram = main_flows(
            flows,
            max_experts=24 if len(names) <= _DEEP else 16,
            max_ribbons=_MAX_RIBBONS // len(self.paths),
        )
        caption = (
            f"Experts of {modality} tokens; a token is at the expert with the largest "
            "weight in its output. Small experts are together in “rest”, and tokens "
            "that no expert serves in “none” (dotted). Ribbons carry "
            f"{diagram.shown:.0%} of the tokens."
        )
        alt = f"Flows of {modality} tokens between the experts of {', '.join(names)}."
        drawing = draw_flows(diagram, names)
        return Figure(drawing, alt, caption, f"transitions_{modality}")


def _paths(model):
    """The sparse blocks of each modality with at least two."""
    paths = {}
    for block in model.blocks.values():
        if block.is_sparse:
            paths.setdefault(block.modality, []).append(block)
    return {modality: blocks for modality, blocks in paths.items() if len(blocks) > 1}


class Node(NamedTuple):
    """The tokens of one expert in one layer."""

    # Number of the expert; `"rest"` for all small experts, `"none"` for unserved
    # tokens.
    name: str
    bottom: float  # Lower end, in a column from 0 to 1
    height: float  # Share of the layer's tokens, scaled to leave room for gaps


class Ribbon(NamedTuple):
    """The tokens that move from one node to a node of the next layer."""

    layer: int  # The source's layer, and the numbers of both nodes
    source: int
    target: int
    start: float  # Lower ends at source and target
    stop: float
    height: float


class MainFlows(NamedTuple):
    """An alluvial diagram."""

    columns: list[list[Node]]  # Nodes of each layer, top to bottom
    ribbons: list[Ribbon]  # Ribbons, widest first
    shown: float  # Share of the tokens in these ribbons, averaged over steps


def main_flows(
    flows: Sequence[ArrayLike],
    max_experts: int = 24,
    min_share: float = 0.022,
    max_ribbons: int = _MAX_RIBBONS,
) -> MainFlows:
    """Lays out the largest flows of tokens through experts, with few crossings."""
    flows = [np.asarray(each, "float64") for each in flows]
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
    room = 1.0 - _GAP * (max(map(len, merged)) - 1)
    columns = [_placed(merged[0], shares[0] * room, np.arange(len(merged[0])))]
    for groups, share, step, above in zip(merged[1:], shares[1:], steps, merged):
        middles = {node.name: node.bottom + node.height / 2 for node in columns[-1]}
        middle = np.array([middles[name] for name, _ in above])
        heights = middle @ step / np.maximum(share, 1e-12)
        order = np.argsort(-heights, kind="stable")
        columns.append(_placed(groups, share * room, order))
    numbers = [{node.name: number for number, node in enumerate(c)} for c in columns]
    ribbons, shown, per_step = [], 0.0, max(max_ribbons // len(steps), 1)
    for layer, step in enumerate(steps):
        rows = [numbers[layer][name] for name, _ in merged[layer]]
        targets = [numbers[layer + 1][name] for name, _ in merged[layer + 1]]
        placed = np.zeros_like(step)
        placed[np.ix_(rows, targets)] = step * room
        new = list(_ribbons(layer, placed, columns[layer], columns[layer + 1]))
        new.sort(key=lambda ribbon: -ribbon.height)
        ribbons += new[:per_step]
        shown += sum(ribbon.height for ribbon in new[:per_step]) / room
    ribbons.sort(key=lambda ribbon: -ribbon.height)
    return MainFlows(columns, ribbons, shown / len(steps))


def _merged(total, max_experts, min_share):
    """Node names with their experts: the largest, the rest, and none."""
    experts, unserved = total[:-1], total[-1]
    large = np.argsort(-experts, kind="stable")[:max_experts]
    large = sorted(e for e in large if experts[e] >= min_share * max(total.sum(), 1.0))
    groups = [(str(expert), [expert]) for expert in large if experts[expert] > 0]
    small = [e for e in range(len(experts)) if e not in large]
    if experts[small].sum() > 0:
        # A single small expert keeps its number.
        alone = [e for e in small if experts[e] > 0]
        groups.append((str(alone[0]) if len(alone) == 1 else REST, small))
    if unserved > 0:
        groups.append((UNSERVED, [len(experts)]))
    return groups


def _matrix(groups, size):
    matrix = np.zeros((len(groups), size))
    for row, (_, experts) in enumerate(groups):
        matrix[row, experts] = 1.0
    return matrix


def _placed(groups, heights, order):
    nodes, top = [], 1.0
    # The rest and unserved tokens come last.
    for number in sorted(order, key=lambda node: groups[node][0] in (REST, UNSERVED)):
        height = float(heights[number])
        nodes.append(Node(groups[number][0], top - height, height))
        top -= height + _GAP
    return nodes


def _ribbons(layer, heights, sources, targets):
    """Yields ribbons; at each node they are stacked in order."""
    out = np.array([node.bottom + node.height for node in sources])
    into = np.array([node.bottom + node.height for node in targets])
    for source, target in zip(*np.nonzero(heights)):
        height = float(heights[source, target])
        out[source] -= height
        into[target] -= height
        ends = float(out[source]), float(into[target])
        yield Ribbon(layer, int(source), int(target), *ends, height)


def draw_flows(flows: MainFlows, names: list[str]) -> "matplotlib.figure.Figure":
    """Plots an alluvial diagram; each row of five layers repeats the last one above."""
    count = len(flows.columns)
    # Rows of equal length and scale.
    rows = max(-(-(count - 1) // (LAYERS_IN_A_ROW - 1)), 1)
    steps = max(-(-(count - 1) // rows), 1)
    starts = range(0, max(count - 1, 1), steps)
    # Room for the label of the smallest node.
    height = min(4.4, max(2.4, 0.23 * max(map(len, flows.columns))))
    figure = new_figure("none", figsize=(_WIDTH, (height + 0.35) * len(starts)))
    axes = figure.subplots(len(starts), 1, squeeze=False)[:, 0]
    figure.subplots_adjust(
        left=0.01,
        right=0.99,
        bottom=0.02 / len(starts),
        top=1 - 0.28 / (height + 0.35) / len(starts),
        hspace=0.4 / height,
    )
    # Labels are wider than bars.
    margin = 0.4 if steps > 2 else 0.25 if steps > 1 else 0.15
    bar = _BAR / (0.98 * _WIDTH) * (steps + 2 * margin)
    for axis, start in zip(axes, starts):
        layers = range(start, min(start + steps + 1, count))
        axis.set_axis_off()
        axis.set_ylim(-0.01, 1.01)
        axis.set_xlim(-margin, steps + margin)
        for column, layer in enumerate(layers[:-1]):
            for number, node in enumerate(flows.columns[layer]):
                source = (layer, number)
                own = [x for x in flows.ribbons if (x.layer, x.source) == source]
                _draw_ribbons(axis, own, column, bar, _colour(node.name))
        for column, layer in enumerate(layers):
            for node in flows.columns[layer]:
                _draw_node(axis, column, bar, node, 72 * height / 1.02)
            name, style = shortened(names[layer], 12), {"ha": "center", "va": "bottom"}
            axis.text(column, 1.03, name, fontsize=7, parse_math=False, **style)
    return figure


def _colour(name):
    """The colour of an expert; neighbours in number differ."""
    if name in (REST, UNSERVED):
        return GREY
    return EXPERT_COLOURS[int(name) % len(EXPERT_COLOURS)]


def _draw_node(axis, column, bar, node, points):
    """Draws a bar, labelled if it is high enough in points."""
    from matplotlib.patches import Rectangle

    colour, is_unserved = _colour(node.name), node.name == UNSERVED
    style = {"facecolor": colour, "linewidth": 0}
    if is_unserved:
        style = {"facecolor": "none", "linewidth": 0.8, "linestyle": ":"}
    corner = (column - bar / 2, node.bottom)
    axis.add_patch(Rectangle(corner, bar, node.height, edgecolor=colour, **style))
    is_word = node.name in (REST, UNSERVED)
    if node.height * points < (16 if is_word else 6.2):
        return
    axis.text(
        column,
        node.bottom + node.height / 2,
        node.name,
        ha="center",
        va="center" if is_word else "center_baseline",
        rotation=90 if is_word else 0,
        fontsize=6,
        color=colour if is_unserved else _INK[colour],
        fontweight="bold",
    )


def _draw_ribbons(axis, ribbons, column, bar, colour):
    """Draws a node's ribbons as one path, for a third of the bytes."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    left, right = column + bar / 2, column + 1 - bar / 2
    middle = (left + right) / 2
    points, codes = [], []
    for ribbon in ribbons:
        lower, upper = ribbon.start, ribbon.start + ribbon.height
        end_lower, end_upper = ribbon.stop, ribbon.stop + ribbon.height
        points += [(left, lower), (middle, lower), (middle, end_lower)]
        points += [(right, end_lower), (right, end_upper), (middle, end_upper)]
        points += [(middle, upper), (left, upper), (left, lower)]
        codes += [Path.MOVETO, *[Path.CURVE4] * 3, Path.LINETO, *[Path.CURVE4] * 3]
        codes.append(Path.CLOSEPOLY)
    if points:
        path = Path(points, codes)
        patch = PathPatch(path, facecolor=colour, alpha=0.45, linewidth=0)
        axis.add_patch(patch).set_clip_on(False)
