"""Entropies of routing, of the gates and of what is dispatched, by depth.

Axes: B batch, N tokens, E experts, T tokens that count.
"""

from typing import NamedTuple

import numpy as np

from keras_moe.analysis.plots.report_depth import Line, draw_depth
from keras_moe.analysis.report.section import (
    Batch,
    Block,
    Content,
    Figure,
    Options,
    Section,
    Subject,
)
from keras_moe.analysis.routing import entropy


class Entropies(NamedTuple):
    """Entropies of one routing record, over log E.

    Attributes:
        local: mean over tokens of the entropy of a token's gates.
        global_: entropy of the mean of all tokens' gates.
        local_after: the first for the weights in the outputs, behind the dispatch.
        global_after: the second for the tokens that experts served.
    """

    local: float
    global_: float
    local_after: float
    global_after: float


class EntropySums:
    """The sums of a record from which its entropies follow."""

    def __init__(self, block: Block):
        self.block = block
        self._gates, self._served = np.zeros((2, block.num_experts))
        self._local = self._local_after = 0.0
        self._tokens = self._tokens_after = 0

    def add(self, gates: np.ndarray, combined: np.ndarray, served: np.ndarray) -> None:
        """Adds tokens."""
        shares, _ = _normalised(gates)
        self._tokens += len(shares)
        self._local += float(entropy(shares).sum())
        self._gates += shares.sum(axis=0)
        after, kept = _normalised(combined)
        self._tokens_after += int(kept.sum())
        self._local_after += float(entropy(after[kept]).sum())
        self._served += np.asarray(served, "float64").sum(axis=0)

    def entropies(self) -> Entropies:
        """The entropies of all tokens so far."""
        scale = float(np.log(max(self.block.num_experts, 2)))
        totals = [_normalised(x[None])[0] for x in (self._gates, self._served)]
        before, after = (float(entropy(x)[0]) for x in totals)
        return Entropies(
            self._local / max(self._tokens, 1) / scale,
            before / scale,
            self._local_after / max(self._tokens_after, 1) / scale,
            after / scale,
        )


class RoutingEntropies(Section):
    """The section on entropies."""

    title = "Entropies before and after the dispatch"
    anchor = "entropies"
    intro = (
        "The entropy of one token's gates is low where the router is sure; the entropy "
        "of the mean over all tokens is high where all experts are used. Both are "
        "parts of the largest possible one: 0 is one expert, 1 is all experts alike. "
        "Before the dispatch they are the router's wish, after it what experts did."
    )

    def __init__(self, subject: Subject, options: Options):
        super().__init__(subject, options)
        self._sums = {key: EntropySums(block) for key, block in subject.blocks.items()}

    def update(self, batch: Batch) -> None:
        for key, sums in self._sums.items():
            record, counts = batch.routing[key], batch.mask_of(sums.block)
            done = record.dispatched if sums.block.is_sparse else record.combined
            sums.add(record.gates[counts], record.combined[counts], done[counts])

    def finish(self) -> Content:
        entropies = {key: sums.entropies() for key, sums in self._sums.items()}
        names, places = depths(self.subject)
        figures = []
        for fields, label, name, caption in (
            (
                ("local", "local_after"),
                "entropy of a token",
                "local",
                "Each token: how many experts share it, on average. Low is decided.",
            ),
            (
                ("global_", "global_after"),
                "entropy of all tokens",
                "global",
                "All tokens together: how evenly they use experts. Low is collapse.",
            ),
        ):
            lines = {}
            for colour, modality in enumerate(self.subject.modalities):
                keys = [
                    k for k, x in self.subject.blocks.items() if x.modality == modality
                ]
                for style, (field, when) in enumerate(zip(fields, ("before", "after"))):
                    several = len(self.subject.modalities) > 1
                    line = f"{modality}, {when}" if several else when
                    values = [getattr(entropies[key], field) for key in keys]
                    if keys:
                        lines[line] = Line(
                            [places[key] for key in keys],
                            values,
                            colour=2 * colour + style if not several else colour,
                            style=style,
                        )
            figures.append(
                Figure(
                    draw_depth(lines, names, label, top=1.0),
                    f"{label.capitalize()} by layer, before and after the dispatch.",
                    caption,
                    f"entropy_{name}",
                )
            )
        data = {
            key: {k.strip("_"): v for k, v in x._asdict().items()}
            for key, x in entropies.items()
        }
        return Content(figures, data)


def depths(subject: Subject) -> tuple[list[str], dict[str, int]]:
    """The places of records by depth, shared by towers of two modalities."""
    short = {k: k.removeprefix(f"{x.modality}/") for k, x in subject.blocks.items()}
    # By the numbers of blocks, since one tower may have fewer than the other.
    order = {name: place for place, name in enumerate(dict.fromkeys(short.values()))}
    names = sorted(order, key=lambda name: (_number(name, len(order)), order[name]))
    return names, {key: names.index(name) for key, name in short.items()}


def _number(name, last):
    digits = "".join(filter(str.isdigit, name))
    return int(digits) if digits else 10**6 + last


def _normalised(rows):
    """Rows of sum 1, and which rows had a positive one."""
    rows = np.maximum(np.asarray(rows, "float64"), 0.0)
    sums = rows.sum(axis=-1, keepdims=True)
    return rows / np.where(sums > 0, sums, 1.0), sums[..., 0] > 0
