"""The processes of a run: which one this is, and how many there are.

Keras trains in several processes on JAX alone, and says nothing public of them.
"""

import keras


def process_shard() -> tuple[int, int]:
    """This process's index, and the number of processes: its `shard` of the data.

    Returns:
        JAX's two numbers; (0, 1) with other backends, with which Keras does not train
        in several processes.

    Example:

    >>> from keras_moe.processes import process_shard
    >>> process_shard()
    (0, 1)
    """
    if keras.backend.backend() != "jax":
        return 0, 1
    from keras_moe.ops.kernels.sharded_arrays_jax import process_shard as shard

    return shard()


def process_index() -> int:
    """The number of this process, from 0; process 0 writes what is written once."""
    return process_shard()[0]


def process_count() -> int:
    """The number of processes of this run."""
    return process_shard()[1]
