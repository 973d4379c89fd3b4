"""Classes, and labels in batches."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from keras_moe._types import Tensor
from keras_moe.data._packages import tf


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
) -> Tensor:
    """Labels of one of `count` classes, or up to `max_labels`."""
    labels = features["label"]
    if max_labels is None:
        return tf.one_hot(labels, count) if dense else labels
    labels = tf.reshape(labels, [-1])
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
        if (classes.max_labels, max_labels) != (None, None):
            raise ValueError(
                f"Expected multi_label=True with {source!r} of several labels, or "
                "with max_labels; received: multi_label=False"
            )
        return functools.partial(_convert, count=classes.count, dense=dense)
    count, most = classes.count, classes.max_labels
    most = 1 if most is None else most
    if max_labels is None:
        max_labels = min(most, count)
    if not max_labels and not dense:
        raise ValueError(
            f"Expected max_labels, the most labels of an example of {source!r}, which "
            "does not say it, or one_hot=True; received: max_labels=None"
        )
    return functools.partial(_convert, count=count, max_labels=max_labels, dense=dense)
