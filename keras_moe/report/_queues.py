"""Queues in training. Axes: B batch, N tokens, S group_size, E experts."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe.analysis.routing import expert_queues
from keras_moe.ops import Routing, heterogeneous_capacity
from keras_moe.report._data import mapped
from keras_moe.report.model import Block, ReportedModel
from keras_moe.report.section import Batch

# A batch may grow by at most this factor to make its groups whole.
_MOST_TIMES = 4
# Bytes of records that wait to be drawn from.
_BYTES = 1 << 26


class ShuffledBatches:
    """Batches of random examples, since data often come class by class."""

    def __init__(self, model: ReportedModel, batch_size: int, seed: int):
        self.batch_size = batch_size
        self._keys = [x.key for x in model.blocks.values() if x.is_sparse]
        self._generator = np.random.default_rng(seed)
        self._waiting = []

    def add(self, batch: Batch) -> Iterator[Batch]:
        """Adds examples, and yields batches once enough are waiting."""
        if not self._keys:
            return
        parts = {}
        for key in self._keys:
            record = batch.routing[key]
            is_finite = batch.finite.get(key, np.ones(record.gates.shape[:2], bool))
            parts[key] = [record.affinity, record.gates, is_finite]
        parts = (parts, batch.masks)
        for index in range(batch.size):
            # Copied, so that batches can be freed.
            row = mapped(lambda x, i=index: np.array(x[i]), parts)
            self._waiting.append(row)
        size = sum(x.nbytes for x in keras.tree.flatten(self._waiting[0]))
        while len(self._waiting) >= max(_BYTES // size, 1) + self.batch_size:
            yield self._draw()

    def rest(self) -> Iterator[Batch]:
        """Yields batches of the remaining examples; the last one may be smaller."""
        while self._waiting:
            yield self._draw()

    def _draw(self):
        rows = []
        for _ in range(min(self.batch_size, len(self._waiting))):
            index = int(self._generator.integers(len(self._waiting)))
            rows.append(self._waiting[index])
            last = self._waiting.pop()
            if index < len(self._waiting):
                self._waiting[index] = last
        parts, masks = mapped(lambda *x: np.stack(x), *rows)
        routing, finite = {}, {}
        for key, (affinity, gates, is_finite) in parts.items():
            # Queues use no other field.
            fields = {**dict.fromkeys(Routing._fields, affinity), "gates": gates}
            routing[key], finite[key] = Routing(**fields), is_finite
        return Batch(0, None, None, None, masks, None, routing, None, finite, {})


class Queues(NamedTuple):
    """The expert queues of a layer in one batch."""

    positions: np.ndarray  # int32 (B, N, E), the result of `expert_queues`
    group_tokens: int  # S, tokens per group
    counts: np.ndarray  # Boolean (B, N), False for padding that is not routed
    gates: np.ndarray  # float32 (B, N), each token's largest gate
    runs: dict[str, slice]  # Slices of N by modality
    group_size: int  # Examples per group
    left_out: int  # Examples of the batch beyond the last whole group


class LayerQueues:
    """The expert queues of one layer."""

    def __init__(self, model: ReportedModel, blocks: list[Block]):
        self.blocks = blocks
        self.name = blocks[0].block
        layer = model.backbone.get_layer(self.name).feed_forward
        self.router, self._group_size = layer.router, layer.group_size
        # Examples per group, set by the first batch; and in training.
        self._examples = self._wanted = None
        # Examples read, and those that fill no group.
        self._seen = self._left_out = 0
        # A pruned layer has fewer experts than its record.
        self.num_experts = layer.router.num_experts
        self.selected, self.members = blocks[0].num_selected_experts, blocks[0].members
        self.chooses = blocks[0].kind == "token_choice"

    @property
    def capacity_factor(self) -> float | None:
        """Capacity factor of training; None without one or with a fixed capacity."""
        return getattr(self.router, "capacity_factor", None)

    def read(self, batch: Batch) -> Queues:
        """The queues of a batch, by whole groups as in training; cached in it."""
        queues = batch.once(("queues", self.name), lambda: self._read(batch))
        self._examples = self._examples or queues.group_size
        return queues

    def count_groups(self, queues: Queues) -> None:
        """Counts the examples of a batch for `group_texts`."""
        self._wanted = self.examples_of(queues.group_tokens // queues.group_size)
        self._seen += len(queues.positions) + queues.left_out
        self._left_out += queues.left_out

    def _read(self, batch):
        records = [batch.routing[block.key] for block in self.blocks]
        counts = np.concatenate([batch.routed_of(x) for x in self.blocks], axis=1)
        runs, length = {}, 0
        for block, record in zip(self.blocks, records):
            tokens = record.affinity.shape[1]
            runs[block.modality] = slice(length, length + tokens)
            length += tokens
        size = per_group = len(counts)
        length *= self.members
        if (wanted := self.examples_of(length)) is not None:
            per_group = self._examples or min(wanted, size)
        used = size // per_group * per_group
        affinity, gates = (
            np.concatenate([getattr(record, field)[:used] for record in records], 1)
            for field in ("affinity", "gates")
        )
        counts = counts[:used]
        if getattr(self.router, "method", None) == "router_pred":
            affinity = np.where(self._kept(), affinity, -np.inf)
        positions = np.zeros(affinity.shape, "int32")
        if used:
            selected = None
            if self.chooses:
                selected = (self.selected or 1) // self.members
            priority = self._priority(affinity.shape[:2], runs)
            # Each member of an ensemble has its own experts, and queues.
            positions = [
                expert_queues(own, selected, priority, per_group, counts)
                for own in np.split(affinity, self.members, axis=-1)
            ]
            positions = np.concatenate(positions, axis=-1)
        return Queues(
            positions,
            per_group * length,
            counts,
            gates.max(axis=-1),
            runs,
            per_group,
            size - used,
        )

    def examples_of(self, length: int) -> int | None:
        """Examples of `length` routed tokens per training group; None for a batch."""
        if self._group_size is None:
            return None
        return max(self._group_size // length, 1)

    def capacities(self, group_tokens: int, factor: float | None = None) -> np.ndarray:
        """Capacity of each expert, integers (E,)."""
        router, kept = self.router, self._kept()
        if factor is None and getattr(router, "capacity", None) is not None:
            return np.where(kept, min(router.capacity, group_tokens), 0)
        factor = factor or self.capacity_factor or 1.0
        # Expert choice keeps K private, but its config has it.
        selected = router.get_config().get("num_selected_experts", 1)
        types, multiple_of = router.expert_types, router.capacity_multiple_of
        try:
            if not types.zero_computation:
                capacity = router.capacity_of(
                    group_tokens, factor, selected, multiple_of
                )
                return np.where(kept, capacity, 0)
            ffn, in_place = heterogeneous_capacity(
                group_tokens,
                router.balanced_types,
                router.tau,
                factor,
                selected,
                rounding=router.capacity_rounding,
                multiple_of=multiple_of,
            )
        except ValueError:
            # A single example is too small a group for this factor.
            return kept.astype("int64")
        # Pruning may have kept no zero-computation expert.
        sizes: list[Any] = [ffn, in_place or 0]
        capacities = np.repeat(sizes, [types.ffn, types.zero_computation])
        return np.where(kept, capacities, 0)

    def _kept(self):
        """Mask (E,) of the experts that are not pruned."""
        experts = np.arange(self.num_experts)
        return np.isin(experts, getattr(self.router, "kept_experts", experts))

    def _priority(self, shape, runs):
        priority = getattr(self.router, "priority", "first_come")
        if isinstance(priority, str):
            # Training shuffles, so that any order represents it.
            return "first_come" if priority == "shuffled" else priority
        names = ("image", "text")
        ranks = np.zeros(shape, "float32")
        for rank, modality in enumerate(priority):
            if (run := runs.get(names[modality])) is not None:
                ranks[:, run] = rank
        return ranks

    def _is_approximate(self):
        """Whether records hold another transport plan than that of training."""
        affinity = getattr(self.router, "affinity", None)
        if not hasattr(affinity, "iterations"):
            return False
        # A sparsity-constrained plan has as many entries as the capacity.
        is_cut = not self.chooses and getattr(affinity, "sparse", False)
        return is_cut or (
            self._group_size is not None and self.blocks[0].group_size is None
        )

    def group_text(self) -> str:
        """Sentences on the groups that were read."""
        text = f"Examples per group: {self._examples:,}"
        if self._wanted is None:
            text += "; training groups whole batches."
        elif self._examples == self._wanted:
            text += ", as in training."
        else:
            text += f", but {self._wanted:,} in training (raise batch_size)."
        if self._left_out:
            text += (
                f" {self._left_out:,} of {self._seen:,} examples at the end fill no "
                "group and are left out here."
            )
        if self._is_approximate():
            text += (
                " Drops are approximate, since the recorded transport plan is that of "
                "inference."
            )
        return text


def group_texts(layers: list[LayerQueues]) -> list[str]:
    """Paragraphs on the groups of layers."""
    names = {}
    for layer in layers:
        names.setdefault(layer.group_text(), []).append(layer.name)
    if len(names) == 1:
        return [*names]
    return [f"{', '.join(own)}: {text}" for text, own in names.items()]


def whole_groups(model: ReportedModel, batch_size: int) -> int:
    """A batch size near the given one that makes training groups whole."""
    sizes = set()
    for layer in queues_of_layers(model, ("token_choice", "expert_choice")):
        records = [model.keras_model.routing[block.key] for block in layer.blocks]
        lengths = [record.dispatched.shape[1] for record in records]
        if None not in lengths:
            sizes.add(layer.examples_of(layer.members * sum(lengths)))
    step = math.lcm(*(sizes - {None}))
    if step > _MOST_TIMES * batch_size:
        return batch_size
    return max(batch_size // step, 1) * step


def queues_of_layers(
    model: ReportedModel, kinds: tuple[str, ...], modality: str | None = None
) -> list[LayerQueues]:
    layers = []
    for blocks in model.by_layer().values():
        blocks = [block for block in blocks.values() if block.kind in kinds]
        if blocks and modality in (None, *(block.modality for block in blocks)):
            layers.append(LayerQueues(model, blocks))
    return layers
