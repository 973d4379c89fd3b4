"""Datasets of TensorFlow Datasets with images, and with class labels or captions.

Several labels are a sequence of classes, or a boolean for each attribute. Captions are
a text, a sequence of texts, as in Flickr30k, or a sequence of dicts with a text, as in
`coco_captions`.
"""

import difflib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe.data._captions import CaptionOptions, captioned_records
from keras_moe.data._examples import Examples, RecordExamples, RecordFile
from keras_moe.data.labels import Classes

# Seconds to wait for the network. An answer takes one second; a dead name server or
# proxy takes minutes.
PATIENCE = 60
_CAPTIONS, _TEXT = ("captions", "caption"), ("text", "caption", "raw")


def find_classes(name: str, data_dir: str | None) -> Classes:
    """Returns the classes without downloading the data."""
    info = _open_builder(name, data_dir).info
    return _classes(info.features[_features(name, info)[1]])


def open_labelled(name: str, split: str, data_dir: str | None) -> RecordExamples:
    """Opens a split with labels.

    Images stay encoded until `decode`, so that shuffling buffers bytes, not pixels.
    """
    builder = _open_builder(name, data_dir)
    import tensorflow_datasets as tfds

    info = builder.info
    image, label = _features(name, info)

    def read(record, path):
        example = info.features.deserialize_example(
            record, decoders={image: tfds.decode.SkipDecoding()}
        )
        return {"image": example[image], "label": _label_numbers(example[label])}

    return RecordExamples(
        _record_files(name, split, builder),
        read,
        info.features[image].decode_example,
        classes=_classes(info.features[label]),
        encoded_channels=info.features[image].shape[-1],
    )


def open_captioned(name: str, split: str, options: CaptionOptions) -> Examples | None:
    """Opens a split with captions; None if it only has labels."""
    import tensorflow as tf

    builder = _open_builder(name, options.data_dir)
    import tensorflow_datasets as tfds

    features = builder.info.features
    found = _captions(features)
    if found is None:
        return None
    key, inner = found
    image = dict(features.items()).get("image")
    if (
        not isinstance(image, tfds.features.Image)
        or image.shape[-1] not in (1, 3)
        or np.dtype(image.np_dtype) != "uint8"
    ):
        raise ValueError(
            f"Expected tfds:{name} to have an image (1 or 3 channels, uint8) besides "
            f"its captions; received: features={features}"
        )
    # Objects and other features of the images are not parsed.
    wanted = tfds.features.FeaturesDict({"image": image, key: features[key]})

    def parse(record):
        example = wanted.deserialize_example(
            record, decoders={"image": tfds.decode.SkipDecoding()}
        )
        texts = example[key] if inner is None else example[key][inner]
        return example["image"], {"captions": tf.reshape(texts, [-1])}

    return captioned_records(
        _record_files(name, split, builder),
        parse,
        image.decode_example,
        image.shape[-1],
        options.every_caption,
    )


def _record_files(name: str, split: str, builder: Any) -> list[RecordFile]:
    """Returns the files of a split; downloads and prepares the dataset if missing."""
    import tensorflow_datasets as tfds

    _prepare(name, builder)
    info = builder.info
    try:
        files = [
            RecordFile(file.filename, file.skip, file.take)
            for file in info.splits[split].file_instructions
        ]
    except (KeyError, ValueError, AssertionError) as error:
        raise ValueError(
            f"Expected a split of tfds:{name}, one of {sorted(info.splits)}, "
            "or a slice or sum of them such as 'train[:90%]'; "
            f"received: split={split!r}"
        ) from error
    if not sum(file.take for file in files):
        raise ValueError(
            f"Expected a split of tfds:{name} with examples; received: split={split!r}"
        )
    # TFRecord is the default of TensorFlow Datasets.
    if info.file_format != tfds.core.FileFormat.TFRECORD:
        raise ValueError(
            f"Expected tfds:{name} to be prepared in TFRecord files; "
            f"received: file_format={info.file_format.value!r}"
        )
    return files


def _open_builder(name: str, data_dir: str | None) -> Any:
    """Returns the builder of a dataset, which may still have to be prepared."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError(
            'tfds: sources need TensorFlow Datasets: pip install "keras-moe[data]"'
        ) from error
    try:
        # TensorFlow Datasets may look for a name at several network addresses.
        return _answer_of(
            lambda: tfds.builder(name, data_dir=data_dir),
            f"TensorFlow Datasets' search for tfds:{name}",
        )
    except (ImportError, TimeoutError):
        raise
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        if data_dir is not None and Path(data_dir).is_dir():
            known += [path.name for path in Path(data_dir).iterdir() if path.is_dir()]
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"; the nearest are {', '.join('tfds:' + c for c in close)}"
        raise ValueError(
            "Expected the name of a TensorFlow Datasets data set; "
            f"received: source='tfds:{name}'{hint if close else ''}"
        ) from error
    except Exception as error:
        # Namespaces such as huggingface: raise their own errors.
        raise ValueError(
            "Expected a data set that TensorFlow Datasets can open; "
            f"received: source='tfds:{name}' ({type(error).__name__}: {error})"
        ) from error


def _prepare(name: str, builder: Any) -> None:
    """Downloads a missing dataset, if the network answers."""
    if not builder.is_prepared():
        urls = [url for url in builder.url_infos or () if url.startswith("http")]
        if urls:
            _check_reachable(
                urls[0], f"tfds:{name}, which is not in {builder.data_dir}"
            )
    try:
        builder.download_and_prepare()
    except AssertionError as error:
        # The data must be downloaded manually.
        raise ValueError(
            f"Expected tfds:{name} to be prepared; received: {error}"
        ) from error


def _answer_of(function: Callable[[], Any], question: str) -> Any:
    """Returns or raises the result of a function if it arrives in time.

    Libraries that look up names on the network have no time-outs, or multiply them by
    retries. A late function continues in a thread, and its result is ignored.
    """
    done: dict[str, Any] = {}

    def run():
        try:
            done["value"] = function()
        except BaseException as error:
            done["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        raise TimeoutError(
            f"Expected an answer within {PATIENCE} s; received: none to {question}. Is "
            "there a network, and a proxy that answers?"
        )
    if "error" in done:
        raise done["error"]
    return done["value"]


def _check_reachable(url: str, purpose: str) -> None:
    """Tries an address of a server once, before many retries begin."""
    import requests

    try:
        _answer_of(lambda: requests.head(url), f"a request of {url} for {purpose}")
    except requests.RequestException as error:
        raise OSError(
            f"Expected to reach {url} for {purpose}; received: {error}"
        ) from error


def _label_numbers(label: Any) -> Any:
    """Returns one or more class numbers, int32."""
    import tensorflow as tf

    if not isinstance(label, dict):
        return tf.cast(label, "int32")
    has = tf.stack([label[name] for name in sorted(label)])
    return tf.cast(tf.where(has)[:, 0], "int32")


def _classes(labels: Any) -> Classes:
    """Returns the classes of a `ClassLabel`, a sequence of them, or attributes.

    Attributes are sorted by name, because a dataset that is read without its code has
    lost their order; those of CelebA are sorted anyway.
    """
    import tensorflow_datasets as tfds

    if isinstance(labels, tfds.features.FeaturesDict):
        names = tuple(sorted(labels))
        return Classes(len(names), names, max_labels=len(names))
    if isinstance(labels, tfds.features.Sequence):
        one = labels.feature
        return Classes(one.num_classes, tuple(one.names), max_labels=0)
    return Classes(labels.num_classes, tuple(labels.names))


def _features(name: str, info: Any) -> tuple[str, str]:
    """Returns the keys of image and label, or raises an error with all features."""
    import tensorflow_datasets as tfds

    features = info.features
    keys = info.supervised_keys
    if not (isinstance(keys, tuple) and all(isinstance(key, str) for key in keys)):
        keys = None
    image, label = keys if keys and len(keys) == 2 else ("image", "label")
    is_dict = isinstance(features, tfds.features.FeaturesDict)
    if keys is None and is_dict and label not in features:
        label = "attributes" if "attributes" in features else "labels"
    pixels = features[image] if is_dict and image in features else None
    classes = features[label] if is_dict and label in features else None
    if isinstance(classes, tfds.features.Sequence):
        classes = classes.feature
    if (
        isinstance(pixels, tfds.features.Image)
        and (_are_attributes(classes) or isinstance(classes, tfds.features.ClassLabel))
        and pixels.shape[-1] in (1, 3)
        and np.dtype(pixels.np_dtype) == "uint8"
        and _classes(classes).count
    ):
        return image, label
    raise ValueError(
        f"Expected tfds:{name} to have an image (1 or 3 channels, uint8) and class "
        f"labels, or attributes that it has or not; received: features={features}, "
        f"supervised_keys={info.supervised_keys}"
    )


def _are_attributes(feature: Any) -> bool:
    """Whether a feature is a dict of booleans."""
    import tensorflow_datasets as tfds

    return isinstance(feature, tfds.features.FeaturesDict) and all(
        one.shape == () and np.dtype(one.np_dtype) == bool for one in feature.values()
    )


def _captions(features: Any) -> tuple[str, str | None] | None:
    """Returns the key of the captions and of the text in each, or None."""
    import tensorflow_datasets as tfds

    if not isinstance(features, tfds.features.FeaturesDict):
        return None
    by_name = dict(features.items())
    for key in _CAPTIONS:
        feature = by_name.get(key)
        if isinstance(feature, tfds.features.Sequence):
            feature = feature.feature
        if _is_text(feature):
            return key, None
        if isinstance(feature, tfds.features.FeaturesDict):
            inner = [name for name in _TEXT if name in feature]
            if inner and _is_text(feature[inner[0]]):
                return key, inner[0]
    return None


def _is_text(feature: Any) -> bool:
    """Whether a feature is a single string."""
    shape = getattr(feature, "shape", None)
    return shape == () and feature.tf_dtype.name == "string"
