"""Python functions of strings within a `tf.data` pipeline, which runs with any backend.

Axes: B batch.
"""

from collections.abc import Callable
from typing import Any


def is_tensorflow(value: Any) -> bool:
    """Whether a value is one of TensorFlow's tensors, which need not be imported."""
    return type(value).__module__.partition(".")[0] == "tensorflow"


def call_on_strings(
    function: Callable[[list[str]], dict], strings: Any, rows: dict[str, tuple]
) -> dict:
    """Calls a Python function on a tensor of strings, also while a graph is traced."""
    import tensorflow as tf

    if strings.dtype != tf.string or strings.shape.rank not in (0, 1):
        raise ValueError(
            "Expected a string tensor of shape () or (batch,); received: "
            f"dtype={strings.dtype.name}, shape={strings.shape}"
        )
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
