"""Where MoE++ uses compute. Axes: B batch, N tokens, E experts, K selected experts."""

from collections import defaultdict
from typing import Any

import numpy as np

from keras_moe.analysis.plots import (
    plot_compute_maps,
    plot_load_by_type,
    plot_routing_scores,
    plot_type_maps,
)
from keras_moe.analysis.routing import RoutingScores, of_patches, type_loads
from keras_moe.ops.expert_types import EXPERT_TYPES, ExpertTypes
from keras_moe.report import section
from keras_moe.report._markup import drawable, parts

# Images in a figure, layers with histograms of scores, and examples in these.
_IMAGES, _PANELS, _SCORED = 3, 4, 64
# With a smaller share, experts without compute save next to nothing.
_LEAST_SHARE = 0.05


class _Counts:
    def __init__(self, block):
        # Of the experts that pruning has kept.
        counts = (block.expert_types.count(name) for name in EXPERT_TYPES)
        self.block, self.expert_types = block, ExpertTypes(*counts)
        self.selected = block.num_selected_experts or 1
        self.served, self.tokens = np.zeros(self.expert_types.total), 0
        # Sums and sums of squares of the two largest gates.
        self.moments = np.zeros((2, 2))

    @property
    def load(self):
        tokens = max(self.tokens, 1)
        return type_loads(self.served, tokens, self.expert_types, self.selected)

    @property
    def scores(self):
        """Means and variances of the two largest gates, by name."""
        means, squares = self.moments / max(self.tokens, 1)
        variances = np.maximum(squares - means**2, 0.0)
        names = ("highest", "second")
        return {
            **{f"{x}_mean": float(mean) for x, mean in zip(names, means)},
            **{f"{x}_variance": float(y) for x, y in zip(names, variances)},
        }


class Compute(section.LayerSection):
    """The section on which tokens use FFN experts, and which use free ones."""

    title = "Where compute goes"
    anchor = "compute"
    intro = (
        "Zero, copy and constant experts cost next to nothing, so a token's compute is "
        "the number of FFN experts that serve it, from 0 to K."
    )
    head = (
        "layer",
        "FFN",
        *EXPERT_TYPES[1:],
        "FFN per token",
        "dropped choices",
        "highest gate",
        "second gate",
    )

    @classmethod
    def reads(cls, block):
        mixed = {*block.expert_types} & {*EXPERT_TYPES[1:]}
        return block.kind == "token_choice" and bool(mixed)

    def __init__(self, model, options):
        super().__init__(model, options)
        # Sums of images, and of experts by type and patch, over the examples with
        # finite tokens in all layers.
        self._maps: Any = 0.0
        self._image: Any = 0.0
        self._complete, self.grid = 0, model.grid or (0, 0)
        # By word: its number of tokens, and of their FFN experts.
        self._words = defaultdict(lambda: [0, 0.0])
        self._examples = section.Reservoir.of_options(options)
        self._scores = section.Reservoir(_SCORED, options.seed)

    def new_counts(self, block):
        return _Counts(block)

    def count(self, counts, block, batch):
        record, mask = batch.routing[block.key], batch.mask_of(block)
        served = record.dispatched[mask][:, block.is_present]
        counts.served += served.sum(axis=0, dtype="float64")
        counts.tokens += int(mask.sum())
        gates = _two_highest(record)[mask].astype("float64")
        counts.moments += [gates.sum(axis=0), np.square(gates).sum(axis=0)]

    def update(self, batch):
        super().update(batch)
        by_token, complete = defaultdict(list), np.ones(batch.size, bool)
        scores = {}
        for key, block in self.blocks.items():
            record = batch.routing[key]
            parts = self.counts[key].expert_types.slices().values()
            served = record.dispatched[..., block.is_present]
            by_type = [served[..., part].sum(axis=-1) for part in parts]
            by_token[block.modality].append(np.stack(by_type, axis=-1))
            complete &= batch.finite.get(key, np.ones((batch.size, 1))).all(axis=1)
            scores[key] = _two_highest(record), batch.mask_of(block)
        means = {modality: np.mean(x, axis=0) for modality, x in by_token.items()}
        if "image" in means and self.model.grid is not None:
            self._add_images(batch, means["image"], np.flatnonzero(complete))
        if "text" in means and batch.words is not None:
            self._add_words(batch.words, means["text"][..., 0].tolist(), complete)
        self._scores.offer(
            batch.size,
            lambda index: {
                k: gates[index][mask[index]] for k, (gates, mask) in scores.items()
            },
        )

    def _add_images(self, batch, means, complete):
        maps = of_patches(means, self.grid)
        self._maps = self._maps + maps[complete].sum(axis=0)
        self._image = self._image + batch.images[complete].sum(axis=0, dtype="float64")
        self._complete += len(complete)
        ffn = maps[..., 0].reshape(-1, *self.grid)
        self._examples.offer(
            batch.size,
            lambda index: (np.array(batch.images[index]), np.array(ffn[index])),
        )

    def _add_words(self, captions, counts, complete):
        for words, numbers, is_complete in zip(captions, counts, complete):
            for word, number in zip(words, numbers) if is_complete else ():
                if word and (
                    word in self._words or len(self._words) < section.MAX_WORDS
                ):
                    entry = self._words[word]
                    entry[0] += 1
                    entry[1] += number

    def row(self, block, counts):
        load, scores = counts.load, counts.scores
        gates = [
            f"{scores[f'{gate}_mean']:.3f} ± {scores[f'{gate}_variance'] ** 0.5:.3f}"
            for gate in ("highest", "second")
        ]
        return [
            block.key,
            *(f"{load.shares[name]:.1%}" for name in EXPERT_TYPES),
            round(load.experts_per_token["ffn"], 3),
            f"{load.dropped_choices:.1%}",
            *gates,
        ]

    def finish(self):
        loads = {key: counts.load for key, counts in self.counts.items()}
        table = self.table(
            "Assignments by type of expert, and gates with their standard deviation, "
            "over all data"
        )
        body = [self._load_figure(loads), *self._score_figures(), table]
        body += self._image_figures() + self._word_parts()
        data = {
            "layers": {
                key: {**load._asdict(), **self.counts[key].scores}
                for key, load in loads.items()
            },
            "words": {word: [n, total / n] for word, (n, total) in self._top_words()},
        }
        return section.SectionContent(body, data, self._findings())

    def _load_figure(self, loads):
        parts = [f"{key} {load.shares['ffn']:.0%}" for key, load in loads.items()]
        return section.Figure(
            plot_load_by_type(loads, title="", width=3.6),
            f"Share of assignments to FFN experts by layer: {', '.join(parts)}",
            "The share of each type of expert in all assignments of a layer. The "
            "number on the right is the mean number of FFN experts of a token.",
            "compute_by_type",
        )

    def _score_figures(self):
        """Histograms of the two largest gates in some layers."""
        kept, figures = list(self._scores.kept.values()), []
        for key in section.evenly_spaced([*self.blocks], _PANELS):
            gates = np.concatenate([example[key] for example in kept])
            if not len(gates):
                continue
            scores = RoutingScores(*gates.astype("float64").T)
            figures.append(
                section.Figure(
                    plot_routing_scores({key: scores}, title=""),
                    f"Gates in {key}: the highest has mean "
                    f"{scores.highest.mean():.2f}, the second one "
                    f"{scores.second.mean():.2f}",
                    f"The two highest gates in {key}, of {len(kept)} examples.",
                    f"compute_scores_{section.file_name(key)}",
                )
            )
        return figures

    def _image_figures(self):
        if not self._complete:
            return []
        kept, figures = self._examples.kept, []
        selected = max(counts.selected for counts in self.counts.values())
        numbers = list(kept)
        for start in range(0, len(numbers), _IMAGES):
            own = numbers[start : start + _IMAGES]
            images = np.stack([drawable(kept[number][0]) for number in own])
            maps = np.stack([kept[number][1] for number in own])
            means = [f"example {n}: {m.mean():.2f}" for n, m in zip(own, maps)]
            figures.append(
                section.Figure(
                    plot_compute_maps(
                        images, maps, None, selected, title="", columns=1
                    ),
                    f"FFN experts per patch, mean of the image: {', '.join(means)}",
                    f"Examples {', '.join(map(str, own))}: FFN experts of each patch, "
                    "the mean over layers. The number is the image's mean.",
                    f"compute_maps_{start // _IMAGES + 1}",
                )
            )
        return [*figures, self._mean_figure()]

    def _mean_figure(self):
        maps, present = self._maps / self._complete, {}
        for number, name in enumerate(EXPERT_TYPES):
            if any(counts.expert_types[number] for counts in self.counts.values()):
                present[name] = maps[:, number].reshape(1, *self.grid)
        image = drawable(self._image / self._complete)[None]
        parts = [f"{x} {y.min():.2f} to {y.max():.2f}" for x, y in present.items()]
        return section.Figure(
            plot_type_maps(image, present, title=""),
            f"Experts of each type by position in the image: {', '.join(parts)}",
            f"The mean of all {self._complete:,} images, and experts of each type per "
            "patch by its position. Each type has its own scale.",
            "compute_mean_maps",
        )

    def _top_words(self):
        order = sorted(self._words.items(), key=lambda pair: (-pair[1][0], pair[0]))
        return order[: 4 * self.options.top]

    def _word_parts(self):
        """The most frequent words, with their mean number of FFN experts."""
        if not self._words:
            return []
        words = sorted(self._top_words(), key=lambda pair: -pair[1][1] / pair[1][0])
        chips = [("", word, f"{total / count:.2f}") for word, (count, total) in words]
        text = (
            f"The {len(words)} most frequent of {len(self._words):,} words, each with "
            "the mean number of FFN experts over layers; those with most compute come "
            "first."
        )
        return [text, section.Html(parts().chips(chips))]

    def _findings(self):
        tokens = sum(counts.tokens for counts in self.counts.values())
        if not tokens:
            return []
        choices = sum(x.tokens * x.selected for x in self.counts.values())
        served = [(x.served, x.expert_types.ffn) for x in self.counts.values()]
        ffn = sum(x[:number].sum() for x, number in served)
        total = sum(x.sum() for x, _ in served)
        idle = 1.0 - ffn / max(total, 1e-9)
        level, advice = "good", "at next to no cost"
        if idle < _LEAST_SHARE:
            level, advice = "notice", "train with a lower tau to save compute"
        text = (
            f"FFN experts serve {ffn / tokens:.2f} of {choices / tokens:.2f} choices "
            f"of a token; zero, copy and constant experts serve {idle:.0%} of "
            f"assignments: {advice}."
        )
        return [section.Finding(level, text)]


def _two_highest(record):
    """The two largest gates of each token, (B, N, 2)."""
    return -np.partition(-record.gates, 1, axis=-1)[..., :2]
