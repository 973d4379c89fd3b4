"""An n-gram language model with interpolated Kneser-Ney smoothing."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class _Level(NamedTuple):
    """The n-grams of one order: an id for each, and their counts."""

    keys: np.ndarray  # sorted; id of the last n - 1 tokens * base + the oldest token
    counts: np.ndarray
    totals: np.ndarray  # of the counts after each n-gram of the order below
    followers: np.ndarray  # distinct tokens after each of these
    discount: float

    def ids(self, keys):
        """The id of each n-gram, -1 for unknown ones."""
        index = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[index] == keys, index, -1)


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
        tokens = np.concatenate([self._padded(x) for x in documents])
        end = np.flatnonzero(tokens < vocabulary_size)
        ids, keys = [np.zeros(len(tokens), "int64")], [np.zeros(1, "int64")]
        for back in range(order):
            found, own = np.unique(
                ids[-1] * self.base + np.roll(tokens, back), return_inverse=True
            )
            keys.append(found)
            ids.append(own)
        self.levels = []
        for n in range(1, order + 1):
            at = end
            if n < order:
                # One occurrence for each other token in front.
                at = end[np.unique(ids[n + 1][end], return_index=True)[1]]
            counts = np.bincount(ids[n][at], minlength=len(keys[n]))
            context = np.zeros(len(keys[n]), "int64")
            context[ids[n][end]] = ids[n - 1][end - 1]
            size = len(keys[n - 1])
            once, twice = (counts == 1).sum(), (counts == 2).sum()
            self.levels.append(
                _Level(
                    keys[n],
                    counts,
                    np.bincount(context, counts, size),
                    np.bincount(context, counts > 0, size),
                    once / max(once + 2 * twice, 1),
                )
            )

    def _padded(self, document):
        return np.pad(
            np.asarray(document, "int64"),
            (self.order, 0),
            constant_values=self.base - 1,
        )

    def log_likelihoods(self, document: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The log-likelihood of each token, given those before it.

        Also how many of those, up to n - 1, some training document has in a row with
        another token after them.
        """
        tokens = self._padded(document)
        p = np.full(len(tokens), 1 / (self.base - 1))
        ids = np.zeros(len(tokens), "int64")
        known = np.full(len(tokens), -1)
        for back, level in enumerate(self.levels):
            context = np.roll(ids, 1)
            keys = ids * self.base + np.roll(tokens, back)
            ids = np.where(ids < 0, -1, level.ids(keys))
            counts = np.where(ids < 0, 0, level.counts[ids])
            totals = np.where(context < 0, 0, level.totals[context])
            left = level.discount * level.followers[context] * p
            kept = np.maximum(counts - level.discount, 0) + left
            p = np.where(totals > 0, kept / np.maximum(totals, 1), p)
            known += totals > 0
        return np.log(p[self.order :]), known[self.order :]
