"""A batch of texts in chunks: one chunk of the logits exists at a time.

The loop is over texts, not images: on several devices each then has the logits of its
own images, and all read the same chunk of texts.

Axes: B pairs, C chunk size, P pairs with the padding of the last chunk.
"""

from collections.abc import Callable
from typing import Any

from keras import ops


class Chunks:
    """The chunks of a batch, whose last one is padded."""

    def __init__(self, batch: Any, size: int):
        self.size = size
        if isinstance(batch, int):
            # A batch that is smaller than a chunk needs no padding.
            self.size = max(1, min(size, batch))
        self.count = (batch + self.size - 1) // self.size
        self.padding = self.count * self.size - batch
        self.batch = batch

    def pad(self, x: Any) -> Any:
        """(B, ...) with zeros behind it: (P, ...)."""
        if isinstance(self.padding, int) and self.padding == 0:
            return x
        zeros = ops.zeros((self.padding, *x.shape[1:]), x.dtype)
        return ops.concatenate([x, zeros], axis=0)

    def zeros(self, *shape: int) -> Any:
        """float32 zeros (P, *shape)."""
        return ops.zeros((self.count * self.size, *shape), "float32")

    def part(self, x: Any, number: Any) -> Any:
        """The rows of a chunk of (P, ...): (C, ...)."""
        shape = tuple(x.shape[1:])
        return ops.slice(x, self._start(number, shape), (self.size, *shape))

    def put(self, x: Any, number: Any, rows: Any) -> Any:
        """(P, ...) with other rows in the place of a chunk."""
        return ops.slice_update(x, self._start(number, tuple(x.shape[1:])), rows)

    def unpad(self, x: Any) -> Any:
        """(P, ...) without its padding: (B, ...)."""
        return x[: self.batch]

    def loop(self, step: Callable, carry: tuple) -> tuple:
        """Calls `carry = step(number, carry)` for each chunk."""
        return ops.fori_loop(0, self.count, step, carry)

    def _start(self, number, shape):
        return (number * self.size, *(0 for _ in shape))
