"""Reads `.safetensors` files, one or several with an index."""

import json
import os
from pathlib import Path

import numpy as np

from keras_moe.models.conversion.published_tensors import (
    PublishedTensors,
    TensorInfo,
    check_dtype,
    from_bfloat16,
    library,
)

_DTYPES = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "BOOL": "bool",
    **{f"{k}{n}": f"{'u' * (k == 'U')}int{n}" for k in "IU" for n in (8, 16, 32, 64)},
}


class SafetensorsCheckpoint(PublishedTensors):
    """The tensors of `.safetensors` files."""

    def __init__(self, path: str | os.PathLike, paths: dict[str, str] | None = None):
        library("safetensors")
        from safetensors import SafetensorError, safe_open

        path = Path(path)
        self._files = {}
        tensors, weight_map = {}, None
        if path.name.endswith(".json"):
            weight_map = read_index(path)
            paths = paths or {name: path.parent / name for name in weight_map.values()}
        else:
            paths = {path.name: path}
        try:
            for file in map(str, paths.values()):
                try:
                    # Checks the header against the size of the file.
                    opened = safe_open(file, framework="numpy").__enter__()
                except (OSError, SafetensorError) as error:
                    raise ValueError(
                        f"Expected a whole .safetensors file at {file}; received: "
                        f"{error}. The file is truncated or of another kind."
                    ) from error
                self._files[file] = opened
                for name, info in self._infos(opened, file):
                    if name in tensors:
                        raise ValueError(
                            f"Expected each tensor once; received: {name!r} in "
                            f"{tensors[name].file} and {file}"
                        )
                    tensors[name] = info
        except BaseException:
            self.close()
            raise
        super().__init__(path, tensors)
        for name, file in (weight_map or {}).items():
            if name not in tensors or tensors[name].file != str(paths[file]):
                raise ValueError(
                    f"Expected {name!r} in {paths[file]}, as {path} says; received a "
                    "file without it"
                )

    @staticmethod
    def _infos(opened, file):
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            dtype = _DTYPES.get(part.get_dtype(), part.get_dtype())
            check_dtype(dtype, name, file)
            yield name, TensorInfo(tuple(part.get_shape()), dtype, file)

    def close(self) -> None:
        for opened in self._files.values():
            opened.__exit__(None, None, None)
        self._files = {}

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        info = self[name]
        if info.dtype == "bfloat16":
            return self._read_bfloat16(name, info, rows)
        if rows is None:
            return self._files[info.file].get_tensor(name)
        return self._files[info.file].get_slice(name)[rows]

    def _read_bfloat16(self, name, info, rows):
        """The library reads bfloat16 into other frameworks' tensors alone."""
        with open(info.file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            begin, _ = json.loads(stream.read(size))[name]["data_offsets"]
            start, stop, _ = (rows or slice(None)).indices((*info.shape, 1)[0])
            shape = info.shape
            width = int(np.prod(shape[1:], dtype="int64"))
            if rows is not None:
                shape = (stop - start, *shape[1:])
                begin += 2 * start * width
            stream.seek(8 + size + begin)
            bits = np.fromfile(stream, "<u2", int(np.prod(shape, dtype="int64")))
        return from_bfloat16(bits.reshape(shape))


def read_index(path: str | os.PathLike) -> dict[str, str]:
    """The file of each tensor, from a `.safetensors.index.json`."""
    try:
        weight_map = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
        files = set(weight_map.values())
        inside = all(
            Path(file).name == file and file.endswith(".safetensors") for file in files
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"Expected a weight_map of file names in {path}; received a file of "
            "another kind"
        ) from error
    if not inside:
        raise ValueError(
            f"Expected .safetensors files of the same folder in {path}; received: "
            f"{sorted(files)}"
        )
    return weight_map
