"""TensorFlow's tensors, strings and iterators, which other backends meet in `tf.data`.

TensorFlow is imported by those functions only that have got something of it.
"""

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

from keras_moe._errors import unfit


def is_tensorflow(value: object) -> bool:
    """Whether a value is one of TensorFlow's tensors, which need not be imported."""
    return type(value).__module__.partition(".")[0] == "tensorflow"


def call_on_strings(
    function: Callable[[list[str]], dict], strings: Any, rows: dict[str, tuple]
) -> dict:
    """Calls a Python function on a tensor of strings, also while a graph is traced."""
    import tensorflow as tf

    if strings.dtype != tf.string or strings.shape.rank not in (0, 1):
        expected = "a string tensor of shape () or (batch,)"
        raise unfit(expected, f"dtype={strings.dtype.name}, shape={strings.shape}")
    batch = tf.reshape(strings, [-1])

    def run(values):
        arrays = function([value.decode("utf-8") for value in values.tolist()])
        return [arrays[name] for name in rows]

    results = tf.numpy_function(run, [batch], [dtype for _, dtype in rows.values()])
    tensors = {}
    for (name, (shape, _)), result in zip(rows.items(), results):
        result = tf.ensure_shape(result, (*batch.shape, *shape))
        tensors[name] = result if strings.shape.rank else result[0]
    return tensors


def is_iterator(value: object) -> bool:
    """Whether a value is one of TensorFlow's iterators, which need not be imported."""
    # Another thread may be importing it.
    data = getattr(sys.modules.get("tensorflow"), "data", None)
    return isinstance(value, getattr(data, "Iterator", ()))


def peeked(iterator: Any, number: int) -> tuple[Any, Any]:
    """The next element, and an iterator of the next `number` ones, again."""
    import tensorflow as tf

    elements = list(itertools.islice(iterator, number))
    if not elements:
        return None, iterator
    experimental = tf.data.experimental
    parts = [tf.data.Dataset.from_tensors(x) for x in elements]
    # Unlike `from_generator`, this traces no function, which would take long. With the
    # specification of the first iterator, nothing is traced twice.
    parts = [
        experimental.from_variant(experimental.to_variant(x), iterator.element_spec)
        for x in parts
    ]
    again = functools.reduce(lambda first, rest: first.concatenate(rest), parts)
    return elements[0], iter(again)


def argmax(x: Any) -> Any:
    """See `keras_moe.ops._primitives.argmax`.

    Keras's first looks for negative zeros by `BitwiseAnd`, which LiteRT does not have.
    """
    import tensorflow as tf

    return tf.expand_dims(tf.argmax(x, axis=-1, output_type="int32"), -1)


def replica_sum(x: Any) -> Any:
    """See `keras_moe.ops._primitives.replica_sum`; for `tf.distribute`."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return x
    return context.all_reduce(tf.distribute.ReduceOp.SUM, x)
