"""Costs and routers by depth. Axes: B batch, N tokens, E experts, T counted tokens."""

import contextlib
import re

import numpy as np

from keras_moe.analysis.routing import entropy
from keras_moe.report import section
from keras_moe.report._figures import Line, draw_depth
from keras_moe.report.model import ReportedModel

KINDS = {
    "token_choice": "tokens choose experts",
    "expert_choice": "experts choose tokens",
    "soft": "experts take mixtures of tokens",
    "mumoe": "muMoE: all experts, weighted",
}
# Bins of the histograms from which quartiles of largest gates are read.
NUM_BINS = 200
# A router hardly chooses if its median gate is below this times 1 / E.
UNSURE = 1.2


class Overview(section.Section):
    """The section on the model itself."""

    title = "The model"
    anchor = "model"
    intro = (
        "Which layers have experts, how tokens reach them, and what the parts of the "
        "model cost. Active parameters are those that one token uses; FLOPs count the "
        "multiplications and additions of matrix products."
    )

    def finish(self):
        body = [self._layers()]
        layers = [block._asdict() for block in self.model.blocks.values()]
        data: dict[str, object] = {"layers": layers}
        findings = []
        # Custom model families may have no costs.
        with contextlib.suppress(AttributeError, NotImplementedError, ValueError):
            description = self.model.keras_model.describe()
            body.append(_costs(description))
            data["costs"] = description.to_dict()
            data["training_batch_size"] = size = self.options.training_batch_size
            if text := description.routing_text(size):
                body.append(text)
            findings = [section.Finding(*each) for each in description.findings()]
        return section.SectionContent(body, data, findings)

    def _layers(self):
        rows = []
        for name, records in self.model.by_layer().items():
            block = next(iter(records.values()))
            experts = str(block.num_experts)
            if types := [x for x in dict.fromkeys(block.expert_types) if x != "ffn"]:
                counts = [f"{block.expert_types.count(x)} {x}" for x in types]
                experts += f" ({', '.join(counts)})"
            inference = None
            if block.kind == "token_choice":
                inference = block.capacity_factor or "all tokens are served"
            rows.append(
                [
                    name,
                    " and ".join(records),
                    KINDS[block.kind],
                    experts,
                    block.num_selected_experts,
                    block.training_capacity_factor,
                    inference,
                ]
            )
        head = ["layer", "tokens of", "routing", "experts", "per token"]
        head += ["capacity factor", "at inference"]
        return section.Table(head, rows, "Layers with experts")


def _costs(description):
    """The table of costs; consecutive parts with equal costs share a row."""
    groups = []
    for part in description.parts:
        stem = re.sub(r"\d+", "#", part.name)
        if groups and groups[-1][0] == (stem, *part[1:]):
            groups[-1][1].append(part)
        else:
            groups.append(((stem, *part[1:]), [part]))
    rows = []
    for _, parts in groups:
        first, count = parts[0], len(parts)
        name = first.name if count == 1 else f"{first.name} to {parts[-1].name}"
        numbers = (count * first.parameters, count * first.active_parameters)
        rows.append([name, first.kind, *numbers, f"{count * first.flops / 1e9:,.6f}"])
    numbers = (description.parameters, description.active_parameters)
    rows.append(["all", None, *numbers, f"{description.gflops:,.6f}"])
    unit = f"GFLOPs per {description.example}"
    head = ["part", "kind", "parameters", "active", unit]
    return section.Table(head, rows, f"Costs, with {description.num_tokens} tokens")


class EntropySums:
    """Accumulates the entropies of a record."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self._gates, self._served = np.zeros((2, num_experts))
        self._local = self._local_after = 0.0
        self._tokens = self._tokens_after = 0

    def add(self, gates: np.ndarray, combined: np.ndarray, served: np.ndarray) -> None:
        shares, _ = _normalised(gates)
        self._tokens += len(shares)
        self._local += float(entropy(shares).sum())
        self._gates += shares.sum(axis=0)
        after, kept = _normalised(combined)
        self._tokens_after += int(kept.sum())
        self._local_after += float(entropy(after[kept]).sum())
        self._served += np.asarray(served, "float64").sum(axis=0)

    def entropies(self) -> dict[str, float]:
        """Returns entropies over log E: means of tokens, and of all tokens together."""
        totals = [_normalised(x[None])[0] for x in (self._gates, self._served)]
        before, after = (float(entropy(x)[0]) for x in totals)
        entropies = {
            "local": self._local / max(self._tokens, 1),
            "global": before,
            "local_after": self._local_after / max(self._tokens_after, 1),
            "global_after": after,
        }
        scale = float(np.log(max(self.num_experts, 2)))
        return {name: value / scale for name, value in entropies.items()}


def _normalised(rows):
    """Normalises rows to sum 1; also returns which had a positive sum."""
    rows = np.maximum(np.asarray(rows, "float64"), 0.0)
    sums = rows.sum(axis=-1, keepdims=True)
    return rows / np.where(sums > 0, sums, 1.0), sums[..., 0] > 0


class RoutingEntropies(section.LayerSection):
    """The section on entropies."""

    title = "Entropies before and after the dispatch"
    anchor = "entropies"
    intro = (
        "The entropy of one token's gates is low if the router is sure; the entropy of "
        "the mean over all tokens is high if all experts are used. Both are fractions "
        "of the largest possible one: 0 is one expert, 1 is all experts alike. Before "
        "the dispatch they show what the router wants, after it what experts did."
    )

    def new_counts(self, block):
        return EntropySums(block.num_experts)

    def count(self, counts, block, batch):
        record, mask = batch.routing[block.key], batch.mask_of(block)
        done = record.dispatched if block.is_sparse else record.combined
        counts.add(record.gates[mask], record.combined[mask], done[mask])

    def finish(self):
        entropies = {key: sums.entropies() for key, sums in self.counts.items()}
        token = "Each token: how many experts share it, on average. Low is decided."
        every = "All tokens together: how evenly they use experts. Low is collapse."
        figures = [
            self._figure(entropies, "local", "entropy of a token", token),
            self._figure(entropies, "global", "entropy of all tokens", every),
        ]
        return section.SectionContent(figures, entropies)

    def _figure(self, entropies, field, label, caption):
        names, layers = depths(self.model)
        lines = {}
        for number, modality in enumerate(self.model.modalities):
            keys = [k for k, x in self.blocks.items() if x.modality == modality]
            whens = (("before", field), ("after", f"{field}_after"))
            for style, (when, name) in enumerate(whens if keys else ()):
                depth = [layers[key] for key in keys]
                values = [entropies[key][name] for key in keys]
                colour = 2 * number + style
                lines[f"{modality}, {when}"] = Line(depth, values, None, colour, style)
        drawing = draw_depth(lines, names, label)
        alt = f"{label.capitalize()} by layer, before and after the dispatch."
        return section.Figure(drawing, alt, caption, f"entropy_{field}")


def depths(model: ReportedModel) -> tuple[list[str], dict[str, int]]:
    """Layer names by depth, which towers share, and the depth of each record."""
    short = {key: block.short_key for key, block in model.blocks.items()}
    names = list(dict.fromkeys(short.values()))
    names.sort(key=lambda name: int(re.sub(r"\D", "", name) or 10**6))
    return names, {key: names.index(name) for key, name in short.items()}


class Confidence(section.LayerSection):
    """The section on confidence."""

    title = "Confidence by depth"
    anchor = "confidence"
    intro = (
        "The largest gate of each token: 1 is a router that is sure of one expert. The "
        "line is the median token's, and the shade has the middle half of all tokens."
    )

    def new_counts(self, block):
        return np.zeros(NUM_BINS, "int64")

    def count(self, counts, block, batch):
        gates = batch.routing[block.key].gates[batch.mask_of(block)].max(axis=-1)
        bins = np.clip((gates * NUM_BINS).astype(int), 0, NUM_BINS - 1)
        counts += np.bincount(bins, minlength=NUM_BINS)

    def finish(self):
        quartiles = {
            key: quantiles(counts, (0.25, 0.5, 0.75))
            for key, counts in self.counts.items()
        }
        names, layers = depths(self.model)
        lines = {}
        for colour, modality in enumerate(self.model.modalities):
            keys = [k for k, x in self.blocks.items() if x.modality == modality]
            if keys:
                low, middle, high = np.array([quartiles[key] for key in keys]).T
                own = [layers[key] for key in keys]
                lines[modality] = Line(own, middle, (low, high), colour)
        figure = section.Figure(
            draw_depth(lines, names, "largest gate of a token"),
            "The median of tokens' largest gates by layer, with quartiles.",
            "How sure the router is of its first choice, by layer.",
            "confidence",
        )
        findings = []
        for key, block in self.blocks.items():
            median = quartiles[key][1]
            if block.is_sparse and 1 < block.num_experts * median < UNSURE:
                text = (
                    f"{key}: the router hardly chooses. The median of the largest gate "
                    f"is {median:.3f}, and equal gates would be "
                    f"{1 / block.num_experts:.3f}: train longer, or lower the weight "
                    "of its auxiliary losses."
                )
                findings.append(section.Finding("notice", text))
        fields = ("lower_quartile", "median", "upper_quartile")
        data = {key: dict(zip(fields, values)) for key, values in quartiles.items()}
        return section.SectionContent([figure], data, findings)


def quantiles(counts: np.ndarray, parts: tuple[float, ...]) -> list[float]:
    """Quantiles of values in [0, 1] from their histogram."""
    total = counts.sum()
    if not total:
        return [0.0] * len(parts)
    edges = np.concatenate([[0], np.cumsum(counts)])
    results = []
    for part in parts:
        target = part * total
        index = int(np.searchsorted(edges, target, side="left")) - 1
        index = min(max(index, 0), len(counts) - 1)
        within = (target - edges[index]) / max(counts[index], 1)
        results.append(float((index + within) / len(counts)))
    return results
