"""The patches and the words that each expert likes best.

Axes: B batch, N tokens, E experts.
"""

import numpy as np

from keras_moe.analysis.evenly_spaced import evenly_spaced
from keras_moe.analysis.report.best_tokens import BestPatches, BestWords
from keras_moe.analysis.report.section import (
    Batch,
    Content,
    Html,
    Section,
    Subject,
    Table,
)
from keras_moe.analysis.report.sprites import sprite_figure

_MOST_LAYERS, _MOST_EXPERTS = 6, 32
_TILE, _BYTES = 40, 150_000
_MOST_CONTEXTS = 4


class Favourites(Section):
    """The section on favourites; see `keras_moe.analysis.report.section.Section`."""

    title = "Favourites of each expert"
    anchor = "favourites"
    intro = (
        "The patches of the data with the largest weight of an expert in their output, "
        "each from another image and in the middle of its dimmed surroundings; and the "
        "words. Rows whose patches are alike are experts with a taste."
    )

    def __init__(self, subject, options):
        super().__init__(subject, options)
        self.images, self.all_images = _shown(subject, "image")
        self.texts, self.all_texts = _shown(subject, "text")
        self.patches = {
            block.key: BestPatches(subject.grid, options.top, _TILE, _MOST_EXPERTS)
            for block in self.images
        }
        self.words = {
            block.key: BestWords(options.top, _MOST_EXPERTS) for block in self.texts
        }

    @classmethod
    def fits(cls, subject: Subject) -> bool:
        return any(_shown(subject, each)[1] for each in ("image", "text"))

    def update(self, batch: Batch) -> None:
        for block in self.images:
            if batch.images is not None:
                weights = _weights(batch.routing[block.key], block)
                self.patches[block.key].update(weights, batch.images, batch.start)
        for block in self.texts:
            if batch.words is not None:
                weights = _weights(batch.routing[block.key], block)
                mask = batch.mask_of(block)
                self.words[block.key].update(weights, batch.words, mask)

    def finish(self) -> Content:
        body, data = [], {}
        for shown, count, noun in (
            (self.images, self.all_images, "image"),
            (self.texts, self.all_texts, "text"),
        ):
            if len(shown) < count:
                body.append(
                    f"{len(shown)} of {count} layers with {noun} tokens follow."
                )
        for block in self.images:
            patches = self.patches[block.key]
            if patches.tiles is not None:
                body.append(self._sprite(block, patches))
                data[block.key] = {
                    "experts": patches.experts.numbers.tolist(),
                    "examples": patches.examples.tolist(),
                    "weights": patches.weights.tolist(),
                }
        for block in self.texts:
            words = self.words[block.key]
            if words.experts.numbers is not None:
                rows, values = _word_rows(block, words)
                body.append(_word_table(block, rows, words))
                data[block.key] = values
        return Content(body or ["The data has no tokens that count."], data)

    def _sprite(self, block, patches):
        names = [_name(block, expert) for expert in patches.experts.numbers]
        kept = [
            f"{name}: weights {row[0]:.2f} to {row[row > 0][-1]:.2f}"
            if row[0] > 0
            else f"{name}: none"
            for name, row in zip(names, patches.weights)
        ]
        caption = (
            f"{block.key}: a row of patches for each expert, the best on the left."
        )
        if block.num_experts > len(names):
            caption += (
                f" {len(names)} of {block.num_experts} experts, the busiest of the "
                "first batch."
            )
        if (patches.weights[:, 0] <= 0).any():
            caption += " Empty rows are experts that get no patch."
        alt = f"The patches that each expert of {block.key} likes best. "
        return Html(
            sprite_figure(
                patches.tiles,
                names,
                alt + "; ".join(kept) + ".",
                caption,
                _BYTES // len(self.images),
            )
        )


def _shown(subject, modality):
    """The blocks whose tokens are patches or words: those that are shown, and all."""
    blocks = [
        block
        for key, block in subject.blocks.items()
        if block.modality == modality
        and key != "head"
        and not key.endswith("/token_mixer")
    ]
    if modality == "image" and subject.grid is None:
        return [], 0
    return [blocks[n] for n in evenly_spaced(len(blocks), _MOST_LAYERS)], len(blocks)


def _weights(record, block):
    """How much each expert likes each token, (B, N, E)."""
    if block.kind == "soft":
        # The expert's slots are mixtures of tokens; these are the tokens' shares.
        return record.dispatched
    if block.kind == "mumoe":
        return np.maximum(record.gates, 0.0)
    return np.where(record.dispatched > 0, record.combined, 0.0)


def _name(block, expert):
    kind = block.expert_types[expert]
    return f"{expert}" if kind == "ffn" else f"{expert} {kind}"


def _word_rows(block, words):
    rows, data = [], []
    for row, expert in enumerate(words.experts.numbers):
        best, lifted = words.by_weight(row), words.by_lift(row)
        contexts = [f"{word.context} {word.score:.2f}" for word in best]
        rows.append(
            [
                _name(block, expert),
                " · ".join(word.word for word in best) or None,
                " · ".join(contexts[:_MOST_CONTEXTS]) or None,
                " · ".join(f"{w.word} {w.score:.1f}x ({w.count})" for w in lifted)
                or None,
            ]
        )
        data.append(
            {
                "expert": int(expert),
                "by_weight": [word._asdict() for word in best],
                "by_lift": [word._asdict() for word in lifted],
            }
        )
    return rows, data


def _word_table(block, rows, words):
    head = ["expert", "words by weight", "in captions", "words by lift"]
    caption = (
        f"{block.key}: the words of largest weight, these in their captions, and those "
        "that an expert gets oftener than others do, with the factor and the number"
    )
    if block.num_experts > len(rows):
        caption += f"; {len(rows)} of {block.num_experts} experts, the busiest at first"
    if words.uncounted:
        caption += f"; {words.uncounted:,} rare words are not counted"
    return Table(head, rows, caption)
