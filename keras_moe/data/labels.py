"""Classes, their hierarchy, and labels in batches."""

import functools
import graphlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_moe._checks import unfit
from keras_moe._files import write_json
from keras_moe._types import Tensor
from keras_moe.data._files import read_json
from keras_moe.data._packages import tf

# The part of a hierarchy's file, or of `dataset.json`, that a hierarchy needs.
_FILE = {"classes": [str], "parents": {str: [str]}}


class LabelHierarchy:
    """A directed acyclic graph of classes, such as beagle, dog and animal.

    An example of a class also belongs to all of its ancestors.

    Args:
        classes: names of the classes, in the order of their numbers.
        parents: dict from a class to the list of its parents, if it has any.

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
        self.parents = {
            name: _names(f"parents[{name!r}]", above)
            for name, above in parents.items()
            if above
        }
        number = {name: index for index, name in enumerate(self.classes)}
        if len(number) < len(self.classes):
            twice = sorted({x for x in self.classes if self.classes.count(x) > 1})
            raise ValueError(f"Expected each class once; received several: {twice[:5]}")
        for name, above in self.parents.items():
            unknown = [other for other in (name, *above) if other not in number]
            if unknown:
                expected = f"names of the {len(number)} classes"
                raise unfit(expected, f"{unknown[0]!r} in parents[{name!r}]={above!r}")
        # Each class with its ancestors, which come before it in this order.
        closed: dict[str, set[int]] = {}
        graph = {name: self.parents.get(name, ()) for name in self.classes}
        for name in graphlib.TopologicalSorter(graph).static_order():
            closed[name] = {number[name]}.union(*(closed[x] for x in graph[name]))
        self._closed = [
            [index, *sorted(closed[name] - {index})]
            for index, name in enumerate(self.classes)
        ]

    def close(self, labels: Sequence[int]) -> list[int]:
        """Returns the class numbers `labels` with all their ancestors, sorted."""
        for label in labels:
            if not 0 <= label < len(self.classes):
                expected = f"labels in [0, {len(self.classes)})"
                raise unfit(expected, f"labels={list(labels)}")
        return sorted({above for label in labels for above in self._closed[label]})

    def table(self) -> np.ndarray:
        """Each class with its ancestors: int32 (classes, most), padded with -1."""
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
        """Reads "classes" and "parents" from a JSON file, e.g. a `dataset.json`."""
        content = read_json(Path(path), _FILE, required=_FILE, others=True)
        try:
            return cls(content["classes"], content["parents"])
        except ValueError as error:
            raise ValueError(f"In {path}: {error}") from error

    def __eq__(self, other: object) -> bool:
        same_kind = isinstance(other, LabelHierarchy)
        return same_kind and self.to_dict() == other.to_dict()

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def as_hierarchy(
    hierarchy: LabelHierarchy | dict | str | os.PathLike[str],
) -> LabelHierarchy:
    """Returns a hierarchy given as object, dict or path of a file."""
    if isinstance(hierarchy, LabelHierarchy):
        return hierarchy
    if isinstance(hierarchy, dict):
        return LabelHierarchy(**hierarchy)
    return LabelHierarchy.load(hierarchy)


def _names(name: str, value: Sequence[str]) -> tuple[str, ...]:
    is_list = isinstance(value, (list, tuple)) and value
    if is_list and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError(f"Expected a list of names; received: {name}={value!r:.100}")


class Classes(NamedTuple):
    """The classes of a source."""

    count: int
    names: tuple[str, ...] | None = None
    max_labels: int | None = None  # None for single labels, 0 if unknown


def _convert(
    features: dict[str, Any],
    key: Tensor,
    count: int,
    max_labels: int | None = None,
    dense: bool = False,
    closure: np.ndarray | None = None,
) -> Tensor:
    """Labels of one of `count` classes, or up to `max_labels` with `closure`."""
    labels = features["label"]
    if max_labels is None:
        return tf.one_hot(labels, count) if dense else labels
    labels = tf.reshape(labels, [-1])
    labels = tf.boolean_mask(labels, labels >= 0)
    if closure is not None:
        labels = tf.reshape(tf.gather(closure, labels), [-1])
        labels = tf.boolean_mask(labels, labels >= 0)
    labels = tf.unique(tf.sort(labels)).y
    if dense:
        ones = tf.ones_like(labels, "float32")
        return tf.scatter_nd(labels[:, None], ones, [count])
    size = tf.size(labels)
    enough = tf.debugging.assert_less_equal(
        size,
        max_labels,
        f"Expected at most max_labels={max_labels} labels of an example; received more",
    )
    with tf.control_dependencies([enough]):
        labels = tf.pad(labels, [[0, max_labels - size]], constant_values=-1)
    return tf.ensure_shape(labels, [max_labels])


def make_labels(classes: Classes, source: str, options: Any, dense: bool) -> Callable:
    """Returns a function from an example's features and key to its labels."""
    max_labels = options.max_labels
    if not options.multi_label:
        asked = (classes.max_labels, options.hierarchy, max_labels)
        if asked != (None, None, None):
            raise ValueError(
                f"Expected multi_label=True with {source!r} of several labels, or "
                "with hierarchy or max_labels; received: multi_label=False"
            )
        return functools.partial(_convert, count=classes.count, dense=dense)
    count, most = classes.count, classes.max_labels
    most = 1 if most is None else most
    closure = None
    if options.hierarchy is not None:
        hierarchy = as_hierarchy(options.hierarchy)
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
    return functools.partial(
        _convert, count=count, max_labels=max_labels, dense=dense, closure=closure
    )


def _numbers_in(classes: Classes, source: str, hierarchy: LabelHierarchy) -> list[int]:
    """Maps a source's classes to their numbers in a hierarchy."""
    # Classes without names are those of the hierarchy.
    names = hierarchy.classes if classes.names is None else classes.names
    number = {name: index for index, name in enumerate(hierarchy.classes)}
    unknown = [name for name in names if name not in number]
    if unknown or len(names) != classes.count:
        raise ValueError(
            f"Expected every class of {source!r} in the hierarchy; received: "
            f"{len(hierarchy.classes)} classes for {classes.count}, without "
            f"{unknown[:5]}"
        )
    return [number[name] for name in names]
