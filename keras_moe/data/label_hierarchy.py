"""Classes some of which are kinds of others, such as beagle, dog and animal."""

import graphlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe.data.json_schema import DictOf, ListOf, Record, Text, read_json
from keras_moe.files import write_json

PARENTS = DictOf(ListOf(Text()))
# A `dataset.json`, which has classes and parents, too, has further names.
_FILE = Record(
    {"classes": ListOf(Text(), minimum=1, unique=True), "parents": PARENTS},
    required=("classes", "parents"),
    others=True,
)


class LabelHierarchy:
    """Classes, each with the classes of which it is a kind.

    An example of a class is one of all classes above it, too: labels are closed
    upward. A class may have several parents, and none may be above itself.

    Args:
        classes: names of the classes, in the order of their numbers.
        parents: dict from a class to the list of those directly above it. A class that
            is not in it has none.

    Raises:
        ValueError: if a name comes twice or is not among the classes, or if a class is
            above itself.

    Example:

    >>> from keras_moe.data import LabelHierarchy
    >>> hierarchy = LabelHierarchy(
    ...     ["animal", "beagle", "cat", "dog"],
    ...     {"beagle": ["dog"], "dog": ["animal"], "cat": ["animal"]},
    ... )
    >>> hierarchy.close([1])
    [0, 1, 3]
    """

    def __init__(self, classes: Sequence[str], parents: Mapping[str, Sequence[str]]):
        self.classes = _names("classes", classes)
        number = {name: index for index, name in enumerate(self.classes)}
        if not self.classes or len(number) < len(self.classes):
            twice = sorted({x for x in self.classes if self.classes.count(x) > 1})
            raise ValueError(
                "Expected at least one class and each once; "
                f"received: {len(self.classes)} classes, more than once: {twice[:5]}"
            )
        if not isinstance(parents, Mapping):
            raise ValueError(
                "Expected a dict from a class to its parents; "
                f"received: parents={parents!r}"
            )
        self.parents = {
            name: _names(f"parents of {name!r}", above)
            for name, above in parents.items()
            if above
        }
        for name, above in self.parents.items():
            unknown = [other for other in (name, *above) if other not in number]
            if unknown:
                raise ValueError(
                    f"Expected names of the {len(number)} classes; received: "
                    f"{unknown[0]!r} in parents[{name!r}]={above!r}"
                )
        self._above = [
            [number[above] for above in self.parents.get(name, ())]
            for name in self.classes
        ]
        self._closed = self._closures()

    def _closures(self) -> list[list[int]]:
        """Each class with all above it: the class itself first, the others sorted."""
        closed: dict[int, set[int]] = {}
        # Each class comes after those above it.
        order = graphlib.TopologicalSorter(dict(enumerate(self._above)))
        try:
            for index in order.static_order():
                above = [closed[other] for other in self._above[index]]
                closed[index] = {index}.union(*above)
        except graphlib.CycleError as error:
            # The error lists the circle from below to above.
            names = " -> ".join(self.classes[index] for index in error.args[1][::-1])
            raise ValueError(
                f"Expected no class above itself; received: {names}"
            ) from error
        return [
            [index, *sorted(closed[index] - {index})]
            for index in range(len(self.classes))
        ]

    def close(self, labels: Sequence[int]) -> list[int]:
        """The labels and all classes above them, sorted.

        Args:
            labels: numbers of classes.

        Raises:
            ValueError: if a number is out of range.
        """
        for label in labels:
            if not 0 <= label < len(self.classes):
                raise ValueError(
                    f"Expected labels in [0, {len(self.classes)}); "
                    f"received: labels={list(labels)}"
                )
        return sorted({above for label in labels for above in self._closed[label]})

    def table(self) -> np.ndarray:
        """The closure of each class as a table.

        Returns:
            int32 (classes, most): a class, then all above it, then -1.
        """
        most = max(map(len, self._closed))
        table = np.full((len(self._closed), most), -1, "int32")
        for row, closed in zip(table, self._closed):
            row[: len(closed)] = closed
        return table

    def to_dict(self) -> dict:
        """The arguments of the constructor, JSON-serialisable."""
        parents = {name: list(above) for name, above in self.parents.items()}
        return {"classes": list(self.classes), "parents": parents}

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file that `load` reads, as a whole or not at all."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "LabelHierarchy":
        """Reads a JSON file with "classes" and "parents".

        Args:
            path: path of a file of `save`, or of the `dataset.json` beside TFRecord
                files.

        Raises:
            ValueError: if it is no such file, or its classes are no hierarchy.
        """
        settings = read_json(Path(path), _FILE)
        try:
            return cls(settings["classes"], settings["parents"])
        except ValueError as error:
            raise ValueError(f"{error}, in {path}") from error

    def __eq__(self, other: Any) -> bool:
        same_kind = isinstance(other, LabelHierarchy)
        return same_kind and self.to_dict() == other.to_dict()

    __hash__ = None


def as_hierarchy(hierarchy: Any) -> LabelHierarchy:
    """A hierarchy from a hierarchy, from its dict or from the path of its file."""
    if isinstance(hierarchy, LabelHierarchy):
        return hierarchy
    if isinstance(hierarchy, (str, os.PathLike)):
        return LabelHierarchy.load(hierarchy)
    if isinstance(hierarchy, dict) and set(hierarchy) == {"classes", "parents"}:
        return LabelHierarchy(**hierarchy)
    raise ValueError(
        "Expected a LabelHierarchy, a dict of its classes and parents, or the path of "
        f"its file; received: hierarchy={hierarchy!r}"
    )


def _names(what: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, (list, tuple)) and all(isinstance(x, str) for x in names):
        return tuple(names)
    raise ValueError(f"Expected a list of names; received: {what}={names!r:.100}")
