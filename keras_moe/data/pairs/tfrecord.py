"""Images and captions in TFRecord files of `tf.train.Example`.

A file `dataset.json` beside them names the features, and may count the records:

    {
      "features": {"image": "image/encoded", "captions": "image/captions"},
      "counts": {"train-00000-of-00001.tfrecord": 1000}
    }

Stored tokens are rows of "max_length" integers, one after the other:

    {
      "features": {
        "image": "image/encoded",
        "token_ids": "image/token_ids",
        "padding_mask": "image/padding_mask"
      },
      "max_length": 64
    }
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe.data.json_schema import DictOf, Integer, Record, Text, read_json
from keras_moe.data.pairs.captions import checked_captions, encoded
from keras_moe.data.pairs.records import record_pairs
from keras_moe.data.pairs.source import PairSource
from keras_moe.data.reading import decode_image
from keras_moe.data.record_writing import (
    SIDECAR,
    encoded_image,
    write_records,
    write_split,
)
from keras_moe.data.tfrecord import check_first, sidecar_path, split_files

IMAGE, CAPTIONS = "image/encoded", "image/captions"
TOKENS = {"token_ids": "image/token_ids", "padding_mask": "image/padding_mask"}
_NAMES = ("image", "captions", *TOKENS)
_FILE = Record(
    {
        "features": Record({name: Text() for name in _NAMES}),
        "max_length": Integer(1, 2**20),
        "counts": DictOf(Integer(0, 2**40)),
    }
)


def has_captions(pattern: str) -> bool:
    """Whether record files have captions, or else classes."""
    path = sidecar_path(pattern)
    if not path.is_file():
        return True
    return "classes" not in read_json(path, Record({}, others=True))


def read_pairs(pattern: str, split: str, every_caption: bool) -> PairSource:
    """The pairs of a split; images stay encoded until they are decoded."""
    import tensorflow as tf

    path = sidecar_path(pattern)
    settings = read_json(path, _FILE) if path.is_file() else {}
    names = settings.get("features", {})
    image = names.get("image", IMAGE)
    length = settings.get("max_length")
    if length is None:
        fields = {"captions": (names.get("captions", CAPTIONS), "string")}
    else:
        fields = {key: (names.get(key, TOKENS[key]), "int64") for key in TOKENS}
    files = split_files(pattern, split, settings.get("counts", {}))
    # An example without captions has no such feature, or an empty one.
    check_first(files[0].path, {image: "bytes_list"})
    features = {
        image: tf.io.FixedLenFeature([], "string"),
        **{name: tf.io.VarLenFeature(dtype) for name, dtype in fields.values()},
    }

    def parse(record):
        example = tf.io.parse_single_example(record, features)
        texts = {key: example[name].values for key, (name, _) in fields.items()}
        if length is not None:
            rows = {key: tf.reshape(x, [-1, length]) for key, x in texts.items()}
            texts = {
                "token_ids": tf.cast(rows["token_ids"], "int32"),
                "padding_mask": rows["padding_mask"] > 0,
            }
        return example[image], texts

    return record_pairs(
        f"tfrecord:{pattern}", files, parse, decode_image, 3, every_caption
    )


def write_pair_tfrecords(
    folder: str | os.PathLike,
    split: str,
    pairs: Iterable[tuple[Any, Any]],
    num_files: int = 1,
    tokenizer: Callable[[Any], dict] | None = None,
) -> None:
    """Writes images and captions as TFRecord files, which `"tfrecord:FOLDER"` reads.

    The files take their places when all are written; a write that fails leaves the
    older ones. Splits are written one by one.

    Args:
        folder: path of the folder, which need not exist.
        split: name of the split; the files are `split-00000-of-00002.tfrecord` and so
            on.
        pairs: iterable of (image, caption) or (image, captions): encoded bytes of a
            JPEG or PNG file, or uint8 (height, width, 1 or 3); a string, or a sequence
            of such.
        num_files: number of files, to which pairs are dealt out in turn.
        tokenizer: callable from a list of strings to `"token_ids"` and
            `"padding_mask"`, arrays (captions, tokens), which are stored in place of
            the captions: `load_pairs` then takes no tokenizer. None stores text.

    Raises:
        ValueError: if an argument is out of range, an image is neither, a caption is
            missing, empty or not UTF-8, or other splits have text where this one has
            tokens.
        OSError: with the path and the bytes, if a file cannot be written.

    Example:

    ```python
    write_pair_tfrecords("photos", "train", [(jpeg_bytes, ["a cat", "a pet"])])
    batches = load_pairs("tfrecord:photos", "train", tokenizer=tokenizer)
    ```
    """
    folder = Path(folder)
    sidecar = folder / SIDECAR
    before = read_json(sidecar, _FILE) if sidecar.exists() else {}
    settings: dict[str, Any] = {}

    def records():
        for number, (image, captions) in enumerate(pairs):
            captions, fault = checked_captions(captions)
            if fault is not None:
                raise ValueError(
                    f"Expected captions of each image; received: pair {number} has "
                    f"{fault}"
                )
            texts, about = _stored(captions, tokenizer)
            if about != settings.setdefault("texts", about):
                raise ValueError(
                    f"Expected tokens of one length; received: {about} of pair "
                    f"{number} after {settings['texts']}"
                )
            yield {IMAGE: [encoded_image(image, number)], **texts}

    def write(parts):
        counts = write_records(parts, records())
        about = settings["texts"]
        if before and {k: x for k, x in before.items() if k != "counts"} != about:
            raise ValueError(
                f"Expected the features and the length of {sidecar}; received: {about}"
            )
        return counts, about

    write_split(folder, split, num_files, before.get("counts", {}), write)


def _stored(captions, tokenizer) -> tuple[dict[str, list], dict[str, Any]]:
    """The features of captions, and what `dataset.json` has about them."""
    if tokenizer is None:
        texts = {CAPTIONS: [encoded(caption) for caption in captions]}
        return texts, {"features": {"image": IMAGE, "captions": CAPTIONS}}
    tokens = tokenizer(list(captions))
    rows = {key: np.asarray(tokens[key]) for key in TOKENS}
    shapes = {rows[key].shape for key in TOKENS}
    shape = rows["token_ids"].shape
    if len(shapes) > 1 or len(shape) != 2 or shape[0] != len(captions):
        raise ValueError(
            "Expected a tokenizer with rows of tokens and of their mask for "
            f"{len(captions)} captions; received: shapes {shapes}"
        )
    texts = {TOKENS[key]: rows[key].astype("int64").ravel().tolist() for key in TOKENS}
    return texts, {"features": {"image": IMAGE, **TOKENS}, "max_length": shape[1]}
