"""The work of experts. Axes: B batch, N tokens, E experts, T tokens, U classes."""

from typing import Any

import numpy as np

from keras_moe.analysis.routing import DEAD, MAX_DEAD, MAX_SHARE, MIN_ENTROPY, entropy
from keras_moe.report import section
from keras_moe.report._figures import draw_class_map, draw_load_map, draw_loads
from keras_moe.report.model import Block

# Layers with separate figures, and with maps of classes.
MAX_LAYERS, MAX_CLASS_MAPS = 8, 6
# Classes in a figure.
MAX_DRAWN = 30
# Fractions of dropped choices that are a notice and a problem.
DROPS = (0.01, 0.1)


class LayerCounts:
    """The work of the experts in one routing record."""

    def __init__(self, block: Block):
        self.block = block
        self.tokens = self.unserved = self.broken = 0
        self.served, self.mass, self.demand = np.zeros((3, block.num_experts))
        self.by_class = np.zeros((section.MAX_CLASSES, block.num_experts))

    def update(self, batch):
        block, counts = self.block, batch.routed_of(self.block)
        record = batch.routing[block.key]
        served = record.dispatched[counts]
        self.tokens += len(served)
        self.broken += batch.num_broken(block)
        self.unserved += int((served.sum(axis=1) == 0).sum())
        self.served += served.sum(axis=0, dtype="float64")
        self.mass += record.combined[counts].sum(axis=0, dtype="float64")
        self.demand += demand(block, record, counts).sum(axis=0, dtype="float64")
        if batch.labels is not None:
            known = (batch.labels >= 0) & (batch.labels < section.MAX_CLASSES)
            work = record.dispatched if block.is_sparse else record.combined
            work = np.where(batch.mask_of(block)[..., None], work, 0.0).sum(axis=1)
            np.add.at(self.by_class, batch.labels[known], work[known])

    @classmethod
    def together(cls, name: str, parts: list["LayerCounts"]) -> "LayerCounts":
        """Adds up the counts of a layer shared by several modalities."""
        total = cls(parts[0].block._replace(key=name))
        for part in parts:
            for field in ("tokens", "unserved", "broken", "served", "mass", "demand"):
                setattr(total, field, getattr(total, field) + getattr(part, field))
        return total

    @property
    def work(self) -> np.ndarray:
        """(E,), tokens served, or total weights if experts serve all tokens."""
        return self.served if self.block.is_sparse else self.mass

    @property
    def shares(self) -> np.ndarray:
        """(E,), fractions of the work."""
        return self.work / max(self.work.sum(), 1e-12)

    @property
    def dropped(self) -> float:
        """Fraction of the tokens' choices that were not served."""
        return float(1.0 - self.served.sum() / max(self.demand.sum(), 1.0))

    @property
    def entropy(self) -> float:
        """Entropy of the shares over log E, without pruned experts; 1 is balanced."""
        number = int(self.block.is_present.sum())
        if number < 2:
            return 1.0
        return float(entropy(self.shares) / np.log(number))


def demand(block: Block, record: Any, counts: np.ndarray) -> np.ndarray:
    """The experts that tokens chose, (T, E) of 0 and 1, served or not."""
    served = record.dispatched[counts]
    if block.kind != "token_choice" or block.capacity_factor is None:
        return served
    affinity, is_present = record.affinity[counts], block.is_present
    if block.pruning not in (None, "router_pred_skip"):
        # Tokens choose the best of the remaining experts.
        affinity = np.where(is_present, affinity, -np.inf)
    # Each member of an ensemble chooses among its own experts.
    own = affinity.shape[-1] // block.members
    affinity = affinity.reshape(len(affinity), block.members, own)
    chosen = np.argsort(-affinity, axis=-1, kind="stable")
    chosen = chosen[..., : (block.num_selected_experts or 1) // block.members]
    result = np.zeros_like(affinity, served.dtype)
    np.put_along_axis(result, chosen, 1.0, axis=-1)
    result = result.reshape(served.shape)
    # Served choices count, in case a router chooses by another rule. A choice of a
    # pruned expert is lost, not dropped by a capacity.
    return np.maximum(np.where(is_present, result, 0.0), served)


class Loads(section.LayerSection):
    """The section on loads."""

    title = "Load of the experts"
    anchor = "loads"
    intro = (
        "The share of a layer's work that each expert does: of the tokens that it "
        "serves or, if all experts serve all tokens, of the weights in the outputs. "
        "The dashed line is an equal share."
    )
    head = (
        "layer",
        "entropy of loads",
        "largest share",
        "experts without work",
        "tokens no expert serves",
        "choices dropped",
    )

    def __init__(self, model, options):
        super().__init__(model, options)
        # One more than the largest label, and examples that have no such class.
        self._num_classes = self._uncounted = 0
        # Number of examples, and of those with non-finite outputs.
        self._outputs = np.zeros(2, "int64")

    def new_counts(self, block):
        return LayerCounts(block)

    def update(self, batch):
        super().update(batch)
        if batch.labels is None:
            self._uncounted += batch.size
        else:
            known = batch.labels[
                (batch.labels >= 0) & (batch.labels < section.MAX_CLASSES)
            ]
            self._num_classes = max(self._num_classes, known.max(initial=-1) + 1)
            self._uncounted += batch.size - len(known)
        if batch.outputs is not None:
            is_broken = ~np.isfinite(batch.outputs).all(axis=-1)
            self._outputs += [batch.size, is_broken.sum()]

    def count(self, counts, block, batch):
        counts.update(batch)

    def row(self, block, counts):
        unserved = dropped = None
        if block.is_sparse:
            unserved = f"{counts.unserved / max(counts.tokens, 1):.1%}"
        if block.kind == "token_choice":
            dropped = f"{counts.dropped:.1%}"
        return [
            block.key,
            f"{counts.entropy:.3f}",
            f"{counts.shares.max():.1%}",
            int(((counts.work == 0) & block.is_present).sum()),
            unserved,
            dropped,
        ]

    def finish(self):
        layers = self.model.by_layer()
        shown = section.evenly_spaced([*layers], MAX_LAYERS)
        body = self._maps(layers) if len(layers) > 1 else []
        body += [self._bars(name, layers[name]) for name in shown]
        body.append(
            f"Figures show {len(shown)} of {len(layers)} layers. A solid line is an "
            "expert's capacity. If inference limits it, hatched tokens are dropped; "
            "otherwise it is the capacity of training, and inference serves all tokens."
        )
        body.append(self.table("Balance by layer; an entropy of 1 is an equal load"))
        body += self._classes(shown)
        findings, (examples, broken) = [], self._outputs.tolist()
        if broken:
            text = f"The outputs of {broken:,} of {examples:,} examples are not finite."
            findings.append(section.Finding("problem", text))
        counts = [
            LayerCounts.together(name, [self.counts[x.key] for x in records.values()])
            for name, records in layers.items()
        ]
        data = {key: self._data(key) for key in self.blocks}
        return section.SectionContent(body, data, findings + health_findings(counts))

    def _maps(self, layers):
        """A map of all layers for each modality."""
        figures = []
        for modality in self.model.modalities:
            blocks = [x[modality] for x in layers.values() if modality in x]
            if not blocks:
                continue
            shares = [
                np.where(block.is_present, self.counts[block.key].shares, np.nan)
                for block in blocks
            ]
            drawing = draw_load_map(
                shares, [x.short_key for x in blocks], f"{modality} tokens"
            )
            alt = f"Map of the shares of {modality} tokens by layer and expert."
            caption = (
                f"All layers at once: the share of the {modality} tokens that each "
                "expert gets. Dark blue is an expert without work, yellow one with "
                "three times an equal share or more."
            )
            figures.append(
                section.Figure(drawing, alt, caption, f"load_map_{modality}")
            )
        return figures

    def _bars(self, name, records):
        counts = {k: self.counts[block.key] for k, block in records.items()}
        first = next(iter(counts.values()))
        block, capacity = first.block, self._capacity(records)
        if capacity is not None:
            capacity /= block.num_experts
        shares, dropped = {k: x.shares for k, x in counts.items()}, None
        if len(counts) == 1 and first.dropped > 0:
            total = max(first.demand.sum(), 1.0)
            shares = {next(iter(shares)): first.served / total}
            dropped = (first.demand - first.served) / total
        return section.Figure(
            draw_loads(shares, name, block.expert_types, dropped, capacity),
            f"Bars of the share of work of each of {block.num_experts} experts of "
            f"{name}: the largest is {max(x.max() for x in shares.values()):.0%}.",
            f"The work of each expert of {name}.",
            f"load_{section.file_name(name)}",
        )

    def _capacity(self, records):
        """The capacity factor of a layer, if it is the same for all experts."""
        block = next(iter(records.values()))
        # In MoE++ it differs by type, in pruned layers by method.
        same = len(records) == 1 and len({*block.expert_types}) == 1
        if block.kind != "token_choice" or not same:
            return None
        return block.capacity_factor or block.training_capacity_factor

    def _classes(self, shown):
        totals = next(iter(self.counts.values())).by_class.sum(axis=1)
        present = np.flatnonzero(totals)
        if len(present) < 2:
            return []
        # The most frequent classes, in order of their numbers.
        largest = np.argsort(-totals[present], kind="stable")[:MAX_DRAWN]
        chosen = np.sort(present[largest])
        names = [self.model.class_name(int(label)) for label in chosen]
        layers, body = self.model.by_layer(), []
        for name in section.evenly_spaced(shown, MAX_CLASS_MAPS):
            for key in (block.key for block in layers[name].values()):
                work = relative_work(self.counts[key].by_class[chosen])
                body.append(
                    section.Figure(
                        draw_class_map(work, names, key),
                        f"Map of the work of each expert of {key} by class.",
                        f"{key}: bright cells are experts that have specialised in a "
                        "class, and work for it more than for the average one.",
                        f"classes_{section.file_name(key)}",
                    )
                )
        if len(chosen) < len(present):
            body.append(
                f"Maps show the {len(chosen)} most frequent of {len(present)} classes."
            )
        if self._uncounted:
            body.append(section.uncounted_classes(self._uncounted))
        return body

    def _data(self, key):
        counts = self.counts[key]
        block, chooses = counts.block, counts.block.kind == "token_choice"
        data = {
            "tokens": counts.tokens,
            "tokens_not_finite": counts.broken,
            "shares": counts.shares.tolist(),
            "served": counts.served.tolist(),
            "mass": counts.mass.tolist(),
            "demand": counts.demand.tolist(),
            "entropy": counts.entropy,
            "unserved_tokens": counts.unserved if block.is_sparse else None,
            "dropped_choices": counts.dropped if chooses else None,
        }
        if self._num_classes:
            by_class = counts.by_class[: self._num_classes]
            data["by_class"] = np.round(by_class, 4).tolist()
        return data


def relative_work(table: np.ndarray) -> np.ndarray:
    """Work by class and expert, relative to the average class."""
    totals = table.sum(axis=1, keepdims=True)
    shares = table / np.where(totals > 0, totals, 1.0)
    means = shares.mean(axis=0)
    return np.where(means > 0, shares / np.where(means > 0, means, 1.0), np.nan)


def health_findings(layers: list[LayerCounts]) -> list[section.Finding]:
    """Findings on unhealthy layers, or a single good one."""
    findings = []
    for counts in layers:
        key = counts.block.key
        if counts.broken:
            text = (
                f"{key}: the gates of {counts.broken:,} of "
                f"{counts.broken + counts.tokens:,} tokens are not finite, and left "
                "out: look for NaN in the weights and the inputs."
            )
            findings.append(section.Finding("problem", text))
        if counts.tokens and counts.work.sum() > 0:
            findings += [*_load_findings(counts), *_drop_findings(counts)]
        elif counts.tokens:
            findings.append(
                section.Finding("problem", f"{key}: no expert serves a token.")
            )
        elif not counts.broken:
            findings.append(
                section.Finding("notice", f"{key}: the data has no token for it.")
            )
    findings.sort(key=lambda finding: finding.level != "problem")
    text = (
        "All experts of all layers work, and no layer has collapsed: the entropy of "
        f"loads is at least {min(counts.entropy for counts in layers):.2f} of 1."
    )
    return findings or [section.Finding("good", text)]


def _load_findings(counts):
    block, shares, work = counts.block, counts.shares, counts.work
    number = int(block.is_present.sum())
    idle = np.flatnonzero((work == 0) & block.is_present)
    # Experts with hardly any work.
    dead = np.flatnonzero((shares < DEAD / number) & (work > 0))
    level = "problem" if len(idle) + len(dead) > MAX_DEAD * number else "notice"
    for experts, what in (
        (idle, "without a token" if block.is_sparse else "without weight"),
        (dead, "with less than a hundredth of an equal share"),
    ):
        if len(experts):
            listed = ", ".join(map(str, experts[:8]))
            more = ", ..." if len(experts) > 8 else ""
            verb, noun = ("is", "expert") if len(experts) == 1 else ("are", "experts")
            yield section.Finding(
                level,
                f"{block.key}: {len(experts)} of {number} experts {verb} {what}: "
                f"{noun} {listed}{more}.",
            )
    largest = int(shares.argmax())
    is_large = number > 2 and shares[largest] > MAX_SHARE
    if is_large or (number > 1 and counts.entropy < MIN_ENTROPY):
        yield section.Finding(
            "problem",
            f"{block.key} has collapsed: expert {largest} does {shares[largest]:.0%} "
            f"of the work, and the entropy of loads is {counts.entropy:.2f} of 1. "
            "Train with a larger weight of the auxiliary losses that balance loads.",
        )


def _drop_findings(counts):
    key, kind = counts.block.key, counts.block.kind
    if kind == "token_choice" and counts.dropped > DROPS[0]:
        yield section.Finding(
            "problem" if counts.dropped > DROPS[1] else "notice",
            f"{key}: the capacity drops {counts.dropped:.1%} of the tokens' choices: "
            "raise its capacity factor at inference.",
        )
    unserved = counts.unserved / counts.tokens
    if kind == "expert_choice" and unserved > DROPS[1]:
        yield section.Finding(
            "notice",
            f"{key}: no expert takes {unserved:.1%} of the tokens: raise "
            "capacity_factor if these matter.",
        )
