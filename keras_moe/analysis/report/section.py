"""A section of the report, and all that it reads and gives.

Axes: B batch, N tokens, E experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

KINDS = ("token_choice", "expert_choice", "soft", "mumoe")
LEVELS = ("good", "notice", "problem")
# The kind of experts that a pruned layer has lost, or whose place nobody takes.
PRUNED = "pruned"


class Block(NamedTuple):
    """A routing record of the model.

    Attributes:
        key: key of `model.routing`, such as `"block_1"`, `"image/block_3"` or `"head"`.
        block: name of its layer without that of a modality that shares it:
            `"block_3"` of a shared trunk, `"image/block_3"` of a tower of its own.
        modality: modality of its tokens, `"image"` or `"text"`.
        kind: one of `"token_choice"`, `"expert_choice"`, `"soft"` and `"mumoe"`.
        expert_types: kind of each of the E experts of the record: `"ffn"`, of MoE++
            `"zero"`, `"copy"` or `"constant"`, and `"pruned"` of those that are gone.
        num_selected_experts: K of token choice, or None.
        capacity_factor: capacity factor at inference, or None where nothing is
            dropped.
        group_size: number of tokens that are routed together at inference; None where
            each example is a group.
        training_capacity_factor: capacity factor while training, or None.
        pruning: method by which experts are pruned, that of
            `keras_moe.analysis.prune_experts`, or None.
        routes_padding: whether padding is routed like any other token, and takes
            capacity.
    """

    key: str
    block: str
    modality: str
    kind: str
    expert_types: tuple[str, ...]
    num_selected_experts: int | None
    capacity_factor: float | None
    group_size: int | None
    training_capacity_factor: float | None = None
    pruning: str | None = None
    routes_padding: bool = False

    @property
    def is_sparse(self) -> bool:
        """Whether experts serve some tokens only."""
        return self.kind in ("token_choice", "expert_choice")

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.expert_types)

    @property
    def is_present(self) -> np.ndarray:
        """Boolean (E,), False for pruned experts."""
        return np.array([kind != PRUNED for kind in self.expert_types])

    @property
    def is_of_tokens(self) -> bool:
        """Whether it routes tokens: neither a head, nor the channels of a mixer."""
        return self.key != "head" and not self.key.endswith("/token_mixer")


class Subject(NamedTuple):
    """The model that is reported on.

    Attributes:
        model: model with `routing`.
        name: name for titles; text of others, to be escaped.
        blocks: its routing records by key, in order of depth.
        grid: numbers of patches down and across, or None without images.
        class_names: names of the classes of labels, or None where they have none;
            text of others, to be escaped.
        modalities: modalities that it takes, `"image"`, `"text"`, or both.
    """

    model: Any
    name: str
    blocks: dict[str, Block]
    grid: tuple[int, int] | None
    class_names: tuple[str, ...] | None
    modalities: tuple[str, ...]

    def by_layer(self) -> dict[str, dict[str, Block]]:
        """The records of each layer by modality, in order of depth.

        A layer that both modalities share has two.
        """
        layers = {}
        for block in self.blocks.values():
            layers.setdefault(block.block, {})[block.modality] = block
        return layers

    def class_name(self, label: int) -> str:
        """The name of a class, or its number.

        Args:
            label: number of the class.
        """
        names = self.class_names or ()
        return names[label] if label < len(names) else str(label)


class Batch(NamedTuple):
    """A batch of examples, and what the model does with them, as NumPy arrays.

    Attributes:
        start: number of its first example in the data.
        images: float32 (B, height, width, channels) in [-1, 1], or None.
        captions: B texts of others, to be escaped, or None.
        words: strings of each caption's tokens, N of them, `""` for padding, or None.
        masks: boolean (B, N) by modality, True for the tokens that count.
        labels: integers (B,), or None. Negative ones have no class.
        routing: `Routing` by key, float32 (B, N, E), with (B, N, E, C) for the logits
            of soft routers; an image's class token comes first where the model has
            one, see `keras_moe.analysis.patches`.
        outputs: float32 (B, classes), the logits of a classifier, or None.
        shared: results that several sections read, by name, or None; see `once`.
        finite: boolean (B, N) by key, False for tokens whose record has NaN or
            infinite numbers, for which `routing` has zeros; None if there are none.
    """

    start: int
    images: np.ndarray | None
    captions: list[str] | None
    words: list[list[str]] | None
    masks: dict[str, np.ndarray]
    labels: np.ndarray | None
    routing: dict[str, Any]
    outputs: np.ndarray | None
    shared: dict[Any, Any] | None = None
    finite: dict[str, np.ndarray] | None = None

    @property
    def size(self) -> int:
        """B."""
        return len(next(iter(self.routing.values())).dispatched)

    def mask_of(self, block: Block) -> np.ndarray:
        """Boolean (B, N), True for the rows of a record that count and are finite.

        Args:
            block: description of the record.
        """
        return self._finite(block, self._tokens_of(block))

    def routed_of(self, block: Block) -> np.ndarray:
        """Boolean (B, N), True for rows that are routed and finite, padding among them.

        Args:
            block: description of the record.
        """
        mask = self._tokens_of(block)
        return self._finite(block, mask | block.routes_padding)

    def _finite(self, block, mask):
        if not self.finite or block.key not in self.finite:
            return mask
        return mask & self.finite[block.key]

    def num_broken(self, block: Block) -> int:
        """The number of tokens of a record that are not finite.

        Args:
            block: description of the record.
        """
        if not self.finite or block.key not in self.finite:
            return 0
        return int((self._tokens_of(block) & ~self.finite[block.key]).sum())

    def _tokens_of(self, block):
        """Boolean (B, N), False for padding."""
        shape = self.routing[block.key].dispatched.shape[:2]
        mask = self.masks.get(block.modality) if block.is_of_tokens else None
        # Records of layers that merge tokens have rows of their own.
        if mask is None or mask.shape != shape:
            return np.ones(shape, bool)
        return np.asarray(mask, bool)

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        """A result that sections share, made by the first that asks for it.

        Args:
            name: hashable name of the result.
            make: function that computes it from the batch.
        """
        if self.shared is None:
            return make()
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]


class Options(NamedTuple):
    """Choices of a report that its sections read.

    Attributes:
        num_examples: number of examples to show one by one, drawn at random.
        examples: numbers of examples to show instead, counted from 0 in the order of
            the data, or None.
        top: number of the best of a kind to show, such as the patches of an expert.
        capacities: capacity factors at which dropped tokens are shown.
        seed: seed of the choice of examples, and of the groups that queue together.
    """

    num_examples: int = 6
    top: int = 8
    capacities: tuple[float, ...] = (1.0, 0.5, 0.25)
    seed: int = 0
    examples: tuple[int, ...] | None = None


class Figure(NamedTuple):
    """A picture of a section.

    Figures that follow each other stand side by side where there is room: one of up to
    3.6 inches fits a phone, and a wider one is scrolled there.

    Attributes:
        drawing: a matplotlib figure.
        alt: text for those who do not see it.
        caption: text below it.
        name: stem of its PNG file, unique in the report.
    """

    drawing: Any
    alt: str
    caption: str
    name: str


class Table(NamedTuple):
    """A table of a section; cells are escaped.

    Attributes:
        head: titles of the columns.
        rows: cells by row: texts, numbers, or None for an empty one.
        caption: text above it.
    """

    head: list[str]
    rows: list[list[Any]]
    caption: str


class Html(NamedTuple):
    """Markup of a section's own.

    Attributes:
        markup: `markupsafe.Markup`, in which every text of others is escaped.
    """

    markup: Any


class Verdict(NamedTuple):
    """A finding in plain words.

    Attributes:
        level: `"good"`, `"notice"` or `"problem"`.
        text: a sentence such as `"block_7: 3 of 32 experts get no token."`.
    """

    level: str
    text: str


class Content(NamedTuple):
    """The content of a section.

    Attributes:
        body: figures, tables, markup, and paragraphs as strings, in reading order.
        data: JSON-serialisable figures, for `report.json`.
        verdicts: findings, which stand at the top of the page, too.
    """

    body: list[Figure | Table | Html | str]
    data: dict[str, Any]
    verdicts: Sequence[Verdict] = ()


def file_name(name: str) -> str:
    """A name as a part of a file's name: letters, digits and underscores."""
    return "".join(x if x.isalnum() else "_" for x in name)


class Section(ABC):
    """A section of the report, which reads the data batch by batch.

    Memory must not grow with the number of examples: sections keep counts, the best of
    a kind, or a few examples.

    Args:
        subject: model that is reported on.
        options: choices of the report.

    Example:

    >>> from keras_moe.analysis.report.section import Content, Section
    >>> class Count(Section):
    ...     title, anchor, intro = "Examples", "examples", "Their number."
    ...     count = 0
    ...     def update(self, batch):
    ...         self.count += batch.size
    ...     def finish(self):
    ...         return Content([f"{self.count} examples."], {"examples": self.count})
    """

    title: ClassVar[str]
    # The end of its address, and its key in report.json.
    anchor: ClassVar[str]
    # One or two sentences on how to read it.
    intro: ClassVar[str]

    def __init__(self, subject: Subject, options: Options):
        self.subject, self.options = subject, options

    @classmethod
    def fits(cls, subject: Subject) -> bool:
        """Whether the section says something about a model.

        Args:
            subject: model that is reported on.
        """
        return True

    @abstractmethod
    def update(self, batch: Batch) -> None:
        """Reads a batch.

        Args:
            batch: examples and their routing.
        """

    def update_queues(self, batch: Batch) -> None:  # noqa: B027
        """Reads a batch of random examples, as they are together in training.

        By default nothing happens.

        Args:
            batch: masks, affinities and gates alone, of the examples that `update`
                reads in the order of the data.
        """

    @abstractmethod
    def finish(self) -> Content:
        """The content, behind the last batch."""
