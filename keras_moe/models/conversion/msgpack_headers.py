"""Headers of msgpack streams, read without the arrays behind them."""

import os

# Types of msgpack's extension mechanism, as Flax numbers them.
_NDARRAY, _NPSCALAR = 1, 3


class MsgpackHeaders:
    """Reads msgpack headers of a stream and skips the values behind them.

    msgpack's own reader would hold each piece, up to a GiB, to step over it.
    """

    def __init__(self, stream, path):
        self._stream, self._path, self.name = stream, path, None
        self._end = os.fstat(stream.fileno()).st_size

    @property
    def where(self):
        """File and tensor, for messages."""
        return f"{self._path}, {self.name!r}" if self.name else str(self._path)

    def _wrong(self, expected, byte):
        return ValueError(
            f"Expected {expected} at byte {self._stream.tell() - 1} of {self.where}; "
            f"received: msgpack byte 0x{byte:02x}"
        )

    def _take(self, count):
        data = self._stream.read(count)
        if len(data) < count:
            raise ValueError(
                f"Expected more bytes in {self.where}; received its end: the file is "
                "truncated"
            )
        return data

    def _length(self, width):
        return int.from_bytes(self._take(width), "big")

    def _header(self, expected, small, mask, wide):
        """A length: in the byte itself, or in the bytes that follow it."""
        byte = self._take(1)[0]
        if small is not None and byte & mask == small:
            return byte & ~mask & 0xFF
        if byte in wide:
            return self._length(wide[byte])
        raise self._wrong(expected, byte)

    def size(self, kind):
        """The number of a map's or an array's entries."""
        small, wide = {"map": (0x80, 0xDE), "array": (0x90, 0xDC)}[kind]
        return self._header(f"msgpack's {kind}", small, 0xF0, {wide: 2, wide + 1: 4})

    def text(self):
        """A short string."""
        length = self._header("a name", 0xA0, 0xE0, {0xD9: 1, 0xDA: 2, 0xDB: 4})
        if length > 1000:
            raise ValueError(
                f"Expected short names in {self.where}; received: {length} bytes"
            )
        return self._take(length).decode("utf-8", "replace")

    def skip_bool(self):
        """Steps over True or False."""
        byte = self._take(1)[0]
        if byte not in (0xC2, 0xC3):
            raise self._wrong("a bool", byte)

    def expect_pair(self):
        """The header of an array of two."""
        if self.size("array") != 2:
            raise ValueError(
                f"Expected pairs of pieces and slice in {self.where}; received others"
            )

    def _extension(self, codes):
        """The end of an extension's data, which starts here."""
        byte = self._take(1)[0]
        fixed = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
        wide = {0xC7: 1, 0xC8: 2, 0xC9: 4}
        if byte in fixed:
            length = fixed[byte]
        elif byte in wide:
            length = self._length(wide[byte])
        else:
            raise self._wrong("an extension", byte)
        code = int.from_bytes(self._take(1), "big", signed=True)
        if code not in codes:
            raise ValueError(
                f"Expected a msgpack extension of type {codes} in {self.where}; "
                f"received: type {code}"
            )
        end = self._stream.tell() + length
        if end > self._end:
            raise ValueError(
                f"Expected {length} bytes at {end - length} of {self.where}; "
                f"received: {self._end} bytes in all: the file is truncated"
            )
        return end

    def extension(self, code):
        """The data of a small extension."""
        end = self._extension((code,))
        return self._take(end - self._stream.tell())

    def piece(self, dtype):
        """The place and length of an array's bytes; steps over them."""
        end = self._extension((_NDARRAY, _NPSCALAR))
        if self.size("array") != 3:
            raise ValueError(
                f"Expected (shape, dtype, bytes) in {self.where}; received another "
                "array"
            )
        for _ in range(self.size("array")):
            self._skip_integer()
        received = self.text()
        if received != dtype:
            raise ValueError(
                f"Expected values of {dtype} in {self.where}; received: {received}"
            )
        length = self._header("bytes", None, 0, {0xC4: 1, 0xC5: 2, 0xC6: 4})
        start = self._stream.tell()
        if start + length != end:
            raise ValueError(
                f"Expected {end - start} bytes at {start} of {self.where}; "
                f"received: {length}"
            )
        self._stream.seek(end)
        return start, length

    def _skip_integer(self):
        byte = self._take(1)[0]
        if byte < 0x80:
            return
        if not 0xCC <= byte <= 0xCF:
            raise self._wrong("a size", byte)
        self._length(1 << (byte - 0xCC))

    def end(self):
        """The end of the file."""
        if self._stream.tell() != self._end:
            raise ValueError(
                f"Expected the end of {self._path} at byte {self._stream.tell()}; "
                f"received: {self._end} bytes"
            )
