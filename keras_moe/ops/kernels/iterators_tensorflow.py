"""Reads ahead in iterators of `tf.data`, which compiled steps read by themselves."""

import itertools
import sys
from typing import Any


def is_iterator(value: Any) -> bool:
    """Whether a value is one of TensorFlow's iterators, which need not be imported."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(value, tf.data.Iterator)


def peeked(iterator: Any, number: int) -> tuple[Any, Any]:
    """The next element, and an iterator of the next `number` ones, again.

    It has the specification of the first, so that nothing is traced twice.
    """
    import tensorflow as tf

    elements = list(itertools.islice(iterator, number))
    if not elements:
        return None, iterator
    again = tf.data.Dataset.from_generator(
        lambda: iter(elements), output_signature=iterator.element_spec
    )
    return elements[0], iter(again)
