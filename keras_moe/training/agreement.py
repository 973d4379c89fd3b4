"""Agreement of the processes that share a model: on results, and on errors.

A process that fails alone would leave the others waiting for it in the next step. The
functions here are called by all of them together; a process alone agrees with itself.
"""

import json
from collections.abc import Callable
from typing import Any

import keras

from keras_moe.locks import FolderInUse
from keras_moe.processes import process_shard
from keras_moe.training.tensor_writer import NonFiniteValues

# Errors that all processes raise alike, from the special to the general.
_KINDS = {
    "non-finite": NonFiniteValues,
    "value": ValueError,
    "in use": FolderInUse,
    "os": OSError,
    "other": RuntimeError,
}


def shared_by() -> tuple[int, int]:
    """This process's index among those that share a model, and their number."""
    if keras.distribution.distribution() is None:
        return 0, 1
    return process_shard()


def agreed(work: Callable[[], Any]) -> list[Any]:
    """Calls a function in each process, and raises in all of them if one fails."""
    if shared_by()[1] == 1:
        return [work()]
    failure = None
    try:
        report = {"result": work()}
    # Any at all: the others wait for this process's report.
    except Exception as error:
        failure = error
        kind = next((x for x, cls in _KINDS.items() if isinstance(error, cls)), "other")
        report = {"error": f"{error}", "kind": kind}
        if kind == "other":
            report["error"] = f"{type(error).__name__}: {error}"
    from keras_moe.ops.kernels.sharded_arrays_jax import exchange

    reports = [json.loads(x) for x in exchange(json.dumps(report).encode())]
    failed = [report for report in reports if "error" in report]
    if not failed:
        return [report["result"] for report in reports]
    message = "; ".join(dict.fromkeys(report["error"] for report in failed))
    raise _KINDS[failed[0]["kind"]](message) from failure


def first_decides(work: Callable[[], Any]) -> Any:
    """Calls a function in the first process, and returns its result in all."""
    is_first = shared_by()[0] == 0
    return agreed(work if is_first else lambda: None)[0]
