"""Tokens before and behind the cut of the experts' capacity.

Axes: B batch, N tokens, E experts, T kinds of tokens, Q places of a queue.
"""

import numpy as np

from keras_moe.analysis.evenly_spaced import evenly_spaced
from keras_moe.analysis.plots.report_queues import (
    MAX_PANELS,
    draw_modalities,
    draw_places,
    draw_priorities,
    draw_queues,
)
from keras_moe.analysis.report.queues import (
    Groups,
    approximations,
    queues_of_layers,
)
from keras_moe.analysis.report.section import (
    Batch,
    Content,
    Figure,
    Section,
    Subject,
    Table,
    Verdict,
)
from keras_moe.analysis.routing import served_at

# Behind three capacities all places are one.
_EDGES = np.linspace(0.0, 3.0, 25)
_GATES = np.linspace(0.0, 1.0, 21)
_PATCH, _CLASS, _TEXT = "image patches", "class token", "text tokens"
_MANY_DROPS = 0.1


class _Counts:
    """The counts of one layer."""

    def __init__(self, num_experts, places):
        self.queues = np.zeros((3, len(_EDGES) - 1), "int64")
        # By kind of token: choices, those behind the cut, tokens, dropped tokens.
        self.totals = np.zeros((3, 4), "int64")
        # Rows of gates' ranges: served and dropped.
        self.gates = np.zeros((2, len(_GATES) - 1), "int64")
        self.gate_sums = np.zeros((3, 2))
        # By expert: choices, and those behind the cut.
        self.experts = np.zeros((2, num_experts), "int64")
        # By place in images: tokens, and dropped ones.
        self.places = np.zeros((2, places), "int64")
        # By modality and expert: choices, and those behind the cut.
        self.modalities = {}
        # By expert: the capacities of all groups together.
        self.room = np.zeros(num_experts, "int64")


class Priorities(Section):
    """The section on priorities; see `keras_moe.analysis.report.section.Section`."""

    title = "Priorities and the capacity cut"
    anchor = "priorities"
    intro = (
        "While training, an expert serves its queue up to its capacity and drops the "
        "choices behind the cut. Here all tokens of the data queue as they do in "
        "training; the report's own routing drops none unless the model does."
    )

    def __init__(self, subject, options):
        super().__init__(subject, options)
        self.layers = queues_of_layers(subject, ("token_choice",))
        self.groups = Groups(self.layers)
        grid = subject.grid or (0, 0)
        self.num_places = grid[0] * grid[1]
        self.counts = [
            _Counts(layer.num_experts, self.num_places) for layer in self.layers
        ]

    @classmethod
    def fits(cls, subject: Subject) -> bool:
        return any(block.kind == "token_choice" for block in subject.blocks.values())

    def update(self, batch: Batch) -> None:
        pass

    def update_queues(self, batch: Batch) -> None:
        for layer, counts in zip(self.layers, self.counts):
            queues = layer.read(batch)
            self.groups.add(layer, queues)
            capacities = layer.capacities(queues.group_tokens)
            self._count(counts, queues, capacities)

    def _count(self, counts, queues, capacities):
        chosen = queues.places >= 0
        served = served_at(queues.places, capacities)
        behind = chosen & ~served
        dropped = ~served.any(axis=-1)
        # The middle of a place: the last before the cut is before the line.
        bins = np.searchsorted(
            _EDGES, (queues.places + 0.5) / np.maximum(capacities, 1e-9), side="right"
        )
        bins = np.clip(bins - 1, 0, len(_EDGES) - 2)
        counts.experts += np.stack([x.sum(axis=(0, 1)) for x in (chosen, behind)])
        counts.room += capacities * (len(queues.places) // queues.group_size)
        for modality, run in queues.runs.items():
            own = np.stack([x[:, run].sum(axis=(0, 1)) for x in (chosen, behind)])
            counts.modalities[modality] = counts.modalities.get(modality, 0) + own
        for kind, run in self._runs(queues):
            counted = queues.counts[:, run]
            if not counted.any():
                continue
            own, own_dropped = chosen[:, run][counted], dropped[:, run][counted]
            counts.queues[kind] += np.bincount(
                bins[:, run][counted][own], minlength=len(_EDGES) - 1
            )
            counts.totals[kind] += [
                own.sum(),
                behind[:, run][counted].sum(),
                counted.sum(),
                own_dropped.sum(),
            ]
            gates = queues.gates[:, run][counted]
            for row, part in enumerate((~own_dropped, own_dropped)):
                counts.gates[row] += np.histogram(gates[part], _GATES)[0]
                counts.gate_sums[kind, row] += gates[part].sum()
        if self.num_places and "image" in queues.runs:
            run = queues.runs["image"]
            patches, images = (
                x[:, run][:, -self.num_places :] for x in (queues.counts, dropped)
            )
            counts.places += [patches.sum(axis=0), (images & patches).sum(axis=0)]

    def _runs(self, queues):
        """Pairs of a kind of token and its place among the tokens."""
        for modality, run in queues.runs.items():
            if modality != "image":
                yield 2, run
                continue
            # Without a grid, tokens have no class token that could be known.
            first = max(run.stop - run.start - self.num_places, 0)
            first = first if self.num_places else 0
            yield 0, slice(run.start + first, run.stop)
            if first:
                yield 1, slice(run.start, run.start + first)

    def finish(self) -> Content:
        names = [layer.name for layer in self.layers]
        totals = np.array([counts.totals for counts in self.counts])
        present = np.flatnonzero(totals[..., 2].sum(axis=0))
        if not len(present):
            return Content(["The data has no tokens that count."], {"layers": []})
        kinds = [(_PATCH, _CLASS, _TEXT)[kind] for kind in present]
        body = [*self.groups.paragraphs(), *approximations(self.layers)]
        body += self._figures(names, present, kinds)
        rows, data, verdicts = [], [], []
        for layer, counts in zip(self.layers, self.counts):
            choices, behind, tokens, dropped = counts.totals.sum(axis=0)
            data.append(_data(layer, counts, present, kinds))
            for kind, name in zip(present, kinds):
                rows.append(_row(layer.name, name, counts, kind))
            share = behind / max(choices, 1)
            if share > _MANY_DROPS:
                text = (
                    f"{layer.name}: {share:.0%} of the tokens' choices are behind the "
                    f"cut of training; {dropped / max(tokens, 1):.0%} of the tokens "
                    "would get no expert there."
                )
                verdicts.append(Verdict("notice", text))
        if not verdicts:
            worst = max(
                c.totals[:, 1].sum() / max(c.totals[:, 0].sum(), 1) for c in self.counts
            )
            text = (
                "Capacity of training: at most "
                f"{worst:.1%} of the tokens' choices in a layer are behind the cut."
            )
            verdicts.append(Verdict("good", text))
        head = [
            "layer",
            "tokens",
            "choices behind the cut",
            "tokens without an expert",
            "mean gate, served",
            "mean gate, dropped",
        ]
        table = Table(head, rows, "Choices of tokens at the capacity of training")
        return Content([*body, table], {"layers": data}, verdicts)

    def _figures(self, names, present, kinds):
        layers = evenly_spaced(len(names), MAX_PANELS)
        left_out = ""
        if len(layers) < len(names):
            left_out = (
                f" {len(layers)} of {len(names)} layers are drawn; the table has all."
            )
        factors = {layer.capacity_factor for layer in self.layers}
        known = factors - {None}
        words = (
            f"capacity factor {known.pop():g}"
            if len(factors) == 1 and known
            else "capacity"
        )
        figures = [
            Figure(
                draw_queues(
                    [counts.queues[present] for counts in self.counts],
                    _EDGES,
                    names,
                    kinds,
                    words,
                ),
                "Histograms of the places of tokens in the queues before the experts, "
                f"by layer, for {', '.join(kinds)}; the table below has their shares.",
                "Who stands where: the front of the queue is left, and what is right "
                "of the line is dropped in training. The last bar has all further "
                f"places.{left_out}",
                "priorities_queues",
            ),
            Figure(
                draw_priorities(
                    [counts.gates[0] for counts in self.counts],
                    [counts.gates[1] for counts in self.counts],
                    _GATES,
                    names,
                ),
                "Histograms of the largest gate of served and of dropped tokens, by "
                "layer; the table below has their means.",
                "How sure the router is of the tokens that it serves and drops. Batch "
                f"priority routing drops those with small gates.{left_out}",
                "priorities_gates",
            ),
        ]
        shared = [x for x in range(len(names)) if len(self.counts[x].modalities) > 1]
        if shared:
            drawn = [shared[x] for x in evenly_spaced(len(shared), MAX_PANELS)]
            counts = [self.counts[layer] for layer in drawn]
            figures.append(
                Figure(
                    draw_modalities(
                        [c.modalities for c in counts],
                        [c.room for c in counts],
                        [names[layer] for layer in drawn],
                    ),
                    "Stacked bars of the tokens of each modality that choose each "
                    "expert, by layer, with those that it drops in pale colours, and "
                    "lines at the experts' capacities.",
                    "Who chooses each expert, and whom it drops (pale) at the capacity "
                    "of training (line).",
                    "priorities_modalities",
                )
            )
        shares = [c.places[1] / np.maximum(c.places[0], 1) for c in self.counts]
        if self.num_places and np.any(shares):
            grids = [share.reshape(self.subject.grid) for share in shares]
            figures.append(
                Figure(
                    draw_places(grids, names),
                    "Maps of the share of images whose patch at a place gets no "
                    "expert, by layer.",
                    "Where in images patches get no expert at the capacity of "
                    f"training.{left_out}",
                    "priorities_places",
                )
            )
        return figures


def _row(layer, name, counts, kind):
    choices, behind, tokens, dropped = counts.totals[kind].tolist()
    means = [
        f"{total / count:.2f}" if count else None
        for total, count in zip(counts.gate_sums[kind], (tokens - dropped, dropped))
    ]
    return [
        layer,
        name,
        f"{behind / max(choices, 1):.1%}",
        f"{dropped / max(tokens, 1):.1%}",
        *means,
    ]


def _data(layer, counts, present, kinds):
    choices, behind = counts.experts
    return {
        "layer": layer.name,
        "capacity_factor": layer.capacity_factor,
        "edges": _EDGES.tolist(),
        "queues": {
            name: counts.queues[kind].tolist() for kind, name in zip(present, kinds)
        },
        "behind_by_expert": (behind / np.maximum(choices, 1)).tolist(),
        "capacity": counts.room.tolist(),
        "by_modality": {
            modality: dict(zip(("choices", "behind"), own.tolist()))
            for modality, own in counts.modalities.items()
        },
        "gate_edges": _GATES.tolist(),
        "gates_served": counts.gates[0].tolist(),
        "gates_dropped": counts.gates[1].tolist(),
    }
