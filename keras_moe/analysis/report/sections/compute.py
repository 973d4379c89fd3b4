"""Where an MoE++ spends its compute: by kind of expert, patch, word and layer.

Axes: B batch, N tokens, E experts.
"""

from collections import defaultdict
from typing import Any

import numpy as np
from markupsafe import Markup

from keras_moe.analysis.compute import RoutingScores, type_loads
from keras_moe.analysis.evenly_spaced import evenly_spaced
from keras_moe.analysis.plots import (
    plot_compute_maps,
    plot_load_by_type,
    plot_routing_scores,
    plot_type_maps,
)
from keras_moe.analysis.report.best_tokens import MAX_WORDS
from keras_moe.analysis.report.reservoir import Reservoir, examples_to_show
from keras_moe.analysis.report.section import (
    Batch,
    Content,
    Figure,
    Html,
    Section,
    Subject,
    Table,
    Verdict,
    file_name,
)
from keras_moe.analysis.report.sprites import drawable
from keras_moe.analysis.tokens import of_patches
from keras_moe.ops.expert_types import EXPERT_TYPES, ExpertTypes

# The number of images in a figure, of layers whose scores are drawn, and of examples
# that these scores are of.
_IMAGES, _PANELS, _SCORED = 3, 4, 64
# Fewer choices than this of experts without compute save next to nothing.
_LEAST_SHARE = 0.05


class Compute(Section):
    """Which tokens FFN experts serve, and which the experts that cost nothing."""

    title = "Where compute goes"
    anchor = "compute"
    intro = (
        "Zero, copy and constant experts cost next to nothing, so that a token's "
        "compute is the number of FFN experts that serve it, from 0 to K."
    )

    @classmethod
    def fits(cls, subject: Subject) -> bool:
        return bool(_keys(subject))

    def __init__(self, subject: Subject, options: Any):
        super().__init__(subject, options)
        self._blocks = {key: subject.blocks[key] for key in _keys(subject)}
        self._kinds = {
            key: ExpertTypes(*(block.expert_types.count(kind) for kind in EXPERT_TYPES))
            for key, block in self._blocks.items()
        }
        self._served = {k: np.zeros(kinds.total) for k, kinds in self._kinds.items()}
        self._tokens = dict.fromkeys(self._blocks, 0)
        # Sums and sums of squares of the two highest gates.
        self._moments = {key: np.zeros((2, 2)) for key in self._blocks}
        self._maps, self._image, self._words = {}, 0.0, defaultdict(lambda: [0, 0.0])
        # Examples whose tokens are finite in all layers.
        self._complete = 0
        self._examples = examples_to_show(options)
        self._scores = Reservoir(_SCORED, options.seed)

    def update(self, batch: Batch) -> None:
        by_token, complete = defaultdict(list), np.ones(batch.size, bool)
        highest = {}
        for key, block in self._blocks.items():
            record, kinds = batch.routing[key], self._kinds[key]
            counts = batch.mask_of(block)
            served = np.asarray(record.dispatched)
            self._served[key] += served[counts].sum(axis=0, dtype="float64")
            self._tokens[key] += int(counts.sum())
            highest[key] = -np.partition(-np.asarray(record.gates), 1, axis=-1)[..., :2]
            gates = highest[key][counts].astype("float64")
            self._moments[key] += [gates.sum(axis=0), np.square(gates).sum(axis=0)]
            by_kind = np.stack(
                [served[..., part].sum(axis=-1) for part in kinds.slices().values()], -1
            )
            by_token[block.modality].append(by_kind)
            if batch.finite and key in batch.finite:
                complete &= batch.finite[key].all(axis=1)
        means = {modality: np.mean(x, axis=0) for modality, x in by_token.items()}
        self._add_images(batch, means, np.flatnonzero(complete))
        self._add_words(batch, means, complete)
        masks = {key: batch.mask_of(block) for key, block in self._blocks.items()}
        self._scores.offer(
            batch.size,
            lambda place: {k: highest[k][place][masks[k][place]] for k in highest},
        )

    def _add_images(self, batch, means, complete):
        if "image" not in means or self.subject.grid is None:
            return
        maps = of_patches(means["image"], self.subject.grid)
        own = maps[complete].sum(axis=0)
        self._maps = self._maps + own if self._complete else own
        self._image = self._image + batch.images[complete].sum(axis=0, dtype="float64")
        self._complete += len(complete)
        ffn = maps[..., 0].reshape(-1, *self.subject.grid)
        self._examples.offer(
            batch.size,
            lambda place: (np.array(batch.images[place]), np.array(ffn[place])),
        )

    def _add_words(self, batch, means, complete):
        if "text" not in means or batch.words is None:
            return
        rows = zip(batch.words, means["text"][..., 0].tolist(), complete)
        for words, counts, is_complete in rows:
            for word, count in zip(words, counts) if is_complete else ():
                if word and (word in self._words or len(self._words) < MAX_WORDS):
                    entry = self._words[word]
                    entry[0] += 1
                    entry[1] += count

    def finish(self) -> Content:
        loads = {
            key: type_loads(
                self._served[key],
                max(self._tokens[key], 1),
                self._kinds[key],
                block.num_selected_experts or 1,
            )
            for key, block in self._blocks.items()
        }
        body = [self._load_figure(loads), *self._score_figures(), self._table(loads)]
        body += self._image_figures() + self._word_parts()
        data = {
            "layers": {
                key: {
                    "shares": load.shares,
                    "experts_per_token": load.experts_per_token,
                    "dropped_choices": load.dropped_choices,
                    **self._score_moments(key),
                }
                for key, load in loads.items()
            },
            "words": {word: [n, total / n] for word, (n, total) in self._top_words()},
        }
        has_tokens = any(self._tokens.values())
        return Content(body, data, [self._verdict(loads)] if has_tokens else [])

    def _load_figure(self, loads):
        parts = [f"{key} {load.shares['ffn']:.0%}" for key, load in loads.items()]
        return Figure(
            plot_load_by_type(loads, title="", width=3.6),
            f"Share of assignments to FFN experts by layer: {', '.join(parts)}",
            "The share of each kind of expert in all assignments of a layer. The "
            "number at the right is the mean number of FFN experts of a token.",
            "compute_by_kind",
        )

    def _score_figures(self):
        """Histograms of the two highest gates in some layers."""
        kept = list(self._scores.kept.values())
        keys = list(self._blocks)
        figures = []
        for key in [keys[place] for place in evenly_spaced(len(keys), _PANELS)]:
            gates = np.concatenate([each[key] for each in kept])
            if not len(gates):
                continue
            scores = RoutingScores(*gates.astype("float64").T)
            figures.append(
                Figure(
                    plot_routing_scores({key: scores}, title=""),
                    f"Gates in {key}: the highest has mean "
                    f"{scores.highest.mean():.2f}, the second one "
                    f"{scores.second.mean():.2f}",
                    f"The two highest gates of tokens in {key}, of {len(kept)} "
                    "examples. Gating residuals bring the logits of the layer before, "
                    "which makes them vary less.",
                    f"compute_scores_{file_name(key)}",
                )
            )
        return figures

    def _score_moments(self, key):
        mean, square = self._moments[key] / max(self._tokens[key], 1)
        variance = np.maximum(square - mean**2, 0.0)
        return {
            "highest_mean": float(mean[0]),
            "highest_variance": float(variance[0]),
            "second_mean": float(mean[1]),
            "second_variance": float(variance[1]),
        }

    def _table(self, loads):
        rows = []
        for key, load in loads.items():
            scores = self._score_moments(key)
            rows.append(
                [
                    key,
                    *(f"{load.shares[kind]:.1%}" for kind in EXPERT_TYPES),
                    round(load.experts_per_token["ffn"], 3),
                    f"{load.dropped_choices:.1%}",
                    *(
                        f"{scores[f'{gate}_mean']:.3f} ± "
                        f"{scores[f'{gate}_variance'] ** 0.5:.3f}"
                        for gate in ("highest", "second")
                    ),
                ]
            )
        head = ["layer", "FFN", *EXPERT_TYPES[1:], "FFN per token", "dropped choices"]
        head += ["highest gate", "second gate"]
        return Table(
            head,
            rows,
            "Assignments by kind of expert, and gates with their standard deviation, "
            "over all data",
        )

    def _image_figures(self):
        if not self._complete:
            return []
        kept, figures = self._examples.kept, []
        selected = max(b.num_selected_experts or 1 for b in self._blocks.values())
        numbers = list(kept)
        for start in range(0, len(numbers), _IMAGES):
            of_figure = numbers[start : start + _IMAGES]
            images = np.stack([drawable(kept[number][0]) for number in of_figure])
            maps = np.stack([kept[number][1] for number in of_figure])
            means = [f"example {n}: {m.mean():.2f}" for n, m in zip(of_figure, maps)]
            figures.append(
                Figure(
                    plot_compute_maps(images, maps, None, selected, "", columns=1),
                    f"FFN experts per patch, mean of the image: {', '.join(means)}",
                    f"Examples {', '.join(map(str, of_figure))}: FFN experts of each "
                    "patch, the mean over layers. The number is the image's mean.",
                    f"compute_maps_{start // _IMAGES + 1}",
                )
            )
        maps = self._maps / self._complete
        by_kind = {
            kind: maps[:, place].reshape(1, *self.subject.grid)
            for place, kind in enumerate(EXPERT_TYPES)
            if any(kinds[place] for kinds in self._kinds.values())
        }
        image = drawable(self._image / self._complete)[None]
        parts = [
            f"{kind} {x.min():.2f} to {x.max():.2f}" for kind, x in by_kind.items()
        ]
        figures.append(
            Figure(
                plot_type_maps(image, by_kind, title=""),
                f"Experts of each kind by place in the image: {', '.join(parts)}",
                f"The mean of all {self._complete:,} images, and experts of each kind "
                "per patch by its place. Each kind has colours of its own scale.",
                "compute_mean_maps",
            )
        )
        return figures

    def _top_words(self):
        order = sorted(self._words.items(), key=lambda pair: (-pair[1][0], pair[0]))
        return order[: 4 * self.options.top]

    def _word_parts(self):
        """The commonest words, each with its mean number of FFN experts."""
        if not self._words:
            return []
        words = sorted(self._top_words(), key=lambda pair: -pair[1][1] / pair[1][0])
        chips = Markup(" ").join(
            Markup('<span class="chip">{}<sub>{:.2f}</sub></span>').format(
                word, total / count
            )
            for word, (count, total) in words
        )
        return [
            f"The {len(words)} commonest of {len(self._words):,} words"
            f"{' that are counted' if len(self._words) == MAX_WORDS else ''}, each "
            "with the mean number of FFN experts over layers; those with most compute "
            "come first.",
            Html(Markup('<p class="chips">{}</p>').format(chips)),
        ]

    def _verdict(self, loads):
        tokens = sum(self._tokens.values())
        selected = sum(
            self._tokens[key] * (block.num_selected_experts or 1)
            for key, block in self._blocks.items()
        )
        ffn = sum(
            self._tokens[key] * load.experts_per_token["ffn"]
            for key, load in loads.items()
        )
        idle = (
            sum(
                self._tokens[key] * (sum(load.experts_per_token.values()))
                for key, load in loads.items()
            )
            - ffn
        )
        text = (
            f"FFN experts serve {ffn / max(tokens, 1):.2f} of "
            f"{selected / max(tokens, 1):.2f} choices of a token; zero, copy and "
            f"constant experts serve {idle / max(ffn + idle, 1e-9):.0%} of assignments"
        )
        if idle < _LEAST_SHARE * (ffn + idle):
            return Verdict("notice", f"{text}, which saves next to no compute.")
        return Verdict("good", f"{text}, at next to no cost.")


def _keys(subject):
    return [
        key
        for key, block in subject.blocks.items()
        if block.kind == "token_choice" and {*block.expert_types} & {*EXPERT_TYPES[1:]}
    ]
