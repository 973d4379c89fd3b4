"""The experts of muMoE. Axes: B batch, N tokens, E experts, U classes."""

import numpy as np

from keras_moe.analysis.ablation import ablate_experts
from keras_moe.analysis.plots import plot_expert_load
from keras_moe.report import section
from keras_moe.report._figures import draw_class_heat

# Smallest coefficient with which an expert serves a token.
THRESHOLD = 0.5
# Limits of the cost: ablated experts per layer, images, bytes of images, and least and
# most classifications of an image without an expert.
_EXPERTS, _IMAGES, _BYTES = 16, 256, 2**26
_LEAST_PAIRS, _MOST_PAIRS = 2_048, 12_288
_CLASSES = 20
# Number of tokens classified at a time without an expert.
_TOKENS = 2**13


class _Counts:
    def __init__(self, num_experts):
        self.load, self.total = np.zeros(num_experts, int), np.zeros(num_experts)
        self.tokens = 0
        # Sums of the images' mean coefficients, by class.
        self.by_class = np.zeros((section.MAX_CLASSES, num_experts))

    @property
    def mean(self):
        return self.total / max(self.tokens, 1)

    @property
    def experts(self):
        """The experts with the largest coefficients, ascending."""
        return np.sort(np.argsort(-self.total, kind="stable")[:_EXPERTS])


class MuMoEExperts(section.LayerSection):
    """The section on which experts a class uses, and which classes need an expert."""

    title = "muMoE's experts"
    anchor = "mumoe"
    intro = (
        "All experts of a muMoE have a part in each token, given by their "
        "coefficients. An expert is monosemantic if a single class loses its accuracy "
        "without it: its polysemanticity is then 0. Figures show up to "
        f"{_CLASSES} classes, those with most images, and {_EXPERTS} experts, those "
        "with most weight."
    )
    head = (
        "layer",
        "experts",
        "without a part",
        "most used (mean coefficient)",
        f"tokens with a coefficient of at least {THRESHOLD:g}",
    )

    @classmethod
    def reads(cls, block):
        return block.kind == "mumoe"

    def __init__(self, model, options):
        super().__init__(model, options)
        # Only the head, the last block and the last token mixer have classes, which
        # bounds memory for deep models.
        heads = [key for key in self.blocks if key == "head"]
        mixers = [key for key in self.blocks if key.endswith("/token_mixer")]
        of_tokens = [key for key, block in self.blocks.items() if block.is_of_tokens]
        self._detailed = [*heads, *of_tokens[-1:], *mixers[-1:]]
        # Number of images by class, of all examples, and of those without a class.
        self._images = np.zeros(section.MAX_CLASSES, int)
        self._examples = self._uncounted = 0
        self._reservoir = None

    def new_counts(self, block):
        return _Counts(block.num_experts)

    def count(self, counts, block, batch):
        gates = batch.routing[block.key].gates[batch.mask_of(block)]
        counts.load += (gates >= THRESHOLD).sum(axis=0)
        counts.total += gates.sum(axis=0, dtype="float64")
        counts.tokens += len(gates)

    def update(self, batch):
        super().update(batch)
        self._examples += batch.size
        if batch.labels is None:
            self._uncounted += batch.size
            return
        labels = batch.labels
        is_known = (labels >= 0) & (labels < section.MAX_CLASSES)
        self._uncounted += int((~is_known).sum())
        for key in self._detailed:
            # Images without finite tokens have no mean.
            is_known &= batch.mask_of(self.blocks[key]).any(axis=1)
        known = np.flatnonzero(is_known)
        np.add.at(self._images, labels[known], 1)
        for key in self._detailed:
            gates = np.asarray(batch.routing[key].gates, "float64")[known]
            mask = batch.mask_of(self.blocks[key])[known][..., None]
            means = (gates * mask).sum(axis=1) / mask.sum(axis=1)
            np.add.at(self.counts[key].by_class, labels[known], means)
        if batch.outputs is not None and batch.images is not None:
            self._keep(labels, known, batch)

    def _keep(self, labels, known, batch):
        if self._reservoir is None:
            size = max(min(_IMAGES, _BYTES // batch.images[0].nbytes), 8)
            self._reservoir = section.Reservoir(size, self.options.seed)
        is_kept = labels[known] < batch.outputs.shape[-1]
        known = known[is_kept & np.isfinite(batch.outputs[known]).all(axis=-1)]
        self._reservoir.offer(
            len(known),
            lambda index: (np.array(batch.images[known[index]]), labels[known[index]]),
        )

    def row(self, block, counts):
        mean = counts.mean
        return [
            block.key,
            block.num_experts,
            int((mean == 0).sum()),
            f"{mean.argmax()} ({mean.max():.3f})",
            f"{counts.load.sum() / max(counts.tokens, 1):.1%}",
        ]

    def finish(self):
        table = self.table(
            "Coefficients by layer. A token mixer's tokens are channels."
        )
        data, findings = {}, []
        for key, counts in self.counts.items():
            mean, load = counts.mean, counts.load
            data[key] = {"mean_coefficients": mean.tolist(), "load": load.tolist()}
            unused = int((mean == 0).sum())
            if unused and counts.tokens:
                text = f"{key}: {unused} of {len(mean)} experts have no part."
                findings.append(section.Finding("notice", text))
        body = [table, *map(self._load_figure, self._detailed)]
        body += self._class_figures() + self._ablations(data, findings)
        return section.SectionContent(body, data, findings)

    def _load_figure(self, key):
        load = self.counts[key].load
        return section.Figure(
            plot_expert_load({key: load}, None, THRESHOLD, "", width=3.6),
            f"{key}: the largest load is {load.max():,} tokens, of expert "
            f"{load.argmax()}; {int((load == 0).sum())} experts have none",
            f"Tokens of {key} for which an expert has a coefficient of at least "
            f"{THRESHOLD:g}.",
            f"mumoe_load_{section.file_name(key)}",
        )

    def _classes(self):
        """The classes with the most images, ascending."""
        order = np.argsort(-self._images, kind="stable")[:_CLASSES]
        return np.sort(order[self._images[order] > 0]).tolist()

    def _class_figures(self):
        if not (chosen := self._classes()):
            return ["Coefficients by class need labels, which the data does not have."]
        names, body = [self.model.class_name(c) for c in chosen], []
        for key in self._detailed:
            experts = self.counts[key].experts
            means = self.counts[key].by_class[chosen] / self._images[chosen, None]
            best = [f"{x}: expert {e}" for x, e in zip(names, means.argmax(axis=1))]
            values = means[:, experts]
            body.append(
                section.Figure(
                    draw_class_heat(values, experts, names, "mean coefficient"),
                    f"{key}, the expert with the largest coefficient of each class: "
                    f"{', '.join(best)}",
                    f"Mean coefficients in {key} by class.",
                    f"mumoe_classes_{section.file_name(key)}",
                )
            )
        if self._uncounted:
            body.append(section.uncounted_classes(self._uncounted))
        return body

    def _ablations(self, data, findings):
        if self._reservoir is None or not self._reservoir.seen:
            return [
                "Experts were not ablated, which needs a classifier, images and labels."
            ]
        per_image = sum(len(self.counts[key].experts) for key in self._detailed)
        # At most about the cost of reading the data twice, within the limits.
        pairs = min(max(2 * self._examples, _LEAST_PAIRS), _MOST_PAIRS)
        kept = list(self._reservoir.kept.values())
        # Of the whole data, which may be sorted by class.
        kept = section.evenly_spaced(kept, max(pairs // per_image, 1))
        images = np.stack([image for image, _ in kept])
        labels = np.array([label for _, label in kept])
        body, rows = [], []
        for key in self._detailed:
            try:
                ablation = self._ablation(key, images, labels)
            except ValueError as error:
                # For example, a broken model has non-finite outputs.
                text = f"{key}: experts could not be ablated. {error}"
                findings.append(section.Finding("problem", text))
                continue
            data[key]["ablation"] = {**ablation.to_dict(), "images": len(images)}
            if ablation.changes.any():
                body.append(self._ablation_figure(key, ablation, len(images)))
            rows += self._ablation_rows(key, ablation)
            findings.append(_finding(key, ablation))
        if rows:
            head = ["layer", "expert", "polysemanticity", "classes that lose most"]
            caption = f"Experts that matter most, by {len(images)} images"
            body.append(section.Table(head, rows, caption))
        return body

    def _ablation(self, key, images, labels):
        counts = self.counts[key]
        # Batches with many small images, or a few with many tokens.
        tokens = max(counts.tokens // max(self._examples, 1), 1)
        return ablate_experts(
            self.model.keras_model,
            images,
            labels,
            layer=key,
            experts=counts.experts,
            batch_size=int(np.clip(_TOKENS // tokens, 32, 256)),
            verbose=0,
        )

    def _ablation_figure(self, key, ablation, count):
        # Classes of the images that were classified again.
        counted = np.flatnonzero(ablation.counts)
        chosen = [c for c in self._classes() if c in counted]
        names = [self.model.class_name(c) for c in chosen]
        changes = ablation.changes[:, chosen]
        row, column = np.unravel_index(changes.argmax(), changes.shape)
        label = "fraction of accuracy lost"
        return section.Figure(
            draw_class_heat(changes.T, ablation.experts, names, label, diverging=True),
            f"{key}: class {names[column]} loses most, {changes[row, column]:.0%} of "
            f"its accuracy, without expert {ablation.experts[row]}",
            f"The fraction of its accuracy that a class loses without an expert of "
            f"{key}, measured with {count} images drawn at random.",
            f"mumoe_ablation_{section.file_name(key)}",
        )

    def _ablation_rows(self, key, ablation):
        changes, rows = ablation.changes, []
        for row in np.argsort(-changes.max(axis=1), kind="stable")[: self.options.top]:
            if not changes[row].any():
                continue
            worst = np.argsort(-changes[row], kind="stable")[:3]
            losses = [
                f"{self.model.class_name(c)} {changes[row, c]:.0%}"
                for c in worst.tolist()
                if changes[row, c] > 0
            ]
            score = round(float(ablation.polysemanticity[row]), 2)
            rows.append([key, int(ablation.experts[row]), score, ", ".join(losses)])
        return rows


def _finding(key, ablation):
    count, mean = len(ablation.experts), ablation.mean_polysemanticity
    if mean is None:
        text = f"{key}: no class loses accuracy without any one of {count} experts."
        return section.Finding("notice", text)
    matter = int((ablation.changes != 0).any(axis=1).sum())
    text = (
        f"{key}: {matter} of {count} experts matter for the accuracy of a class, with "
        f"a mean polysemanticity of {mean:.2f}."
    )
    return section.Finding("good", text)
