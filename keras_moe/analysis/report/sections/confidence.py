"""The confidence of routers by depth: the largest gate of each token.

Axes: B batch, N tokens, E experts.
"""

import numpy as np

from keras_moe.analysis.plots.report_depth import Line, draw_depth
from keras_moe.analysis.report.section import (
    Batch,
    Content,
    Figure,
    Options,
    Section,
    Subject,
    Verdict,
)
from keras_moe.analysis.report.sections.entropies import depths

# Bins of the histograms of largest gates, from which quartiles are read.
NUM_BINS = 200
# A router whose median gate is below this number of equal shares hardly chooses.
UNSURE = 1.2


class Confidence(Section):
    """The section on confidence."""

    title = "Confidence by depth"
    anchor = "confidence"
    intro = (
        "The largest gate of each token: 1 is a router that is sure of one expert. The "
        "line is the median token's, and the shade has the middle half of all tokens."
    )

    def __init__(self, subject: Subject, options: Options):
        super().__init__(subject, options)
        self._counts = {key: np.zeros(NUM_BINS, "int64") for key in subject.blocks}

    def update(self, batch: Batch) -> None:
        for key, block in self.subject.blocks.items():
            gates = batch.routing[key].gates[batch.mask_of(block)].max(axis=-1)
            places = np.clip((gates * NUM_BINS).astype(int), 0, NUM_BINS - 1)
            self._counts[key] += np.bincount(places, minlength=NUM_BINS)

    def finish(self) -> Content:
        quartiles = {
            key: quantiles(counts, (0.25, 0.5, 0.75))
            for key, counts in self._counts.items()
        }
        names, places = depths(self.subject)
        lines, verdicts = {}, []
        for colour, modality in enumerate(self.subject.modalities):
            keys = [k for k, x in self.subject.blocks.items() if x.modality == modality]
            if keys:
                low, middle, high = np.array([quartiles[key] for key in keys]).T
                lines[modality] = Line(
                    [places[key] for key in keys], middle, (low, high), colour
                )
        for key, block in self.subject.blocks.items():
            median = quartiles[key][1]
            if block.is_sparse and 1 < block.num_experts * median < UNSURE:
                verdicts.append(
                    Verdict(
                        "notice",
                        f"{key}: the router hardly chooses, since half of its tokens "
                        f"have a largest gate below {median:.3f}, where "
                        f"{1 / block.num_experts:.3f} is no choice at all.",
                    )
                )
        figure = Figure(
            draw_depth(lines, names, "largest gate of a token", top=1.0),
            "The median of tokens' largest gates by layer, with quartiles.",
            "How sure the router is of its first choice, by layer.",
            "confidence",
        )
        data = {
            key: dict(zip(("lower_quartile", "median", "upper_quartile"), values))
            for key, values in quartiles.items()
        }
        return Content([figure], data, verdicts)


def quantiles(counts: np.ndarray, parts: tuple[float, ...]) -> list[float]:
    """Quantiles of numbers in [0, 1] from their histogram."""
    total = counts.sum()
    if not total:
        return [0.0] * len(parts)
    edges = np.concatenate([[0], np.cumsum(counts)])
    results = []
    for part in parts:
        target = part * total
        place = int(np.searchsorted(edges, target, side="left")) - 1
        place = min(max(place, 0), len(counts) - 1)
        within = (target - edges[place]) / max(counts[place], 1)
        results.append(float((place + within) / len(counts)))
    return results
