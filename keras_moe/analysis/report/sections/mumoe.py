"""muMoE's experts: coefficients by class, load, and the classes that need them.

Axes: B batch, N tokens, E experts, C classes.
"""

from typing import Any

import numpy as np

from keras_moe.analysis.ablation import ablate_experts
from keras_moe.analysis.plots import plot_expert_load
from keras_moe.analysis.plots.report_experts import draw_class_heat
from keras_moe.analysis.report.counts import MAX_CLASSES, rows_of_classes
from keras_moe.analysis.report.reservoir import Reservoir
from keras_moe.analysis.report.section import (
    Batch,
    Content,
    Figure,
    Section,
    Subject,
    Table,
    Verdict,
    file_name,
)

# The lowest coefficient with which an expert serves a token.
THRESHOLD = 0.5
# Numbers that bound the cost: experts of a layer that are ablated, images, bytes of
# these, and classifications of an image without an expert, with and without regard to
# the number of examples that were read.
_EXPERTS, _IMAGES, _BYTES = 16, 256, 2**26
_LEAST_PAIRS, _MOST_PAIRS = 2_048, 12_288
_CLASSES = 20
# Tokens that are classified at once without an expert.
_TOKENS = 2**13


class MuMoEExperts(Section):
    """Which experts a class uses, and which classes need an expert."""

    title = "muMoE's experts"
    anchor = "mumoe"
    intro = (
        "All experts of a muMoE have a part in each token, by their coefficients. An "
        "expert is monosemantic if a single class loses its accuracy without it: its "
        "polysemanticity is then 0."
    )

    @classmethod
    def fits(cls, subject: Subject) -> bool:
        return any(block.kind == "mumoe" for block in subject.blocks.values())

    def __init__(self, subject: Subject, options: Any):
        super().__init__(subject, options)
        self._blocks = {k: b for k, b in subject.blocks.items() if b.kind == "mumoe"}
        # Classes of these layers alone, so that many layers take no more memory.
        self._detailed = _detailed(self._blocks)
        self._load = {k: np.zeros(b.num_experts, int) for k, b in self._blocks.items()}
        self._total = {k: np.zeros(b.num_experts) for k, b in self._blocks.items()}
        self._tokens = dict.fromkeys(self._blocks, 0)
        self._by_class = {key: np.zeros((0, 0)) for key in self._detailed}
        self._counts = np.zeros(0, int)
        self._reservoir, self._classes, self._examples = None, 0, 0
        self._num_beyond = 0

    def update(self, batch: Batch) -> None:
        self._examples += batch.size
        for key, block in self._blocks.items():
            gates = np.asarray(batch.routing[key].gates)
            counts = batch.mask_of(block)
            self._load[key] += (gates[counts] >= THRESHOLD).sum(axis=0)
            self._total[key] += gates[counts].sum(axis=0, dtype="float64")
            self._tokens[key] += int(counts.sum())
        if batch.labels is None:
            return
        labels = np.asarray(batch.labels)
        self._num_beyond += int((labels >= MAX_CLASSES).sum())
        is_known = rows_of_classes(labels)
        for key in self._detailed:
            # An image without any finite token has no mean.
            is_known &= batch.mask_of(self._blocks[key]).any(axis=1)
        known = np.flatnonzero(is_known)
        if not len(known):
            return
        self._add_classes(labels, known, batch)
        if batch.outputs is not None and batch.images is not None:
            self._keep(labels, known, batch)

    def _add_classes(self, labels, known, batch):
        classes = int(labels[known].max()) + 1
        if batch.outputs is not None:
            classes = max(classes, min(batch.outputs.shape[-1], MAX_CLASSES))
        if classes > len(self._counts):
            more = classes - len(self._counts)
            self._counts = np.pad(self._counts, (0, more))
            for key, sums in self._by_class.items():
                experts = self._blocks[key].num_experts
                rows = np.zeros((more, experts))
                self._by_class[key] = np.concatenate([sums.reshape(-1, experts), rows])
        np.add.at(self._counts, labels[known], 1)
        for key in self._detailed:
            gates = np.asarray(batch.routing[key].gates, "float64")[known]
            counts = batch.mask_of(self._blocks[key])[known][..., None]
            means = (gates * counts).sum(axis=1) / counts.sum(axis=1)
            np.add.at(self._by_class[key], labels[known], means)

    def _keep(self, labels, known, batch):
        self._classes = batch.outputs.shape[-1]
        if self._reservoir is None:
            size = max(min(_IMAGES, _BYTES // max(batch.images[0].nbytes, 1)), 8)
            self._reservoir = Reservoir(size, self.options.seed)
        is_kept = labels[known] < self._classes
        known = known[is_kept & np.isfinite(batch.outputs[known]).all(axis=-1)]
        self._reservoir.offer(
            len(known),
            lambda place: (np.array(batch.images[known[place]]), labels[known[place]]),
        )

    def finish(self) -> Content:
        body, data, verdicts = [self._table()], {}, []
        for key, block in self._blocks.items():
            mean = self._total[key] / max(self._tokens[key], 1)
            data[key] = {
                "mean_coefficients": mean.tolist(),
                "load": self._load[key].tolist(),
            }
            unused = int((mean == 0).sum())
            if unused and self._tokens[key]:
                text = f"{key}: {unused} of {block.num_experts} experts have no part."
                verdicts.append(Verdict("notice", text))
        body += [self._load_figure(key) for key in self._detailed]
        body += self._class_figures()
        body += self._ablations(data, verdicts)
        return Content(body, data, verdicts)

    def _table(self):
        rows = []
        for key, block in self._blocks.items():
            mean = self._total[key] / max(self._tokens[key], 1)
            rows.append(
                [
                    key,
                    block.num_experts,
                    int((mean == 0).sum()),
                    f"{mean.argmax()} ({mean.max():.3f})",
                    f"{self._load[key].sum() / max(self._tokens[key], 1):.1%}",
                ]
            )
        head = ["layer", "experts", "without a part", "most used (mean coefficient)"]
        return Table(
            [*head, f"tokens with a coefficient from {THRESHOLD:g} on"],
            rows,
            "Coefficients by layer. A token mixer's tokens are channels.",
        )

    def _load_figure(self, key):
        load = self._load[key]
        return Figure(
            plot_expert_load({key: load}, None, THRESHOLD, "", width=3.6),
            f"{key}: the largest load is {load.max():,} tokens, of expert "
            f"{load.argmax()}; {int((load == 0).sum())} experts have none",
            f"{'Channels' if key.endswith('/token_mixer') else 'Tokens'} of {key} in "
            f"which an expert has a coefficient of at least {THRESHOLD:g}.",
            f"mumoe_load_{file_name(key)}",
        )

    def _class_names(self, chosen):
        return [self.subject.class_name(label) for label in chosen.tolist()]

    def _chosen_classes(self):
        """The classes with most images, in their order."""
        order = np.argsort(-self._counts, kind="stable")[:_CLASSES]
        return np.sort(order[self._counts[order] > 0])

    def _chosen_experts(self, key):
        """The experts with the largest coefficients, in their order."""
        order = np.argsort(-self._total[key], kind="stable")[:_EXPERTS]
        return np.sort(order)

    def _class_figures(self):
        chosen, figures = self._chosen_classes(), []
        if not len(chosen):
            return ["Coefficients by class need labels, which the data does not have."]
        for key in self._detailed:
            experts = self._chosen_experts(key)
            means = self._by_class[key][chosen] / self._counts[chosen, None]
            best = means.argmax(axis=1)
            names = self._class_names(chosen)
            parts = [f"{name}: expert {e}" for name, e in zip(names, best)]
            left_out = _left_out(len(chosen), len(self._counts), "classes")
            left_out += _left_out(
                len(experts), self._blocks[key].num_experts, "experts"
            )
            figures.append(
                Figure(
                    draw_class_heat(
                        means[:, experts].T,
                        list(map(str, experts)),
                        names,
                        "mean coefficient",
                    ),
                    f"{key}, the expert with the largest coefficient of each class: "
                    f"{', '.join(parts)}",
                    f"Mean coefficients in {key} by class.{left_out}",
                    f"mumoe_classes_{file_name(key)}",
                )
            )
        if self._num_beyond:
            figures.append(
                f"Examples that are not counted by class: {self._num_beyond:,} of "
                f"classes from number {MAX_CLASSES:,} on."
            )
        return figures

    def _ablations(self, data, verdicts):
        if self._reservoir is None or not self._reservoir.seen:
            return [
                "Experts were not ablated, which needs a classifier, images and labels."
            ]
        kept = list(self._reservoir.kept.values())
        experts = {key: self._chosen_experts(key) for key in self._detailed}
        per_image = sum(map(len, experts.values()))
        # At most the cost of reading the data twice, if that is not small.
        pairs = min(max(2 * self._examples, _LEAST_PAIRS), _MOST_PAIRS)
        kept = kept[: max(pairs // per_image, 1)]
        images = np.stack([image for image, _ in kept])
        labels = np.array([label for _, label in kept])
        body, rows = [], []
        for key, own in experts.items():
            try:
                ablation = ablate_experts(
                    self.subject.model,
                    images,
                    labels,
                    layer=key,
                    experts=own,
                    batch_size=self._batch_size(key),
                    verbose=0,
                )
            except ValueError as error:
                # The outputs of a broken model are not finite, for example.
                text = f"{key}: experts could not be ablated. {error}"
                verdicts.append(Verdict("problem", text))
                continue
            data[key]["ablation"] = {**ablation.to_dict(), "images": len(images)}
            if ablation.changes.any():
                body.append(self._ablation_figure(key, ablation, len(images)))
            rows += self._ablation_rows(key, ablation)
            verdicts.append(_verdict(key, ablation))
        head = ["layer", "expert", "polysemanticity", "classes that lose most"]
        if rows:
            caption = f"Experts that matter most, by {len(images)} images"
            body.append(Table(head, rows, caption))
        return body

    def _batch_size(self, key):
        """Many small images at once, and few of many tokens, which need memory."""
        tokens = max(self._tokens[key] // max(self._examples, 1), 1)
        return int(np.clip(_TOKENS // tokens, 32, 256))

    def _ablation_figure(self, key, ablation, count):
        chosen = self._chosen_classes()
        chosen = chosen[chosen < len(ablation.counts)]
        chosen = chosen[ablation.counts[chosen] > 0]
        changes = ablation.changes[:, chosen]
        row, column = np.unravel_index(changes.argmax(), changes.shape)
        names = self._class_names(chosen)
        left_out = _left_out(len(chosen), int((ablation.counts > 0).sum()), "classes")
        left_out += _left_out(len(changes), self._blocks[key].num_experts, "experts")
        return Figure(
            draw_class_heat(
                changes,
                list(map(str, ablation.experts)),
                names,
                "fraction of accuracy lost",
                diverging=True,
            ),
            f"{key}: class {names[column]} loses most, {changes[row, column]:.0%} of "
            f"its accuracy, without expert {ablation.experts[row]}",
            f"The fraction of its accuracy that a class loses without an expert of "
            f"{key}, measured with {count} images drawn at random.{left_out}",
            f"mumoe_ablation_{file_name(key)}",
        )

    def _ablation_rows(self, key, ablation):
        changes, rows = ablation.changes, []
        for row in np.argsort(-changes.max(axis=1), kind="stable")[: self.options.top]:
            if not changes[row].any():
                continue
            worst = np.argsort(-changes[row], kind="stable")[:3]
            worst = worst[changes[row, worst] > 0]
            losses = [
                f"{name} {changes[row, c]:.0%}"
                for name, c in zip(self._class_names(worst), worst)
            ]
            score = round(float(ablation.polysemanticity[row]), 2)
            rows.append([key, int(ablation.experts[row]), score, ", ".join(losses)])
        return rows


def _detailed(blocks):
    """The head, the last block and its token mixer, those that there are."""
    heads = [key for key in blocks if key == "head"]
    mixers = [key for key in blocks if key.endswith("/token_mixer")]
    blocks = [key for key, block in blocks.items() if block.is_of_tokens]
    return [*heads, *blocks[-1:], *mixers[-1:]]


def _verdict(key, ablation):
    changes, count = ablation.changes, len(ablation.experts)
    matter = int((changes != 0).any(axis=1).sum())
    mean = ablation.mean_polysemanticity
    if mean is None:
        return Verdict(
            "notice", f"{key}: no class loses accuracy without one of {count} experts."
        )
    matters = "matters" if matter == 1 else "matter"
    score = "its polysemanticity" if matter == 1 else "their mean polysemanticity"
    return Verdict(
        "good",
        f"{key}: {matter} of {count} experts {matters} for the accuracy of a class; "
        f"{score} is {mean:.2f}.",
    )


def _left_out(shown, total, what):
    if shown >= total:
        return ""
    most = "images" if what == "classes" else "part"
    return f" Shown are {shown} of {total} {what}, those with most {most}."
