"""TensorBoard's event files, by tensorboardX: TensorFlow would take seconds, and a GPU.

Its events are written at once: `tensorboardX.SummaryWriter` has a thread and a queue,
and a killed process would lose what is in them.
"""

import os
import time
from pathlib import Path
from types import ModuleType


class EventFile:
    """Writes scalars that TensorBoard shows."""

    def __init__(self, folder: str | os.PathLike, first_step: int = 0):
        tensorboardx = import_tensorboardx()
        self._event = tensorboardx.proto.event_pb2.Event
        self._scalar = tensorboardx.summary.scalar
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # A name has the second only: another file of the same one would be replaced.
        suffix = f".{os.getpid()}.{time.time_ns() % 10**9}"
        self._writer = tensorboardx.event_file_writer.EventsWriter(
            str(folder / "events"), suffix
        )
        log = tensorboardx.proto.event_pb2.SessionLog
        self._append(step=first_step, session_log=log(status=log.START))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Appends scalars of a step, by their tags."""
        for tag, value in scalars.items():
            self._append(step=step, summary=self._scalar(tag, value))
        self._writer.flush()

    def _append(self, **fields):
        self._writer.write_event(self._event(wall_time=time.time(), **fields))


def import_tensorboardx() -> ModuleType:
    """The package, or an error that says how to install it."""
    try:
        import tensorboardX
    except ImportError as error:
        raise ImportError(
            "Expected the package tensorboardX, which writes TensorBoard's files; "
            'install it with pip install "keras_moe[tensorboard]"'
        ) from error
    return tensorboardX
