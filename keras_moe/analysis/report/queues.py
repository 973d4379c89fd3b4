"""The queues before the experts of each layer of a report, at training's capacity.

Axes: B batch, N tokens, E experts.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import keras
import numpy as np

from keras_moe.analysis.report.section import Batch, Block, Subject
from keras_moe.analysis.routing import expert_queues
from keras_moe.ops import heterogeneous_capacity

# A batch grows for whole groups at most so many times.
_MOST_TIMES = 4
# Bytes of records from which groups are drawn.
_BYTES = 1 << 26


class ShuffledBatches:
    """Batches of random examples, for groups as training makes them.

    Data often come class by class, and tokens that are alike queue before the same
    experts. Records wait until `_BYTES` of them are there; each batch is drawn from
    those that wait.
    """

    def __init__(self, subject: Subject, batch_size: int, seed: int):
        self.batch_size = batch_size
        self._keys = [x.key for x in subject.blocks.values() if x.is_sparse]
        self._generator = np.random.default_rng(seed)
        self._waiting, self._drawn, self._record = [], 0, None

    def add(self, batch: Batch) -> Iterator[Batch]:
        """Adds examples, and gives the batches that are drawn then."""
        if not self._keys:
            return
        self._record = type(batch.routing[self._keys[0]])
        for index in range(batch.size):
            self._waiting.append(self._row(batch, index))
        size = sum(x.nbytes for x in keras.tree.flatten(self._waiting[0]))
        while len(self._waiting) >= max(_BYTES // size, 1) + self.batch_size:
            yield self._draw()

    def rest(self) -> Iterator[Batch]:
        """The batches of all examples that wait; the last one may be smaller."""
        while self._waiting:
            yield self._draw()

    def _row(self, batch, index):
        """What queues need of an example, copied: no view keeps its whole batch."""
        finite = batch.finite or {}
        rows = {}
        for key in self._keys:
            record = batch.routing[key]
            is_finite = finite.get(key, np.ones(record.gates.shape[:2], bool))
            rows[key] = [x[index].copy() for x in (record.affinity, record.gates)]
            rows[key].append(is_finite[index].copy())
        masks = {x: np.array(y[index], bool) for x, y in batch.masks.items()}
        return rows, masks

    def _draw(self):
        rows = []
        for _ in range(min(self.batch_size, len(self._waiting))):
            place = int(self._generator.integers(len(self._waiting)))
            rows.append(self._waiting[place])
            last = self._waiting.pop()
            if place < len(self._waiting):
                self._waiting[place] = last
        records, masks = keras.tree.map_structure(lambda *x: np.stack(x), *rows)
        routing, finite = {}, {}
        for key, (affinity, gates, is_finite) in records.items():
            # Queues read no other field.
            fields = dict.fromkeys(self._record._fields, affinity)
            routing[key] = self._record(**{**fields, "gates": gates})
            finite[key] = is_finite
        start, self._drawn = self._drawn, self._drawn + len(rows)
        return Batch(start, None, None, None, masks, None, routing, None, {}, finite)


class Queues(NamedTuple):
    """The queues before the experts of a layer in one batch.

    Attributes:
        places: int32 (B, N, E), result of `expert_queues`.
        group_tokens: number of tokens of a group, S.
        counts: boolean (B, N), False for padding that is not routed.
        gates: float32 (B, N), the largest gate of each token.
        runs: slices of N by modality.
        group_size: number of examples of a group.
        left_out: number of examples of the batch that fill no group.
    """

    places: np.ndarray
    group_tokens: int
    counts: np.ndarray
    gates: np.ndarray
    runs: dict[str, slice]
    group_size: int
    left_out: int


class LayerQueues:
    """The queues before the experts of one layer."""

    def __init__(self, subject: Subject, blocks: list[Block]):
        self.blocks = blocks
        model = subject.model
        backbone = getattr(model, "backbone", model)
        layer = backbone.get_layer(blocks[0].block).feed_forward
        self.router, self._group_size = layer.router, layer.group_size
        # Examples of a group, which the first batch decides.
        self._images = None
        # A pruned layer has fewer experts than its record.
        self.num_experts = layer.router.num_experts
        self.selected = blocks[0].num_selected_experts
        self.chooses = blocks[0].kind == "token_choice"

    @property
    def name(self) -> str:
        """Name of the layer."""
        return self.blocks[0].block

    @property
    def capacity_factor(self) -> float | None:
        """The capacity factor of training; None without, or with a fixed capacity."""
        return getattr(self.router, "capacity_factor", None)

    @property
    def approximation(self) -> str | None:
        """Sentences on the queues of a transport plan; None where gates make them.

        A record has the plan of inference. The plan of training is another one, as far
        as its groups or its capacity differ.
        """
        affinity = getattr(self.router, "affinity", None)
        if not hasattr(affinity, "iterations"):
            return None
        if not self.chooses and getattr(affinity, "sparse", False):
            return (
                "dropped tokens are approximate. Its sparsity-constrained plan has as "
                "many entries as the capacity, and the recorded one is that of "
                "inference: at a smaller capacity it is cut off, and at a larger one "
                "tokens beyond it are taken as they stand."
            )
        if self._group_size is None or self.blocks[0].group_size is not None:
            return None
        return (
            "dropped tokens are approximate. Its transport plan is that of inference, "
            "where each example is a group by itself, and training plans for groups "
            "of several."
        )

    def read(self, batch: Batch) -> Queues:
        """The queues of a batch, whose tokens compete as they do in training.

        Successive images fill groups. If the first batch is smaller than a group, it
        stands for one; images behind the last whole group are left out. All sections
        share them.
        """
        return batch.once(("queues", self.name), lambda: self._read(batch))

    def _read(self, batch):
        records, counts, runs, length = [], [], {}, 0
        for block in self.blocks:
            record = batch.routing[block.key]
            tokens = record.affinity.shape[1]
            records.append(record)
            counts.append(batch.routed_of(block))
            runs[block.modality] = slice(length, length + tokens)
            length += tokens
        size = len(records[0].affinity)
        per_group, wanted = size, self.images_of(length)
        if wanted is not None:
            self._images = self._images or min(wanted, size)
            per_group = self._images
        used = size // per_group * per_group
        affinity, gates = (
            np.concatenate([getattr(record, field)[:used] for record in records], 1)
            for field in ("affinity", "gates")
        )
        counts = np.concatenate(counts, axis=1)[:used]
        kept = self._kept()
        if getattr(self.router, "method", None) == "router_pred":
            affinity = np.where(kept, affinity, -np.inf)
        places = np.zeros(affinity.shape, "int32")
        if used:
            places = expert_queues(
                affinity,
                self.selected if self.chooses else None,
                self._priority(affinity.shape[:2], runs),
                per_group,
                counts,
            )
        return Queues(
            places,
            per_group * length,
            counts,
            gates.max(axis=-1),
            runs,
            per_group,
            size - used,
        )

    def images_of(self, length: int) -> int | None:
        """The number of images whose tokens compete in training, or None for a
        batch.
        """
        if self._group_size is None:
            return None
        return max(self._group_size // length, 1)

    def capacities(self, group_tokens: int, factor: float | None = None) -> np.ndarray:
        """The capacity of each expert, integers (E,)."""
        router, kept = self.router, self._kept()
        if factor is None and getattr(router, "capacity", None) is not None:
            return np.where(kept, min(router.capacity, group_tokens), 0)
        factor = factor or self.capacity_factor or 1.0
        # Expert choice hides its number, which its config has.
        selected = router.get_config().get("num_selected_experts", 1)
        multiple_of = router.capacity_multiple_of
        expert_types = router.expert_types
        try:
            if not expert_types.zero_computation:
                capacity = router.capacity_of(
                    group_tokens, factor, selected, multiple_of
                )
                return np.where(kept, capacity, 0)
            capacities = heterogeneous_capacity(
                group_tokens,
                expert_types,
                router.tau,
                factor,
                selected,
                router.capacity_rounding,
                multiple_of,
            )
        except ValueError:
            # An image alone is too small a group for this factor.
            return kept.astype("int64")
        return np.repeat(capacities, [expert_types.ffn, expert_types.zero_computation])

    def _kept(self):
        """The experts that serve anybody, boolean (E,); pruning leaves some."""
        experts = np.arange(self.num_experts)
        return np.isin(experts, getattr(self.router, "kept_experts", experts))

    def _priority(self, shape, runs):
        priority = getattr(self.router, "priority", "first_come")
        if isinstance(priority, str):
            # Any order is as good as another where training draws one.
            return "first_come" if priority == "shuffled" else priority
        names = ("image", "text")
        ranks = np.zeros(shape, "float32")
        for rank, modality in enumerate(priority):
            if (run := runs.get(names[modality])) is not None:
                ranks[:, run] = rank
        return ranks


class Groups:
    """The groups in which a section has read the queues of layers."""

    def __init__(self, layers: list[LayerQueues]):
        self.layers = layers
        self._sizes, self._tokens, self._examples = {}, {}, 0
        self._left_out = dict.fromkeys((layer.name for layer in layers), 0)

    def add(self, layer: LayerQueues, queues: Queues) -> None:
        """Adds a layer's queues of a batch."""
        self._sizes.setdefault(layer.name, queues.group_size)
        self._tokens[layer.name] = queues.group_tokens // queues.group_size
        self._left_out[layer.name] += queues.left_out
        if layer is self.layers[0]:
            self._examples += len(queues.places) + queues.left_out

    def paragraphs(self) -> list[str]:
        """Sentences on the groups, and on the examples that fill none."""
        alike = _names_by_text(
            (layer.name, self._sentence(layer))
            for layer in self.layers
            if layer.name in self._sizes
        )
        if len(alike) == 1:
            return [text[0].upper() + text[1:] for text in alike]
        return [f"{', '.join(names)}: {text}" for text, names in alike.items()]

    def _sentence(self, layer):
        size, tokens = self._sizes[layer.name], self._tokens[layer.name]
        wanted = layer.images_of(tokens)
        examples = "1 example" if size == 1 else f"{size:,} examples"
        if wanted is None:
            return f"training groups whole batches; here these have {examples}."
        text = f"the tokens of {examples} compete, as in training."
        if size < wanted:
            text = (
                f"the tokens of {examples} compete here, and of {wanted:,} in "
                "training, which a larger batch_size shows."
            )
        if left_out := self._left_out[layer.name]:
            text += (
                f" {left_out:,} of {self._examples:,} examples at the end fill no "
                "group, and are left out here."
            )
        return text


def whole_groups(subject: Subject, batch_size: int) -> int:
    """A batch size near another one in which groups of training are whole."""
    sizes = set()
    for layer in queues_of_layers(subject, ("token_choice", "expert_choice")):
        shapes = [subject.model.routing[b.key].dispatched.shape for b in layer.blocks]
        lengths = [shape[1] for shape in shapes]
        if None not in lengths and (size := layer.images_of(sum(lengths))) is not None:
            sizes.add(size)
    largest, all_whole = max(sizes, default=1), math.lcm(*sizes)
    if largest > batch_size:
        return largest if largest <= _MOST_TIMES * batch_size else batch_size
    step = all_whole if all_whole <= batch_size else largest
    return batch_size // step * step


def approximations(layers: list[LayerQueues]) -> list[str]:
    """Paragraphs on the layers whose dropped tokens are approximate."""
    alike = _names_by_text(
        (layer.name, text)
        for layer in layers
        if (text := layer.approximation) is not None
    )
    return [f"{', '.join(names)}: {text}" for text, names in alike.items()]


def queues_of_layers(subject: Subject, kinds: tuple[str, ...]) -> list[LayerQueues]:
    """The queues of a model's layers, in order of depth."""
    layers = []
    for blocks in subject.by_layer().values():
        blocks = [block for block in blocks.values() if block.kind in kinds]
        if blocks:
            layers.append(LayerQueues(subject, blocks))
    return layers


def _names_by_text(pairs):
    """The names of layers that have the same text, by text: a page says it once."""
    names = {}
    for name, text in pairs:
        names.setdefault(text, []).append(name)
    return names
