"""Sums over the tokens of a routing record, which all sections on loads read.

Axes: B batch, N tokens, E experts, K selected experts, T tokens that count.
"""

from typing import Any

import numpy as np

from keras_moe.analysis.report.section import Batch, Block
from keras_moe.analysis.routing import entropy

# Classes that are counted one by one: memory must not grow with the largest label.
MAX_CLASSES = 1000


def rows_of_classes(labels: np.ndarray) -> np.ndarray:
    """Boolean (B,), True for examples that are counted by their class."""
    return (labels >= 0) & (labels < MAX_CLASSES)


class LayerCounts:
    """The work of the experts in one routing record."""

    def __init__(self, block: Block):
        self.block = block
        self.tokens = self.unserved = self.broken = 0
        self.served, self.mass, self.demand = np.zeros((3, block.num_experts))

    def update(self, batch: Batch) -> None:
        """Adds a batch."""
        record, counts = batch.routing[self.block.key], batch.routed_of(self.block)
        served = record.dispatched[counts]
        self.tokens += len(served)
        self.broken += batch.num_broken(self.block)
        self.unserved += int((served.sum(axis=1) == 0).sum())
        self.served += served.sum(axis=0, dtype="float64")
        self.mass += record.combined[counts].sum(axis=0, dtype="float64")
        self.demand += demand(self.block, record, counts).sum(axis=0, dtype="float64")

    @classmethod
    def together(cls, name: str, parts: list["LayerCounts"]) -> "LayerCounts":
        """The counts of a layer that several modalities share."""
        total = cls(parts[0].block._replace(key=name))
        for part in parts:
            total.tokens += part.tokens
            total.unserved += part.unserved
            total.broken += part.broken
            total.served += part.served
            total.mass += part.mass
            total.demand += part.demand
        return total

    @property
    def work(self) -> np.ndarray:
        """(E,), what the experts do: their tokens, or weights where all serve all."""
        return self.served if self.block.is_sparse else self.mass

    @property
    def shares(self) -> np.ndarray:
        """(E,), the parts of the work that the experts do; sum 1."""
        return self.work / max(self.work.sum(), 1e-12)

    @property
    def dropped(self) -> float:
        """The part of the tokens' choices that no expert served."""
        return float(1.0 - self.served.sum() / max(self.demand.sum(), 1.0))

    @property
    def entropy(self) -> float:
        """The entropy of the shares over log E; 1 is a balanced load.

        E counts the experts that are there.
        """
        number = int(self.block.is_present.sum())
        if number < 2:
            return 1.0
        return float(entropy(self.shares) / np.log(number))


def demand(block: Block, record: Any, counts: np.ndarray) -> np.ndarray:
    """The experts that tokens chose, (T, E) of 0 and 1, whether they served or not."""
    served = record.dispatched[counts]
    if block.kind != "token_choice" or block.capacity_factor is None:
        return served
    affinity, is_present = record.affinity[counts], block.is_present
    if block.pruning not in (None, "router_pred_skip"):
        # Tokens take the best of the others.
        affinity = np.where(is_present, affinity, -np.inf)
    chosen = np.argsort(-affinity, axis=1, kind="stable")
    chosen = chosen[:, : block.num_selected_experts or 1]
    result = np.zeros_like(served)
    np.put_along_axis(result, chosen, 1.0, axis=1)
    # Routers may choose by another rule, and what they serve was chosen. A choice of a
    # pruned expert is lost, and not dropped by a capacity.
    return np.maximum(np.where(is_present, result, 0.0), served)
