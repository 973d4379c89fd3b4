"""TensorBoard's event files, of scalars. TensorFlow would take seconds, and a GPU."""

import os
import socket
import struct
import time
from pathlib import Path


def _table():
    """Of CRC-32C, the checksum of TensorFlow's record files."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


class EventFile:
    """Writes scalars that TensorBoard shows.

    Args:
        folder: TensorBoard's; each object writes a file of its own there.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.training.event_file import EventFile
    >>> folder = tempfile.mkdtemp()
    >>> EventFile(folder).write(3, {"router/entropy": 0.9})
    >>> os.listdir(folder)[0].startswith("events.out.tfevents.")
    True
    """

    def __init__(self, folder: str | os.PathLike):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time_ns()
        # Readers sort files by their names.
        name = f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}"
        self.path = folder / f"{name}.{os.getpid()}.{now % 10**9}"
        # Event.file_version
        self._append(_field(3, b"brain.Event:2"))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Appends scalars of a step, by their tags."""
        values = b"".join(
            # Summary.value, of Summary.Value's tag and simple_value
            _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in scalars.items()
        )
        # Event.step and Event.summary
        self._append(b"\x10" + _varint(step) + _field(5, values))

    def _append(self, rest):
        # Event.wall_time
        event = b"\x09" + struct.pack("<d", time.time()) + rest
        length = struct.pack("<Q", len(event))
        record = length + _checksum(length) + event + _checksum(event)
        with open(self.path, "ab") as file:
            file.write(record)


def _field(number, data):
    """A length-delimited field of a protocol buffer."""
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value):
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _checksum(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    masked = (crc >> 15 | crc << 17) + 0xA282EAD8
    return struct.pack("<I", masked & 0xFFFFFFFF)
