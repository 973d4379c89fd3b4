"""Sections of the report. Axes: B batch, N tokens, E experts, C capacity."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np

from keras_moe._checks import check_integer
from keras_moe.report.model import Block, ReportedModel

if TYPE_CHECKING:
    import matplotlib.figure

T = TypeVar("T")
LEVELS = ("good", "notice", "problem")
# Memory must not grow with the largest label: further classes are not counted.
MAX_CLASSES = 1000
# Nor with the vocabulary; tokenizers have fewer words.
MAX_WORDS = 65_536


class Batch(NamedTuple):
    """A batch of examples with the model's routing, as NumPy arrays.

    Attributes:
        start: number of its first example among those that are read.
        images: float32 (B, height, width, channels) in [-1, 1], or None.
        captions: B untrusted texts, to be escaped, or None.
        words: strings of each caption's N tokens, `""` for padding, or None.
        masks: boolean (B, N) by modality, True for tokens that count.
        labels: integers (B,), negative without a class, or None.
        routing: `Routing` by key, float32 (B, N, E); a soft router's logits are (B, N,
            E, C). An image's class token, if any, comes first.
        outputs: float32 (B, classes), the logits of a classifier, or None.
        finite: boolean (B, N) by key, False for tokens with NaN or infinities, which
            are zeroed in `routing`. Keys without such tokens are missing.
        shared: cache for results that several sections need, or None; see `once`.
        embeddings: those of images and of texts, (B, P) each, or None.
    """

    start: int
    images: np.ndarray | None
    captions: list[str] | None
    words: list[list[str]] | None
    masks: dict[str, np.ndarray]
    labels: np.ndarray | None
    routing: dict[str, Any]
    outputs: np.ndarray | None
    finite: dict[str, np.ndarray]
    shared: dict[Any, Any] | None = None
    embeddings: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def size(self) -> int:
        """B."""
        return len(next(iter(self.routing.values())).dispatched)

    def mask_of(self, block: Block) -> np.ndarray:
        """Boolean (B, N), True for tokens of a record that count and are finite."""
        return self._tokens_of(block) & self.finite.get(block.key, True)

    def routed_of(self, block: Block) -> np.ndarray:
        """Like `mask_of`, including padding if it is routed."""
        mask = self._tokens_of(block) | block.routes_padding
        return mask & self.finite.get(block.key, True)

    def num_broken(self, block: Block) -> int:
        """Number of non-finite tokens of a record."""
        is_finite = self.finite.get(block.key, np.True_)
        return int((self._tokens_of(block) & ~is_finite).sum())

    def _tokens_of(self, block):
        """Boolean (B, N), False for padding."""
        shape = self.routing[block.key].dispatched.shape[:2]
        mask = self.masks.get(block.modality) if block.is_of_tokens else None
        # Layers that merge tokens have a different number.
        if mask is None or mask.shape != shape:
            return np.ones(shape, bool)
        return np.asarray(mask, bool)

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        """Computes a result once for all sections."""
        if self.shared is None:
            return make()
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]


class Options(NamedTuple):
    """Options of a report that its sections read.

    Attributes:
        num_examples: number of random examples to show one by one.
        top: number of top items to show, such as an expert's patches.
        capacities: capacity factors at which dropped tokens are shown.
        seed: seed of random examples and of groups that queue together.
        examples: numbers of examples to show, counted from 0; None for random ones.
        training_batch_size: examples of a training step, to count its tokens per
            expert; None for those of an example.
    """

    num_examples: int = 6
    top: int = 8
    capacities: tuple[float, ...] = (1.0, 0.5, 0.25)
    seed: int = 0
    examples: tuple[int, ...] | None = None
    training_batch_size: int | None = None


class Figure(NamedTuple):
    """A figure of a section.

    Consecutive figures share a row if there is room. Up to 3.6 inches fit a phone.

    Attributes:
        drawing: matplotlib figure.
        alt: alternative text.
        caption: text below it.
        name: stem of its PNG file, unique in the report.
    """

    drawing: "matplotlib.figure.Figure"
    alt: str
    caption: str
    name: str


class Table(NamedTuple):
    """A table of a section. Cells are escaped, and empty columns are left out.

    Attributes:
        head: column titles.
        rows: rows of cells: texts, numbers, or None for an empty cell.
        caption: text above it.
    """

    head: list[str]
    rows: list[list[Any]]
    caption: str


class Html(NamedTuple):
    """Custom `markup`, `markupsafe.Markup` in which all untrusted text is escaped."""

    markup: Any


class Finding(NamedTuple):
    """A sentence `text`, and its `level`: `"good"`, `"notice"` or `"problem"`."""

    level: str
    text: str


Part: TypeAlias = Figure | Table | Html | str


class SectionContent(NamedTuple):
    """The content of a section.

    Attributes:
        body: figures, tables, markup and paragraphs (strings), in reading order.
        data: JSON-serialisable results for `report.json`.
        findings: findings, repeated at the top of the page.
    """

    body: Sequence[Part]
    data: dict[str, Any]
    findings: Sequence[Finding] = ()


NO_TOKENS = SectionContent(["The data has no tokens that count."], {})


class Section(ABC):
    """Base class of sections, which read the data batch by batch.

    Memory must not grow with the data: keep counts, top items, or a few examples.

    Args:
        model: the reported model.
        options: options of the report.

    Example:

    >>> from keras_moe.report import Section, SectionContent
    >>> class Count(Section):
    ...     title, anchor, intro = "Examples", "examples", "Their number."
    ...     count = 0
    ...     def update(self, batch):
    ...         self.count += batch.size
    ...     def finish(self):
    ...         data = {"examples": self.count}
    ...         return SectionContent([f"{self.count} examples."], data)
    """

    title: ClassVar[str]
    # Fragment of its address, and its key in report.json.
    anchor: ClassVar[str]
    # One or two sentences on how to read it.
    intro: str

    def __init__(self, model: ReportedModel, options: Options):
        self.model, self.options = model, options

    @classmethod
    def fits(cls, model: ReportedModel) -> bool:
        """Whether the section applies to a model."""
        return True

    def update(self, batch: Batch) -> None:  # noqa: B027
        """Reads a batch."""

    def update_queues(self, batch: Batch) -> None:  # noqa: B027
        """Reads a batch of random examples, grouped as in training."""

    def front(self) -> "matplotlib.figure.Figure | None":
        """A drawing for the front of a model card, or None."""
        return None

    @abstractmethod
    def finish(self) -> SectionContent:
        """Returns the content, after the last batch."""


class LayerSection(Section):
    """A section that counts per routing record, with a table of one row per record.

    Subclasses define `new_counts` and `count`, which adds a batch to the counts; `head`
    and `row` for the table; and `reads` to select records.

    Args:
        model: the reported model.
        options: options of the report.

    Example:

    >>> from keras_moe.report import LayerSection, SectionContent
    >>> class Tokens(LayerSection):
    ...     title, anchor, intro = "Tokens", "tokens", "Tokens by layer."
    ...     head = ("layer", "tokens")
    ...     def new_counts(self, block):
    ...         return [0]
    ...     def count(self, counts, block, batch):
    ...         counts[0] += int(batch.mask_of(block).sum())
    ...     def row(self, block, counts):
    ...         return [block.key, counts[0]]
    ...     def finish(self):
    ...         return SectionContent([self.table("Tokens by layer")], self.counts)
    """

    # Column titles of its table.
    head: ClassVar[Sequence[str]] = ()

    def __init__(self, model: ReportedModel, options: Options):
        super().__init__(model, options)
        self.blocks = {k: x for k, x in model.blocks.items() if self.reads(x)}
        self.counts = {key: self.new_counts(x) for key, x in self.blocks.items()}

    @classmethod
    def fits(cls, model: ReportedModel) -> bool:
        """Whether it reads any record of the model."""
        return any(map(cls.reads, model.blocks.values()))

    @classmethod
    def reads(cls, block: Block) -> bool:
        """Whether the section counts a record."""
        return True

    @abstractmethod
    def new_counts(self, block: Block) -> Any:
        """Makes empty counts, which `count` updates in place."""

    @abstractmethod
    def count(self, counts: Any, block: Block, batch: Batch) -> None:
        """Adds a batch to the counts of a record."""

    def update(self, batch: Batch) -> None:
        """Counts a batch for each record."""
        for key, block in self.blocks.items():
            self.count(self.counts[key], block, batch)

    def row(self, block: Block, counts: Any) -> list[Any]:
        """The table cells of a record."""
        raise NotImplementedError

    def table(self, caption: str) -> Table:
        """The table with one row per record."""
        rows = [self.row(x, self.counts[key]) for key, x in self.blocks.items()]
        return Table(list(self.head), rows, caption)


class Reservoir:
    """Reservoir sampling of examples by seed, or of specific ones by `numbers`."""

    def __init__(
        self, size: int, seed: int | None = 0, numbers: Iterable[int] | None = None
    ):
        self.size, self.seen = check_integer("size", size), 0
        self._numbers = None if numbers is None else sorted(numbers)
        self._generator = np.random.default_rng(seed)
        self._slots: dict[int, tuple[int, Any]] = {}

    @classmethod
    def of_options(cls, options: Options) -> "Reservoir":
        """Makes the reservoir of the examples that a report shows."""
        size = options.num_examples if options.examples is None else 1
        return cls(size, options.seed, options.examples)

    def offer(self, count: int, take: Callable[[int], Any]) -> None:
        """Offers the next `count` examples; `take(index)` returns one of them."""
        if self._numbers is not None:
            for number in self._numbers:
                if self.seen <= number < self.seen + count:
                    self._slots[number] = (number, take(number - self.seen))
            self.seen += count
            return
        for index, draw in enumerate(self._generator.random(count)):
            slot = self.seen
            if slot >= self.size:
                slot = int(draw * (self.seen + 1))
            if slot < self.size:
                self._slots[slot] = (self.seen, take(index))
            self.seen += 1

    @property
    def kept(self) -> dict[int, Any]:
        """The sampled examples by number, in the order of the data."""
        return dict(sorted(self._slots.values(), key=lambda pair: pair[0]))


def evenly_spaced(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of some items, evenly spaced, the first and the last included."""
    if len(items) <= most:
        return list(items)
    last, steps = len(items) - 1, max(most - 1, 1)
    return [items[round(index * last / steps)] for index in range(most)]


def file_name(name: str) -> str:
    """Converts a name for use in file names: letters, digits and underscores."""
    return "".join(x if x.isalnum() else "_" for x in name)


def uncounted_classes(number: int) -> str:
    """A sentence on examples that are not counted by class."""
    return (
        f"{number:,} examples without a class, with several, or with one from "
        f"{MAX_CLASSES:,} on are not counted by class."
    )
