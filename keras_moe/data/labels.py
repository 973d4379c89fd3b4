"""Labels of batches, made from the classes of examples."""

from typing import Any, NamedTuple

import numpy as np

from keras_moe.data.label_hierarchy import LabelHierarchy


class Classes(NamedTuple):
    """The classes of a source, and how many of them an example has."""

    count: int
    names: tuple[str, ...] | None = None
    max_labels: int | None = None


class Labels(NamedTuple):
    """How labels of examples become those of batches."""

    count: int
    max_labels: int | None
    dense: bool
    closure: np.ndarray | None

    def __call__(self, labels: Any, key: Any = None) -> Any:
        """Labels of one example, as tensors of TensorFlow."""
        import tensorflow as tf

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
    """The labels that the arguments of `keras_moe.data.load` ask for."""
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
        closure = hierarchy.table()[_places(classes, source, hierarchy)]
        most *= closure.shape[1]
    if max_labels is None:
        max_labels = min(most, count)
    if not max_labels and not dense:
        raise ValueError(
            f"Expected max_labels, the most labels of an example of {source!r}, which "
            "does not say it, or one_hot=True; received: max_labels=None"
        )
    return Labels(count, max_labels, dense, closure)


def _places(classes: Classes, source: str, hierarchy: LabelHierarchy) -> list[int]:
    """The numbers that a source's classes have in a hierarchy."""
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
