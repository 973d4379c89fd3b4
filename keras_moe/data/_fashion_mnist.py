"""Fashion-MNIST: 70,000 grey 28x28 images of clothes in 10 classes.

Reads the authors' files in the IDX format of MNIST (big-endian: a magic number, the
axis sizes, and bytes), or falls back to TensorFlow Datasets.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from keras_moe.checks import check_one_of
from keras_moe.data import _tfds
from keras_moe.data._examples import Examples, in_memory
from keras_moe.data.labels import Classes

CLASS_NAMES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
SPLITS = ("train", "test", "all")
# Path of the Debian package dataset-fashion-mnist.
DEBIAN = "/usr/share/datasets/fashion-mnist"
_PREFIXES = {"train": ("train",), "test": ("t10k",), "all": ("train", "t10k")}
_IMAGES, _LABELS = "{}-images-idx3-ubyte.gz", "{}-labels-idx1-ubyte.gz"
_CLASSES = Classes(len(CLASS_NAMES), CLASS_NAMES)


def find_classes(name: str, data_dir: str | None) -> Classes:
    """Returns the classes, which are known without the files."""
    return _CLASSES


def open_labelled(name: str, split: str, data_dir: str | None) -> Examples:
    """Opens a split from `data_dir`, Debian's files or TensorFlow Datasets."""
    for folder in (data_dir, DEBIAN):
        if folder and Path(folder, _IMAGES.format("train")).is_file():
            return in_memory(*read_pixels(split, Path(folder)), _CLASSES)
    try:
        examples = _tfds.open_labelled("fashion_mnist", split, data_dir)
    except (ImportError, OSError) as error:
        # Network errors have further arguments after the text.
        kinds = (ImportError, TimeoutError, OSError)
        raise next(kind for kind in kinds if isinstance(error, kind))(
            f"Expected {_IMAGES.format('train')} and the other files in data_dir, the "
            "Debian package dataset-fashion-mnist, or TensorFlow Datasets with "
            f"tfds:fashion_mnist; received: data_dir={data_dir!r}, and {error}"
        ) from error
    examples.classes = _CLASSES
    return examples


def read_pixels(split: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads images (N, 28, 28, 1), uint8, and labels (N,), int32."""
    check_one_of("split", split, SPLITS)
    parts = [
        (
            _read_idx(folder / _IMAGES.format(prefix), 3),
            _read_idx(folder / _LABELS.format(prefix), 1),
        )
        for prefix in _PREFIXES[split]
    ]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts))
    if len(images) != len(labels) or np.any(labels >= len(CLASS_NAMES)):
        raise ValueError(
            f"Expected a label below {len(CLASS_NAMES)} for each image in {folder}; "
            f"received: {len(images)} images, and {len(labels)} labels up to "
            f"{labels.max(initial=0)}"
        )
    return images[..., None], labels.astype("int32")


def _read_idx(path, rank):
    """Reads a compressed IDX file of bytes."""
    try:
        data = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"Expected a gzip file; received: {path} ({error})") from error
    # 8 stands for unsigned bytes.
    magic = bytes([0, 0, 8, rank])
    shape = np.frombuffer(data[4 : 4 * (rank + 1)].ljust(4 * rank, b"\0"), ">u4")
    size = math.prod(shape.tolist())
    start = 4 * (rank + 1)
    if data[:4] != magic or len(data) != start + size:
        raise ValueError(
            f"Expected an IDX file of {rank} axes of bytes; received: {path}, which "
            f"begins with {data[:4]!r} and has {len(data)} bytes"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
