"""Top tokens. Axes: B batch, N tokens, E experts, X shown experts, T tile size."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from keras_moe.analysis.routing import of_patches
from keras_moe.report import section
from keras_moe.report._figures import draw_patches
from keras_moe.report._markup import COLOURS, parts, patch_tile, sheet_of, sprite_figure
from keras_moe.report.model import IMAGE, TEXT

_MOST_LAYERS, _MOST_EXPERTS = 6, 32
_TILE, _BYTES = 40, 150_000
_MOST_CONTEXTS, _MOST_IN_FRONT = 4, 16


class BestPatches:
    """Patches of different images with the largest weights, for the busiest experts."""

    def __init__(
        self,
        grid: tuple[int, int],
        count: int = 8,
        size: int = _TILE,
        most: int = _MOST_EXPERTS,
    ):
        self.grid, self.count, self.size, self.most = grid, count, size, most
        # Numbers of the shown experts, set by the first batch.
        self.experts = np.zeros(0, int)
        self.weights = self.examples = self.tiles = np.zeros((0, count))

    def update(self, weights: np.ndarray, images: Any, start: int = 0) -> None:
        """Reads a batch of weights (B, N, E)."""
        weights = of_patches(np.asarray(weights, "float32"), self.grid)
        if not len(self.experts):
            self.experts = _busiest(weights, self.most)
            shape = (len(self.experts), self.count)
            self.weights = np.zeros(shape, "float32")
            self.examples = np.full(shape, -1, "int64")
            self.tiles = np.zeros((*shape, self.size, self.size, 4), "uint8")
        weights = weights[..., self.experts]
        best, patches = weights.max(axis=1), weights.argmax(axis=1)
        for row in range(len(self.experts)):
            # Of equal weights the first image stays.
            candidates = np.concatenate([self.weights[row], best[:, row]])
            order = np.argsort(-candidates, kind="stable")[: self.count]
            if order.max() < self.count:
                continue
            examples, tiles = self.examples[row].copy(), self.tiles[row].copy()
            for rank, winner in enumerate(order):
                index = winner - self.count
                self.weights[row, rank] = candidates[winner]
                if index < 0:
                    self.examples[row, rank] = examples[winner]
                    self.tiles[row, rank] = tiles[winner]
                elif candidates[winner] > 0:
                    self.examples[row, rank] = start + index
                    self.tiles[row, rank, ..., :3] = patch_tile(
                        images[index], self.grid, patches[index, row], self.size
                    )
                    self.tiles[row, rank, ..., 3] = 255


def _busiest(weights, most):
    """The experts with the largest total weights, ascending."""
    load = np.asarray(weights).reshape(-1, weights.shape[-1]).sum(axis=0)
    return np.sort(np.argsort(-load, kind="stable")[:most])


class Word(NamedTuple):
    """A top word of an expert."""

    word: str  # String of the token; untrusted
    score: float  # Combine weight, or lift over the base rate
    context: str  # Words around it; untrusted
    count: int  # How often the expert served it


class BestWords:
    """Words with the largest weights or lift, up to `MAX_WORDS`, by busiest expert."""

    def __init__(self, count: int = 8, most: int = _MOST_EXPERTS, window: int = 3):
        self.count, self.most, self.window = count, most, window
        # Numbers of the shown experts, set by the first batch.
        self.experts = np.zeros(0, int)
        # For each expert, weight and context by word.
        self._best: list[dict[str, tuple[float, str]]] = []
        # How often each expert served a word, and how often it occurred.
        self._served: list[Counter] = []
        self._all = Counter()

    def update(
        self,
        weights: np.ndarray,
        words: list[list[str]],
        mask: np.ndarray | bool = True,
    ) -> None:
        """Reads a batch of weights (B, N, E)."""
        weights = np.asarray(weights, "float32")
        is_word = np.array([[bool(word) for word in row] for row in words], bool)
        rows, positions = np.nonzero(is_word & np.asarray(mask, bool))
        if not len(rows):
            return
        weights = weights[rows, positions]
        if not len(self.experts):
            self.experts = _busiest(weights, self.most)
            self._best = [{} for _ in self.experts]
            self._served = [Counter() for _ in self.experts]
        weights = weights[:, self.experts]
        tokens = [(words[row], position) for row, position in zip(rows, positions)]
        strings = [row[position] for row, position in tokens]
        for word in strings:
            if word in self._all or len(self._all) < section.MAX_WORDS:
                self._all[word] += 1
        for token, expert in zip(*np.nonzero(weights > 0)):
            if strings[token] in self._all:
                self._served[expert][strings[token]] += 1
        for expert, best in enumerate(self._best):
            self._keep_best(best, weights[:, expert], tokens)

    def by_weight(self, row: int) -> list[Word]:
        """The distinct words with the largest weights."""
        ranked = sorted(self._best[row].items(), key=lambda item: -item[1][0])
        return [
            Word(word, weight, context, self._served[row][word])
            for word, (weight, context) in ranked[: self.count]
        ]

    def by_lift(self, row: int, min_count: int = 3) -> list[Word]:
        """The words most over-represented among the expert's tokens."""
        own = self._served[row]
        total, everything = sum(own.values()), sum(self._all.values())
        words = [
            Word(word, own[word] / total / (count / everything), "", own[word])
            for word, count in self._all.items()
            if own[word] >= min_count
        ]
        words = [word for word in words if word.score > 1.0]
        # Words that only this expert gets have equal lift: frequent ones first.
        words.sort(key=lambda word: (-word.score, -word.count))
        return words[: self.count]

    def _keep_best(self, best, weights, tokens):
        floor = 0.0
        if len(best) >= self.count:
            floor = sorted(weight for weight, _ in best.values())[-self.count]
        for token in np.argsort(-weights, kind="stable"):
            weight = float(weights[token])
            if weight <= floor or weight <= 0.0:
                break
            row, position = tokens[token]
            word = row[position]
            if word in best and best[word][0] >= weight:
                continue
            # The word in brackets among its neighbours.
            before = row[max(position - self.window, 0) : position]
            after = row[position + 1 : position + 1 + self.window]
            context = " ".join(filter(None, [*before, f"[{word}]", *after]))
            best[word] = (weight, context)
            if len(best) > self.count:
                del best[min(best, key=lambda key: best[key][0])]
                floor = min(weight for weight, _ in best.values())


class TopTokens(section.Section):
    """The section on the tokens with the largest weights."""

    title = "Top tokens of each expert"
    anchor = "top-tokens"
    intro = (
        "The patches with the largest weight of an expert in their output, each from "
        "another image and in the middle of its dimmed surroundings; and the words. A "
        "row of similar patches is an expert that has specialised in them; an empty "
        f"row is an expert without a patch. Up to {_MOST_LAYERS} layers and "
        f"{_MOST_EXPERTS} experts, the busiest of the first batch, are shown."
    )

    def __init__(self, model, options):
        super().__init__(model, options)
        self.images, self.texts = _shown(model, IMAGE), _shown(model, TEXT)
        grid = model.grid or (0, 0)
        self.patches = {x.key: BestPatches(grid, options.top) for x in self.images}
        self.words = {block.key: BestWords(options.top) for block in self.texts}
        # The start and the end of texts, which are no words.
        tokenizer: Any = getattr(model.keras_model, "preprocessor", None)
        ids = (getattr(tokenizer, name, None) for name in ("start_id", "end_id"))
        self._special = {
            tokenizer.tokenizer.id_to_token(id) for id in ids if id is not None
        }

    @classmethod
    def fits(cls, model):
        return any(model.of_tokens(modality) for modality in (IMAGE, TEXT))

    def update(self, batch):
        words = [[self._word(word) for word in row] for row in batch.words or ()]
        for block in self.images:
            weights = _weights(batch.routing[block.key], block)
            self.patches[block.key].update(weights, batch.images, batch.start)
        for block in self.texts:
            weights = _weights(batch.routing[block.key], block)
            mask = batch.mask_of(block)
            self.words[block.key].update(weights, words, mask)

    def _word(self, token):
        """A token; empty if it is special or punctuation."""
        is_word = token not in self._special and any(map(str.isalnum, token))
        return token if is_word else ""

    def finish(self):
        body, data = [], {}
        for block in self.images:
            best = self.patches[block.key]
            if len(best.experts):
                body.append(self._sprite(block, best))
                data[block.key] = {
                    field: getattr(best, field).tolist()
                    for field in ("experts", "examples", "weights")
                }
        for block in self.texts:
            best = self.words[block.key]
            if len(best.experts):
                cards, data[block.key] = _word_cards(block, best)
                body += cards
        return section.SectionContent(body, data) if body else section.NO_TOKENS

    def front(self):
        """A drawing of what experts of the last layer with images look at, if any."""
        layers = [x for x in self.images if len(self.patches[x.key].experts)]
        if not layers:
            return None
        block, best = layers[-1], self.patches[layers[-1].key]
        experts = best.experts[:_MOST_IN_FRONT]
        names = [f"expert {block.expert_name(expert)}" for expert in experts]
        sheet = sheet_of(best.tiles[: len(experts)])
        title = f"{block.short_key}: patches of largest weight"
        return draw_patches(sheet, names, title)

    def _sprite(self, block, best):
        names = [block.expert_name(expert) for expert in best.experts]
        weights = [
            f"{name}: weights {row[0]:.2f} to {row[row > 0][-1]:.2f}"
            if row[0] > 0
            else f"{name}: none"
            for name, row in zip(names, best.weights)
        ]
        caption = (
            f"{block.key}: a row of patches for each expert, the best on the left."
        )
        alt = f"The top patches of each expert of {block.key}. {'; '.join(weights)}."
        max_bytes = _BYTES // len(self.images)
        return section.Html(sprite_figure(best.tiles, names, alt, caption, max_bytes))


def _shown(model, modality):
    return section.evenly_spaced(model.of_tokens(modality), _MOST_LAYERS)


def _weights(record, block):
    """Weight of each expert for each token, (B, N, E)."""
    if block.kind == "soft":
        # An expert's slots mix tokens; these are the tokens' shares.
        return record.dispatched
    if block.kind == "mumoe":
        return np.maximum(record.gates, 0.0)
    return np.where(record.dispatched > 0, record.combined, 0.0)


def _word_cards(block, best):
    """A card with each expert's words, and the data."""
    cards, data = [], []
    for row, expert in enumerate(best.experts):
        heaviest, lifted = best.by_weight(row), best.by_lift(row)
        contexts = [f"{word.context} {word.score:.2f}" for word in heaviest]
        lifts = [f"{word.word} {word.score:.1f}x" for word in lifted]
        colour, name = f"c{int(expert) % COLOURS}", block.expert_name(expert)
        texts = ([word.word for word in heaviest], lifts, contexts[:_MOST_CONTEXTS])
        cards.append((colour, name, *map(" · ".join, texts)))
        data.append(
            {
                "expert": int(expert),
                "by_weight": [word._asdict() for word in heaviest],
                "by_lift": [word._asdict() for word in lifted],
            }
        )
    text = (
        f"{block.key}: each expert's words of largest weight, the words that it gets "
        "more often than the other experts do, by what factor, and the first words in "
        "their captions. Punctuation is left out."
    )
    return [text, section.Html(parts().words(cards))], data
