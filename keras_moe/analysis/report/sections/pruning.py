"""Which experts could go: how much of the work the others do.

Axes: E experts.
"""

import numpy as np

from keras_moe.analysis.plots import plot_coverage
from keras_moe.analysis.pruning import coverage_curves
from keras_moe.analysis.report.counts import LayerCounts
from keras_moe.analysis.report.section import (
    Batch,
    Content,
    Figure,
    Options,
    Section,
    Subject,
    Table,
)
from keras_moe.analysis.usage import ALL, BlockUsage, ExpertUsage

# Parts of the work for which experts are listed.
COVERED = (0.9, 0.95, 0.99)


class Pruning(Section):
    """The section on experts that could go."""

    title = "Experts that could go"
    anchor = "pruning"
    intro = (
        "Experts are taken away from the least used one on; the curve is the share of "
        "the tokens that the others serve, for a model of one modality where there are "
        "two. keras_moe.analysis.prune_experts makes the "
        "smaller model, and its figures need to be measured again."
    )

    def __init__(self, subject: Subject, options: Options):
        super().__init__(subject, options)
        self._counts = {
            key: LayerCounts(x) for key, x in subject.blocks.items() if x.is_sparse
        }

    @classmethod
    def fits(cls, subject: Subject) -> bool:
        return any(block.is_sparse for block in subject.blocks.values())

    def update(self, batch: Batch) -> None:
        for counts in self._counts.values():
            counts.update(batch)

    def finish(self) -> Content:
        curves, keys = {}, {}
        for key, counts in self._counts.items():
            if counts.served.sum():
                group = counts.block.modality
                name = key.removeprefix(f"{group}/")
                curves.setdefault(group, {})[name] = _curve(counts)
                keys[group, name] = key
        if not curves:
            return Content(["No expert serves a token of this data."], {})
        head = ["layer", "experts", *(f"needed for {x:.0%}" for x in COVERED)]
        head.append(f"could go at {COVERED[-1]:.0%}")
        rows, data = [], {}
        for group, by_name in curves.items():
            for name, curve in by_name.items():
                numbers = [_needed(curve, share) for share in COVERED]
                is_present = self._counts[keys[group, name]].block.is_present
                least = [e for e in curve.experts[numbers[-1] :] if is_present[e]]
                label = f"{group}: {name}" if len(curves) > 1 else name
                gone = ", ".join(map(str, sorted(least))) or "none"
                rows.append([label, int(is_present.sum()), *numbers, gone])
                data[f"{group}/{name}"] = curve.to_dict()
        figures = [
            Figure(
                plot_coverage({group: by_name}, title=""),
                f"Share of the {group} tokens that are served, by the number of pruned "
                "experts.",
                f"{group.capitalize()} tokens. A curve that stays high has experts "
                "that could go.",
                f"coverage_{group}",
            )
            for group, by_name in curves.items()
        ]
        return Content([*figures, Table(head, rows, "Experts that are needed")], data)


def _curve(counts):
    usage = BlockUsage(counts.served[None], counts.mass[None])
    return coverage_curves(ExpertUsage([ALL], {"block": usage}))["block"]


def _needed(curve, share):
    # A sum of shares may miss the share by its rounding.
    return int(np.argmax(curve.covered >= share - 1e-12)) + 1
