"""An n-gram language model with interpolated Kneser-Ney smoothing."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class _Level(NamedTuple):
    """The n-grams of one order, as sorted keys, and their contexts."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray  # of the counts of each context
    followers: np.ndarray  # distinct tokens after each context
    discount: float


class KneserNey:
    """Interpolated Kneser-Ney with one discount per order, over token ids.

    With the count c(h w) of an n-gram, the number N(h) of distinct tokens after its
    history h, and h' without the oldest token of h:

        p(w | h) = max(c(h w) - d, 0) / c(h) + d N(h) / c(h) p(w | h')

    Below the highest order, c counts the distinct tokens before an n-gram. The lowest
    order is interpolated with the uniform distribution.

    Args:
        documents: token ids of each training document.
        vocabulary_size: number of token ids.
        order: n, the length of the n-grams.

    Reference: Chen and Goodman, *An Empirical Study of Smoothing Techniques for
    Language Modeling*.
    """

    def __init__(
        self, documents: Sequence[Sequence[int]], vocabulary_size: int, order: int
    ):
        # One more id, for what is before a document.
        self.base, self.order = vocabulary_size + 1, order
        if self.base**order >= 2**63:
            raise ValueError(
                f"Expected n-grams that fit 64 bits; received: order={order}, "
                f"vocabulary_size={vocabulary_size}"
            )
        keys = np.concatenate([self._keys(x) for x in documents])
        grams, counts = np.unique(keys, return_counts=True)
        self.levels = [self._level(grams, counts)]
        for length in range(order - 1, 0, -1):
            # Each n-gram of the order above has another token in front.
            grams, counts = np.unique(grams % self.base**length, return_counts=True)
            self.levels.insert(0, self._level(grams, counts))

    def _keys(self, document):
        """The n-gram that ends at each token, as a number whose last digit it is."""
        ids = np.asarray(document, "int64")
        keys = np.zeros(len(ids), "int64")
        for back in range(self.order):
            before = np.full(min(back, len(ids)), self.base - 1)
            shifted = np.concatenate([before, ids[: len(ids) - len(before)]])
            keys += shifted * self.base**back
        return keys

    def _level(self, grams, counts):
        contexts, first = np.unique(grams // self.base, return_index=True)
        once, twice = (counts == 1).sum(), (counts == 2).sum()
        return _Level(
            grams,
            counts,
            contexts,
            np.add.reduceat(counts, first),
            np.diff(np.append(first, len(grams))),
            once / max(once + 2 * twice, 1),
        )

    def log_likelihoods(self, document: Sequence[int]) -> np.ndarray:
        """The log-likelihood of each token, given those before it."""
        keys = self._keys(document)
        p = np.full(len(keys), 1 / (self.base - 1))
        for length, level in enumerate(self.levels, start=1):
            own = keys % self.base**length
            counts = _found(level.grams, level.counts, own)
            totals = _found(level.contexts, level.totals, own // self.base)
            followers = _found(level.contexts, level.followers, own // self.base)
            kept = (
                np.maximum(counts - level.discount, 0) + level.discount * followers * p
            )
            p = np.where(totals > 0, kept / np.maximum(totals, 1), p)
        return np.log(p)


def _found(keys, values, wanted):
    """The value of each wanted key, 0 without one."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], 0)
