"""Fashion-MNIST: 70,000 grey 28x28 images of clothes in 10 classes.

Reads the authors' IDX files, or falls back to TensorFlow Datasets. The package has the
split `"sample"`, the first 100 test images.
"""

import gzip
import zlib
from pathlib import Path

import numpy as np

from keras_moe._checks import check_one_of, unfit
from keras_moe._files import read_bytes
from keras_moe.data import _tfds
from keras_moe.data._examples import Classes, Examples, in_memory

CLASS_NAMES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
# Path of the Debian package dataset-fashion-mnist.
DEBIAN = "/usr/share/datasets/fashion-mnist"
_SAMPLE = Path(__file__).with_name("fashion_mnist_sample.npz")
_PREFIXES = {"train": ("train",), "test": ("t10k",), "all": ("train", "t10k")}
_IMAGES, _LABELS = "{}-images-idx3-ubyte.gz", "{}-labels-idx1-ubyte.gz"
_CLASSES = Classes(len(CLASS_NAMES), CLASS_NAMES)


def credit(name: str) -> str:
    return "Fashion-MNIST, Zalando SE, MIT"


def find_classes(name: str, data_dir: str | None) -> Classes:
    return _CLASSES


def open_labelled(name: str, split: str, data_dir: str | None) -> Examples:
    """Opens a split from `data_dir`, Debian's files or TensorFlow Datasets."""
    if split == "sample":
        with np.load(_SAMPLE, allow_pickle=False) as stored:
            return in_memory(stored["images"][..., None], stored["labels"], _CLASSES)
    for folder in (data_dir, DEBIAN):
        if folder and Path(folder, _IMAGES.format("train")).is_file():
            return in_memory(*read_pixels(split, Path(folder)), _CLASSES)
    examples = _tfds.open_labelled("fashion_mnist", split, data_dir)
    examples.classes = _CLASSES
    return examples


def read_pixels(split: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads images (N, 28, 28, 1), uint8, and labels (N,), int32."""
    check_one_of("split", split, tuple(_PREFIXES))
    images, labels = (
        np.concatenate([_read_idx(folder / x.format(p)) for p in _PREFIXES[split]])
        for x in (_IMAGES, _LABELS)
    )
    if labels.shape != images.shape[:1] or np.any(labels >= len(CLASS_NAMES)):
        raise ValueError(
            f"Expected a label below {len(CLASS_NAMES)} for each image in {folder}; "
            f"received: {len(images)} images, {len(labels)} labels up to {labels.max()}"
        )
    return images[..., None], labels.astype("int32")


def _read_idx(path: Path) -> np.ndarray:
    try:
        data = gzip.decompress(read_bytes(path, path.parent))
        start = 4 * (data[3] + 1)
        shape = np.frombuffer(data[4:start], ">u4")
        return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
    except (EOFError, IndexError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise unfit("a compressed IDX file", f"{path} ({error})") from error
