"""The ways of tokens through the experts of successive layers."""

import itertools

import numpy as np

from keras_moe.analysis.main_flows import main_flows
from keras_moe.analysis.plots.report_flows import draw_flows
from keras_moe.analysis.report.section import (
    Batch,
    Content,
    Figure,
    Section,
    Subject,
    Table,
)
from keras_moe.analysis.tokens import flow_statistics, token_flows

_MAX_RIBBONS = 300
_DEEP = 6


class Trajectories(Section):
    """The section on trajectories; see `keras_moe.analysis.report.section.Section`."""

    title = "Trajectories of tokens"
    anchor = "trajectories"
    intro = (
        "Each bar is an expert, as high as its share of the tokens, and each ribbon "
        "the tokens that go from it to an expert of the next layer. Broad ribbons that "
        "stay together are ways that many tokens take."
    )

    def __init__(self, subject, options):
        super().__init__(subject, options)
        self.ways = _ways(subject)
        self.flows = {
            modality: [0] * (len(blocks) - 1) for modality, blocks in self.ways.items()
        }

    @classmethod
    def fits(cls, subject: Subject) -> bool:
        return bool(_ways(subject))

    def update(self, batch: Batch) -> None:
        for modality, blocks in self.ways.items():
            records = [batch.routing[block.key] for block in blocks]
            masks = [batch.mask_of(block) for block in blocks]
            flows = self.flows[modality]
            for step, (source, target) in enumerate(itertools.pairwise(records)):
                mask = masks[step] & masks[step + 1]
                flows[step] = flows[step] + token_flows(source, target, mask)

    def finish(self) -> Content:
        figures, rows, data = [], [], {}
        for modality, blocks in self.ways.items():
            flows = self.flows[modality]
            if not np.sum(flows[0]):
                continue
            names = [block.key.removeprefix(f"{modality}/") for block in blocks]
            figures.append(self._figure(modality, names, flows))
            steps = []
            for source, target, counts in zip(names, names[1:], flows):
                statistics = flow_statistics(counts)
                steps.append(
                    {
                        "source": source,
                        "target": target,
                        "tokens": counts.tolist(),
                        **statistics._asdict(),
                    }
                )
                rows.append(
                    [
                        modality,
                        f"{source} to {target}",
                        f"{statistics.information:.0%}",
                        f"{statistics.kept_company:.0%}",
                        f"{statistics.company_by_chance:.0%}",
                    ]
                )
            data[modality] = steps
        if not figures:
            return Content(["The data has no tokens that count."], {})
        head = [
            "tokens",
            "layers",
            "known from the expert before",
            "tokens that stay together",
            "by chance",
        ]
        caption = (
            "How far an expert determines the next one: the share of the uncertainty "
            "about the next expert that it takes away, and how often two tokens of "
            "one expert meet again in the next layer, against any two tokens"
        )
        return Content([*figures, Table(head, rows, caption)], data)

    def _figure(self, modality, names, flows):
        picture = main_flows(
            flows,
            max_experts=24 if len(names) <= _DEEP else 16,
            max_ribbons=_MAX_RIBBONS // len(self.ways),
        )
        parts = [
            f"Experts of {modality} tokens; a token is at the expert with "
            "the largest weight in its output.",
        ]
        if any(node.name == "rest" for column in picture.columns for node in column):
            parts.append("Small experts are together in “rest”.")
        if any(node.name == "none" for column in picture.columns for node in column):
            parts.append("Tokens that no expert serves are in “none” (dotted).")
        if picture.shown < 0.9995:
            parts.append(
                f"Ribbons carry {picture.shown:.0%} of the tokens' steps; smaller ones "
                "are left out."
            )
        alt = (
            f"Flows of {modality} tokens between the experts of {', '.join(names)}. "
            + _largest(picture, names)
        )
        drawing = draw_flows(picture, names)
        return Figure(drawing, alt, " ".join(parts), f"trajectories_{modality}")


def _ways(subject):
    """The blocks of each modality that has two or more whose tokens take experts."""
    ways = {}
    for block in subject.blocks.values():
        if block.is_sparse:
            ways.setdefault(block.modality, []).append(block)
    return {modality: blocks for modality, blocks in ways.items() if len(blocks) > 1}


def _largest(picture, names):
    if not picture.ribbons:
        return ""
    first = picture.ribbons[0]
    source = picture.columns[first.layer][first.source].name
    target = picture.columns[first.layer + 1][first.target].name
    return (
        f"The broadest goes from {source} in {names[first.layer]} to {target} in "
        f"{names[first.layer + 1]}."
    )
