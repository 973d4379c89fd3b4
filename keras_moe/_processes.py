"""Ranks of processes, and collectives, where Keras splits models over devices."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import numpy as np

from keras_moe._compat import serving
from keras_moe._types import Structure

T = TypeVar("T")


def splitting_backend() -> Any:
    """The backend's module for layouts; None where Keras splits no models."""
    if keras.backend.backend() != "jax":
        return None
    from keras_moe._backends import jax

    return jax


def process_shard() -> tuple[int, int]:
    """Returns the process's index and count, or (0, 1), as `shard` of data pipelines.

    Example:

    >>> from keras_moe.data import process_shard
    >>> process_shard()
    (0, 1)
    """
    backend = splitting_backend()
    return (0, 1) if backend is None else backend.process_shard()


def process_index() -> int:
    """Returns the index of this process; process 0 writes shared files."""
    return process_shard()[0]


def process_count() -> int:
    return process_shard()[1]


def rank_and_world_size() -> tuple[int, int]:
    """Returns the index and the number of processes that share the model."""
    if keras.distribution.distribution() is None:
        return 0, 1
    return process_shard()


def checked_all_gather(work: Callable[[], T]) -> list[T]:
    """Returns the JSON data that a function gives in each process, or all fail."""
    if rank_and_world_size()[1] == 1:
        return [work()]
    failure = None
    try:
        report = {"result": work()}
    # Catches everything, since the others wait for this process's report.
    except Exception as error:
        failure = error
        kind = next((x for x, y in _ERRORS.items() if isinstance(error, y)), None)
        name = "" if kind else f"{type(error).__name__}: "
        report = {"error": f"{name}{error}", "kind": kind}
    exchange = splitting_backend().exchange
    reports = [json.loads(x) for x in exchange(json.dumps(report).encode())]
    failed = [report for report in reports if "error" in report]
    if not failed:
        return [report["result"] for report in reports]
    message = "; ".join(dict.fromkeys(report["error"] for report in failed))
    raise _ERRORS.get(failed[0]["kind"], RuntimeError)(message) from failure


# Errors that keep their type in all processes.
_ERRORS = {"ValueError": ValueError, "OSError": OSError}


def broadcast_from_primary(work: Callable[[], T]) -> T:
    """Calls a function in the primary process and returns its result in all."""
    is_primary = rank_and_world_size()[0] == 0
    results: list[Any] = checked_all_gather(work if is_primary else lambda: None)
    return results[0]


def batch_devices() -> int:
    """Returns the number of devices that share a batch in the current distribution."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return 1
    mesh = distribution.device_mesh
    return dict(zip(mesh.axis_names, mesh.shape))[distribution.batch_dim_name]


def gathered_batch(batch: Any) -> Any:
    """Concatenates the processes' parts of a batch."""
    batch = keras.tree.map_structure(np.asarray, batch)
    if any(array.dtype.hasobject for array in keras.tree.flatten(batch)):
        # Their bytes are pointers.
        raise ValueError("Expected arrays of numbers; received: dtype=object")
    if process_count() == 1:
        return batch

    def gather(array):
        parts = splitting_backend().exchange(np.ascontiguousarray(array).tobytes())
        whole = np.frombuffer(b"".join(parts), array.dtype)
        return whole.reshape(-1, *array.shape[1:])

    return keras.tree.map_structure(gather, batch)


def predict_batch(
    model: keras.Model, inputs: Structure, size: int | None = None
) -> Any:
    """`model.predict_on_batch` that returns the whole outputs in every process."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return serving(model).predict_on_batch(inputs)
    count, devices = len(keras.tree.flatten(inputs)[0]), batch_devices()
    rows = -(-max(count, size or 0) // devices) * devices

    def place(array):
        array = np.asarray(array)
        array = np.concatenate([array, np.repeat(array[-1:], rows - count, axis=0)])
        layout = distribution.get_data_layout(array.shape).backend_layout
        return splitting_backend().placed(array, layout)

    # Compiled once per model and stored with it.
    mesh, whole = getattr(model, "_whole_outputs", (None, None))
    if mesh is not distribution.device_mesh:
        mesh, whole = distribution.device_mesh, _WholeOutputs(model)
        object.__setattr__(model, "_whole_outputs", (mesh, whole))
    outputs = serving(whole).predict_on_batch(keras.tree.map_structure(place, inputs))
    if rows == count:
        return outputs
    return keras.tree.map_structure(lambda x: x[:count], outputs)


class _WholeOutputs(keras.Model):
    """A model with outputs replicated on all devices."""

    def __init__(self, model):
        # The global policy may differ from the model's.
        super().__init__(name="whole_outputs", dtype="float32")
        self.inner = model
        self.built = True

    def call(self, inputs, training=None):
        distribution: Any = keras.distribution.distribution()
        mesh = distribution.device_mesh

        def whole(output):
            everywhere = [None] * len(output.shape)
            layout = keras.distribution.TensorLayout(everywhere, mesh)
            return keras.distribution.distribute_tensor(output, layout)

        return keras.tree.map_structure(whole, self.inner(inputs))
