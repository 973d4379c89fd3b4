"""Reads ahead in iterators of `tf.data`, which compiled steps read by themselves."""

import functools
import itertools
import sys
from typing import Any


def is_iterator(value: Any) -> bool:
    """Whether a value is one of TensorFlow's iterators, which need not be imported."""
    # Another thread may be importing it.
    data = getattr(sys.modules.get("tensorflow"), "data", None)
    return isinstance(value, getattr(data, "Iterator", ()))


def peeked(iterator: Any, number: int) -> tuple[Any, Any]:
    """The next element, and an iterator of the next `number` ones, again.

    It has the specification of the first, so that nothing is traced twice.
    """
    import tensorflow as tf

    elements = list(itertools.islice(iterator, number))
    if not elements:
        return None, iterator
    experimental = tf.data.experimental
    parts = [tf.data.Dataset.from_tensors(x) for x in elements]
    # Unlike `from_generator`, this traces no function, which would take long.
    parts = [
        experimental.from_variant(experimental.to_variant(x), iterator.element_spec)
        for x in parts
    ]
    again = functools.reduce(lambda first, rest: first.concatenate(rest), parts)
    return elements[0], iter(again)
