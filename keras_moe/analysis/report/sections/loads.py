"""The load of each expert: by layer, modality and class, with capacity and drops.

Axes: B batch, N tokens, E experts, U classes.
"""

import numpy as np

from keras_moe.analysis.evenly_spaced import evenly_spaced
from keras_moe.analysis.plots.report_loads import (
    draw_class_map,
    draw_load_map,
    draw_loads,
)
from keras_moe.analysis.report.counts import (
    MAX_CLASSES,
    LayerCounts,
    rows_of_classes,
)
from keras_moe.analysis.report.health import health_verdicts
from keras_moe.analysis.report.section import (
    Batch,
    Content,
    Figure,
    Options,
    Section,
    Subject,
    Table,
    Verdict,
    file_name,
)

# Layers of a deep model with pictures of their own, and with maps of classes.
MAX_LAYERS, MAX_CLASS_MAPS = 8, 6
# Classes that are drawn.
MAX_DRAWN = 30


class Loads(Section):
    """The section on loads."""

    title = "Load of the experts"
    anchor = "loads"
    intro = (
        "The share of a layer's work that each expert does: of the tokens that it "
        "serves or, where all experts serve all tokens, of the weights in the outputs. "
        "The dashed line is an equal share."
    )

    def __init__(self, subject: Subject, options: Options):
        super().__init__(subject, options)
        self._counts = {key: LayerCounts(x) for key, x in subject.blocks.items()}
        # Work by key and class, (U, E), which grows with the largest label.
        self._by_class = {}
        self._num_beyond, self._num_without, self._has_labels = 0, 0, False
        # Examples, and those whose outputs are not finite.
        self._outputs = np.zeros(2, "int64")

    def update(self, batch: Batch) -> None:
        for key, counts in self._counts.items():
            counts.update(batch)
            if batch.labels is not None:
                self._count_classes(key, counts.block, batch)
        if batch.labels is not None:
            self._has_labels = True
            self._num_beyond += int((batch.labels >= MAX_CLASSES).sum())
            self._num_without += int((batch.labels < 0).sum())
        else:
            self._num_without += batch.size
        if batch.outputs is not None:
            is_broken = ~np.isfinite(batch.outputs).all(axis=-1)
            self._outputs += [batch.size, is_broken.sum()]

    def _count_classes(self, key, block, batch):
        record = batch.routing[key]
        work = record.dispatched if block.is_sparse else record.combined
        work = np.where(batch.mask_of(block)[..., None], work, 0.0).sum(axis=1)
        labels, kept = batch.labels, rows_of_classes(batch.labels)
        if not kept.any():
            return
        table = self._by_class.get(key, np.zeros((0, block.num_experts)))
        missing = int(labels[kept].max()) + 1 - len(table)
        if missing > 0:
            table = np.pad(table, ((0, missing), (0, 0)))
        np.add.at(table, labels[kept], work[kept])
        self._by_class[key] = table

    def finish(self) -> Content:
        layers = self.subject.by_layer()
        names = list(layers)
        shown = [names[place] for place in evenly_spaced(len(names), MAX_LAYERS)]
        body = []
        if len(layers) > 1:
            body += self._maps(layers)
        body += [self._bars(name, layers[name]) for name in shown]
        if any(self._capacity(layers[name]) is not None for name in shown):
            body.append(
                "The orange line is an expert's capacity: at inference where that is "
                "limited, and hatched tokens are dropped then; or else the capacity "
                "while training, and inference serves all tokens."
            )
        if len(shown) < len(layers):
            body.append(
                f"{len(shown)} of {len(layers)} layers are drawn by themselves; "
                "report.json has the figures of all."
            )
        body.append(self._table())
        body += self._classes(shown)
        return Content(
            body,
            {key: self._data(key) for key in self._counts},
            self._verdicts(layers),
        )

    def _verdicts(self, layers):
        counts = [
            LayerCounts.together(name, [self._counts[x.key] for x in records.values()])
            for name, records in layers.items()
        ]
        verdicts, (examples, broken) = [], self._outputs.tolist()
        if broken:
            text = f"{broken:,} of {examples:,} examples have outputs that are not"
            verdicts.append(Verdict("problem", f"{text} finite."))
        return verdicts + health_verdicts(counts)

    def _maps(self, layers):
        """A map of all layers for each modality."""
        figures = []
        for modality in self.subject.modalities:
            rows = {
                block.key: np.where(
                    block.is_present, self._counts[block.key].shares, np.nan
                )
                for records in layers.values()
                if (block := records.get(modality)) is not None
            }
            if not rows:
                continue
            several = len(self.subject.modalities) > 1
            tokens = f"{modality} tokens" if several else "tokens"
            names = [key.removeprefix(f"{modality}/") for key in rows]
            drawing = draw_load_map(list(rows.values()), names, tokens)
            figures.append(
                Figure(
                    drawing,
                    f"Map of the shares of {tokens} by layer and expert.",
                    f"All layers at once: the share of the {tokens} that each expert "
                    "gets. Dark blue is an expert without work, yellow one with three "
                    "times an equal share or more.",
                    f"load_map_{modality}",
                )
            )
        return figures

    def _bars(self, name, records):
        counts = {k: self._counts[block.key] for k, block in records.items()}
        first = next(iter(counts.values()))
        block = first.block
        shares = {k: x.shares for k, x in counts.items()}
        dropped = None
        capacity = self._capacity(records)
        if len(counts) == 1 and first.dropped > 0:
            total = max(first.demand.sum(), 1.0)
            shares = {next(iter(shares)): first.served / total}
            dropped = (first.demand - first.served) / total
        return Figure(
            draw_loads(
                shares,
                name,
                block.expert_types,
                dropped,
                None if capacity is None else capacity / block.num_experts,
            ),
            f"Bars of the share of work of each of {block.num_experts} experts of "
            f"{name}: the largest is {max(x.max() for x in shares.values()):.0%}.",
            f"{name}: {_range_text(counts)}",
            f"load_{file_name(name)}",
        )

    def _capacity(self, records):
        """The capacity factor of a layer's picture, if there is one for all experts."""
        block = next(iter(records.values()))
        if block.kind != "token_choice" or len(records) > 1:
            return None
        if len({*block.expert_types}) > 1:
            # Those of MoE++ differ by kind, and those of pruned layers by method.
            return None
        return block.capacity_factor or block.training_capacity_factor

    def _table(self):
        head = [
            "layer",
            "entropy of loads",
            "largest share",
            "experts without work",
            "tokens no expert serves",
            "choices dropped",
        ]
        rows = []
        for key, counts in self._counts.items():
            is_sparse = counts.block.is_sparse
            rows.append(
                [
                    key,
                    f"{counts.entropy:.3f}",
                    f"{counts.shares.max():.1%}",
                    int(((counts.work == 0) & counts.block.is_present).sum()),
                    f"{counts.unserved / max(counts.tokens, 1):.1%}"
                    if is_sparse
                    else None,
                    f"{counts.dropped:.1%}"
                    if counts.block.kind == "token_choice"
                    else None,
                ]
            )
        return Table(head, rows, "Balance by layer; an entropy of 1 is an equal load")

    def _classes(self, shown):
        if not self._by_class:
            return self._left_out()
        figures = []
        totals = next(iter(self._by_class.values())).sum(axis=1)
        present = np.flatnonzero(totals)
        if len(present) < 2:
            return self._left_out()
        # The most frequent classes, in the order of their numbers.
        largest = np.argsort(-totals[present], kind="stable")[:MAX_DRAWN]
        chosen = np.sort(present[largest])
        names = [self.subject.class_name(int(label)) for label in chosen]
        layers = self.subject.by_layer()
        for place in evenly_spaced(len(shown), MAX_CLASS_MAPS):
            for block in layers[shown[place]].values():
                table = self._by_class[block.key][chosen]
                figures.append(
                    Figure(
                        draw_class_map(relative_work(table), names, block.key),
                        f"Map of the work of each expert of {block.key} by class.",
                        f"{block.key}: bright cells are experts that have specialised "
                        "in a class, and work for it more than for the average one.",
                        f"classes_{file_name(block.key)}",
                    )
                )
        if len(chosen) < len(present):
            figures.append(
                f"The {len(chosen)} most frequent of {len(present)} classes are drawn."
            )
        return [*figures, *self._left_out()]

    def _left_out(self):
        """A sentence on examples that are not counted by class."""
        reasons = (
            (self._num_beyond, f"of classes from number {MAX_CLASSES:,} on"),
            (self._num_without, "without a label, or with several"),
        )
        texts = [f"{number:,} {reason}" for number, reason in reasons if number]
        if not self._has_labels or not texts:
            return []
        return [f"Examples that are not counted by class: {'; '.join(texts)}."]

    def _data(self, key):
        counts = self._counts[key]
        data = {
            "tokens": counts.tokens,
            "tokens_not_finite": counts.broken,
            "shares": counts.shares.tolist(),
            "served": counts.served.tolist(),
            "mass": counts.mass.tolist(),
            "demand": counts.demand.tolist(),
            "entropy": counts.entropy,
            "unserved_tokens": counts.unserved if counts.block.is_sparse else None,
            "dropped_choices": counts.dropped
            if counts.block.kind == "token_choice"
            else None,
        }
        if key in self._by_class:
            data["by_class"] = np.round(self._by_class[key], 4).tolist()
        return data


def relative_work(table: np.ndarray) -> np.ndarray:
    """Work by class and expert, over that of the average class."""
    totals = table.sum(axis=1, keepdims=True)
    shares = table / np.where(totals > 0, totals, 1.0)
    means = shares.mean(axis=0)
    return np.where(means > 0, shares / np.where(means > 0, means, 1.0), np.nan)


def _range_text(counts):
    texts = []
    for modality, layer in counts.items():
        low, high = layer.shares.min(), layer.shares.max()
        of = f" of the {modality}s' work" if len(counts) > 1 else " of the work"
        texts.append(f"{low:.1%} to {high:.1%}{of}")
    return f"experts do {' and '.join(texts)}."
