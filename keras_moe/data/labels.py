"""Classes, their hierarchy, and labels in batches."""

import graphlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_moe.data._json_schema import DictOf, ListOf, Record, Text, read_json
from keras_moe.files import write_json

PARENTS = DictOf(ListOf(Text()))
# Keys of `dataset.json` in addition to classes and parents.
_FILE = Record(
    {"classes": ListOf(Text(), minimum=1, unique=True), "parents": PARENTS},
    required=("classes", "parents"),
    others=True,
)


class LabelHierarchy:
    """A directed acyclic graph of classes, such as beagle, dog and animal.

    An example of a class also belongs to all of its ancestors. A class may have several
    parents.

    Args:
        classes: names of the classes, in the order of their numbers.
        parents: dict from a class to the list of its parents; may leave out classes
            without parents.

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
        """Returns for each class the class itself, then its ancestors, sorted."""
        closed: dict[int, set[int]] = {}
        # Ancestors come before their descendants.
        order = graphlib.TopologicalSorter(dict(enumerate(self._above)))
        try:
            for index in order.static_order():
                above = [closed[other] for other in self._above[index]]
                closed[index] = {index}.union(*above)
        except graphlib.CycleError as error:
            # The error lists the cycle from child to parent.
            names = " -> ".join(self.classes[index] for index in error.args[1][::-1])
            raise ValueError(
                f"Expected no class above itself; received: {names}"
            ) from error
        return [
            [index, *sorted(closed[index] - {index})]
            for index in range(len(self.classes))
        ]

    def close(self, labels: Sequence[int]) -> list[int]:
        """Returns the labels with all their ancestors, sorted.

        Args:
            labels: class numbers.
        """
        for label in labels:
            if not 0 <= label < len(self.classes):
                raise ValueError(
                    f"Expected labels in [0, {len(self.classes)}); "
                    f"received: labels={list(labels)}"
                )
        return sorted({above for label in labels for above in self._closed[label]})

    def table(self) -> np.ndarray:
        """Returns an int32 table (classes, most) of each class and its ancestors.

        Rows are padded with -1.
        """
        most = max(map(len, self._closed))
        table = np.full((len(self._closed), most), -1, "int32")
        for row, closed in zip(table, self._closed):
            row[: len(closed)] = closed
        return table

    def to_dict(self) -> dict:
        """Returns the constructor's arguments as JSON data."""
        parents = {name: list(above) for name, above in self.parents.items()}
        return {"classes": list(self.classes), "parents": parents}

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file for `load`, atomically."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "LabelHierarchy":
        """Reads a JSON file with "classes" and "parents".

        Args:
            path: a file written by `save`, or the `dataset.json` of TFRecord files.
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
    """Returns a hierarchy given as object, dict or path of a file."""
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


class Classes(NamedTuple):
    """The classes of a source.

    Fields:
        count: number of classes.
        names: names in the order of the labels, or None.
        max_labels: maximum number of labels of an example; None for single labels, 0 if
            unknown.
    """

    count: int
    names: tuple[str, ...] | None = None
    max_labels: int | None = None


class Labels(NamedTuple):
    """Converts labels of examples to those of batches.

    Fields:
        count: number of classes.
        max_labels: length of padded labels; None for single labels.
        dense: whether labels become 0-1 vectors.
        closure: int32 (classes, most) table of ancestors, or None.
    """

    count: int
    max_labels: int | None
    dense: bool
    closure: np.ndarray | None

    def __call__(self, features: dict[str, Any], key: Any = None) -> Any:
        """Returns the labels of one example as TensorFlow tensors."""
        import tensorflow as tf

        labels = features["label"]
        if self.max_labels is None:
            return tf.one_hot(labels, self.count) if self.dense else labels
        labels = tf.reshape(labels, [-1])
        labels = tf.boolean_mask(labels, labels >= 0)
        if self.closure is not None:
            labels = tf.reshape(tf.gather(self.closure, labels), [-1])
            labels = tf.boolean_mask(labels, labels >= 0)
        labels = tf.unique(tf.sort(labels)).y
        if self.dense:
            ones = tf.ones_like(labels, "float32")
            return tf.scatter_nd(labels[:, None], ones, [self.count])
        count = tf.size(labels)
        enough = tf.debugging.assert_less_equal(
            count,
            self.max_labels,
            f"Expected at most max_labels={self.max_labels} labels of an example; "
            "received more",
        )
        with tf.control_dependencies([enough]):
            labels = tf.pad(labels, [[0, self.max_labels - count]], constant_values=-1)
        return tf.ensure_shape(labels, [self.max_labels])


def make_labels(
    classes: Classes,
    source: str,
    multi_label: bool,
    hierarchy: LabelHierarchy | None,
    max_labels: int | None,
    dense: bool,
) -> Labels:
    """Builds `Labels` from the arguments of `keras_moe.data.load`."""
    if not multi_label:
        if classes.max_labels is not None:
            raise ValueError(
                f"Expected multi_label=True with {source!r}, whose examples have "
                "several labels; received: multi_label=False"
            )
        if hierarchy is not None or max_labels is not None:
            raise ValueError(
                "Expected hierarchy and max_labels with multi_label=True alone; "
                f"received: hierarchy={hierarchy}, max_labels={max_labels}"
            )
        return Labels(classes.count, None, dense, None)
    count, most = classes.count, classes.max_labels
    most = 1 if most is None else most
    closure = None
    if hierarchy is not None:
        count = len(hierarchy.classes)
        closure = hierarchy.table()[_numbers_in(classes, source, hierarchy)]
        most *= closure.shape[1]
    if max_labels is None:
        max_labels = min(most, count)
    if not max_labels and not dense:
        raise ValueError(
            f"Expected max_labels, the most labels of an example of {source!r}, which "
            "does not say it, or one_hot=True; received: max_labels=None"
        )
    return Labels(count, max_labels, dense, closure)


def _numbers_in(classes: Classes, source: str, hierarchy: LabelHierarchy) -> list[int]:
    """Maps a source's classes to their numbers in a hierarchy."""
    if classes.names is None:
        if classes.count != len(hierarchy.classes):
            raise ValueError(
                f"Expected a hierarchy of the {classes.count} classes of {source!r}, "
                f"which have no names; received: {len(hierarchy.classes)} classes"
            )
        return list(range(classes.count))
    number = {name: index for index, name in enumerate(hierarchy.classes)}
    unknown = [name for name in classes.names if name not in number]
    if unknown:
        raise ValueError(
            f"Expected every class of {source!r} in the hierarchy; "
            f"received: a hierarchy without {unknown[:5]}"
        )
    return [number[name] for name in classes.names]
