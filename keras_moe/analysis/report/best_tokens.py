"""The patches and the words that each expert likes best, in one pass over data.

Axes: B batch, N tokens, E experts, X shown experts, T height and width of a tile.
"""

from typing import Any, NamedTuple

import numpy as np

from keras_moe.analysis.report.sprites import patch_tile
from keras_moe.analysis.tokens import of_patches

# Further words are not counted: a tokenizer has fewer.
MAX_WORDS = 65_536


class Experts:
    """The experts that are shown: all, or the busiest of the first batch.

    Args:
        most: number of experts that are shown.
    """

    def __init__(self, most: int = 32):
        self.most, self.numbers = most, None

    def choose(self, weights: np.ndarray) -> np.ndarray:
        """The numbers of the experts, ascending.

        Args:
            weights: (tokens, E), of the first batch when called first.
        """
        if self.numbers is None:
            load = np.asarray(weights).sum(axis=0)
            self.numbers = np.sort(np.argsort(-load, kind="stable")[: self.most])
        return self.numbers


class BestPatches:
    """The patches with the largest weights for each expert, each of another image.

    Memory is that of the tiles, X times their number for an expert.
    """

    def __init__(
        self, grid: tuple[int, int], count: int = 8, size: int = 40, most: int = 32
    ):
        self.grid, self.count, self.size = grid, count, size
        self.experts = Experts(most)
        self.weights = self.examples = self.tiles = None

    def update(self, weights: Any, images: Any, start: int = 0) -> None:
        """Reads a batch."""
        weights = of_patches(np.asarray(weights, "float32"), self.grid)
        shown = self.experts.choose(weights.reshape(-1, weights.shape[-1]))
        weights = weights[..., shown]
        if self.tiles is None:
            shape = (len(shown), self.count)
            self.weights = np.zeros(shape, "float32")
            self.examples = np.full(shape, -1, "int64")
            self.tiles = np.zeros((*shape, self.size, self.size, 4), "uint8")
        best, places = weights.max(axis=1), weights.argmax(axis=1)
        for row in range(len(shown)):
            # Equal weights leave the first image where it is.
            all_weights = np.concatenate([self.weights[row], best[:, row]])
            order = np.argsort(-all_weights, kind="stable")[: self.count]
            if order.max() < self.count:
                continue
            examples, tiles = self.examples[row].copy(), self.tiles[row].copy()
            for place, winner in enumerate(order):
                index = winner - self.count
                self.weights[row, place] = all_weights[winner]
                if index < 0:
                    self.examples[row, place] = examples[winner]
                    self.tiles[row, place] = tiles[winner]
                elif all_weights[winner] > 0:
                    self.examples[row, place] = start + index
                    self.tiles[row, place, ..., :3] = patch_tile(
                        images[index], self.grid, places[index, row], self.size
                    )
                    self.tiles[row, place, ..., 3] = 255


class Word(NamedTuple):
    """A word that an expert likes.

    Attributes:
        word: string of the token; text of others.
        score: weight in the output, or lift over the base rate.
        context: words around it; text of others.
        count: number of times that the expert served it.
    """

    word: str
    score: float
    context: str
    count: int


class BestWords:
    """The words with the largest weights for each expert, and those it gets too often.

    Memory grows with the number of different words, up to a bound.
    """

    def __init__(self, count: int = 8, most: int = 32, window: int = 3):
        self.count, self.window = count, window
        self.experts = Experts(most)
        # For each expert a dict from a word to its weight and context.
        self._best: list[dict[str, tuple[float, str]]] = []
        self._numbers: dict[str, int] = {}
        self._served = np.zeros((0, 0))
        self._all = np.zeros(0)
        self.uncounted = 0

    def update(self, weights: Any, words: list[list[str]], mask: Any = None) -> None:
        """Reads a batch."""
        weights = np.asarray(weights, "float32")
        rows, places = np.nonzero(
            np.array([[bool(word) for word in row] for row in words], bool)
            & (True if mask is None else np.asarray(mask, bool))
        )
        if not len(rows):
            return
        weights = weights[rows, places]
        shown = self.experts.choose(weights)
        weights = weights[:, shown]
        if not self._best:
            self._best = [{} for _ in shown]
            self._served = np.zeros((0, len(shown)))
        strings = [words[row][place] for row, place in zip(rows, places)]
        self._count(strings, weights > 0)
        for expert, best in enumerate(self._best):
            self._keep_best(best, weights[:, expert], strings, words, rows, places)

    def by_weight(self, row: int) -> list[Word]:
        """The different words of largest weight."""
        ranked = sorted(self._best[row].items(), key=lambda item: -item[1][0])
        return [
            Word(word, weight, context, self._times(word, row))
            for word, (weight, context) in ranked[: self.count]
        ]

    def by_lift(self, row: int, min_count: int = 3) -> list[Word]:
        """The words whose share of the expert's tokens exceeds that of all
        tokens most.
        """
        served, totals = self._served[:, row], self._all
        base = totals / max(totals.sum(), 1.0)
        own = served / max(served.sum(), 1.0)
        lift = np.divide(own, base, out=np.zeros_like(own), where=base > 0)
        lift = np.where((served >= min_count) & (lift > 1.0), lift, 0.0)
        # Words that no other expert gets have one lift: the frequent ones go first.
        order = np.lexsort((-served, -lift))[: self.count]
        words = list(self._numbers)
        return [
            Word(words[i], float(lift[i]), "", int(served[i]))
            for i in order
            if lift[i] > 0
        ]

    def _count(self, strings, served):
        numbers = []
        for word in strings:
            if word not in self._numbers and len(self._numbers) < MAX_WORDS:
                self._numbers[word] = len(self._numbers)
            numbers.append(self._numbers.get(word, -1))
        numbers = np.array(numbers)
        self.uncounted += int((numbers < 0).sum())
        known = numbers >= 0
        if (missing := len(self._numbers) - len(self._all)) > 0:
            # Twice the room, so that growth costs little.
            missing = max(missing, len(self._all))
            self._all = np.pad(self._all, (0, missing))
            self._served = np.pad(self._served, ((0, missing), (0, 0)))
        np.add.at(self._all, numbers[known], 1.0)
        np.add.at(self._served, numbers[known], served[known].astype("float64"))

    def _keep_best(self, best, weights, strings, words, rows, places):
        floor = 0.0
        if len(best) >= self.count:
            floor = sorted(weight for weight, _ in best.values())[-self.count]
        for token in np.argsort(-weights, kind="stable"):
            weight = float(weights[token])
            if weight <= floor or weight <= 0.0:
                break
            word = strings[token]
            if word in best and best[word][0] >= weight:
                continue
            context = self._context(words[rows[token]], int(places[token]))
            best[word] = (weight, context)
            if len(best) > self.count:
                least = min(best, key=lambda key: best[key][0])
                del best[least]
                floor = min(weight for weight, _ in best.values())

    def _context(self, row, place):
        """The word in brackets among its neighbours."""
        before = [word for word in row[max(place - self.window, 0) : place] if word]
        after = [word for word in row[place + 1 : place + 1 + self.window] if word]
        return " ".join([*before, f"[{row[place]}]", *after])

    def _times(self, word, row):
        number = self._numbers.get(word)
        return 0 if number is None else int(self._served[number, row])
