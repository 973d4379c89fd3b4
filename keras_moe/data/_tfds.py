"""Datasets of TensorFlow Datasets with images, and with class labels or captions.

Several labels are a sequence of classes, or booleans by attribute. Captions are a text
or a sequence of texts (Flickr30k) or of dicts with a text (`coco_captions`).
"""

import difflib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_moe._checks import unfit
from keras_moe._files import regular_file
from keras_moe.data._captions import CaptionOptions, captioned_records
from keras_moe.data._examples import Classes, Examples, RecordExamples, RecordFile
from keras_moe.data._packages import tf, tfds
from keras_moe.data._texts import record_texts
from keras_moe.data.reading import decode_image

# Seconds to wait for a server. An answer takes one second.
_PATIENCE = 60
_CAPTIONS, _TEXT = ("captions", "caption"), ("text", "caption", "raw")


def find_classes(name: str, data_dir: str | None) -> Classes:
    info = _open_builder(name, data_dir).info
    return _classes(info.features[_features(name, info)[1]])


def open_labelled(name: str, split: str, data_dir: str | None) -> RecordExamples:
    """Opens a split with labels; images stay encoded until `decode`."""
    builder = _open_builder(name, data_dir)
    info = builder.info
    image, label = _features(name, info)

    def read(record, location):
        example = info.features.deserialize_example(
            record, decoders={image: tfds.decode.SkipDecoding()}
        )
        labels = example[label]
        if isinstance(labels, dict):
            has = tf.stack([labels[name] for name in sorted(labels)])
            labels = tf.where(has)[:, 0]
        return {"image": example[image], "label": tf.cast(labels, "int32")}

    return RecordExamples(
        _record_files(name, split, builder),
        read,
        _decode(info.features[image]),
        classes=_classes(info.features[label]),
        encoded_channels=info.features[image].shape[-1],
    )


def open_captioned(name: str, split: str, options: CaptionOptions) -> Examples | None:
    """Opens a split with captions; None if it only has labels."""
    builder = _open_builder(name, options.data_dir)
    features = dict(builder.info.features.items())
    found = _captions(features)
    if found is None:
        return None
    key, inner = found
    image: Any = features.get("image")
    if not _is_image(image):
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
        return example["image"], tf.reshape(texts, [-1])

    return captioned_records(
        _record_files(name, split, builder),
        parse,
        _decode(image),
        image.shape[-1],
        options.every_caption,
    )


def open_texts(name: str, split: str, data_dir: str | None) -> Iterator[str]:
    builder = _open_builder(name, data_dir)
    features = dict(builder.info.features.items())
    if getattr(features.get("text"), "tf_dtype", None) != "string":
        raise unfit(f"tfds:{name} to have a feature 'text'", features=features)
    wanted = tfds.features.FeaturesDict({"text": features["text"]})
    return record_texts(
        _record_files(name, split, builder),
        lambda record: wanted.deserialize_example(record)["text"],
    )


def _open_builder(name: str, data_dir: str | None) -> Any:
    """Returns the builder of a dataset, which may still have to be prepared."""
    try:
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        # Its own message lists all of a thousand names.
        known = tfds.list_builders(with_community_datasets=False)
        raise ValueError(
            f"Expected a TensorFlow Datasets name; received: source='tfds:{name}' "
            f"(nearest: {difflib.get_close_matches(name, known)})"
        ) from error
    except AssertionError as error:
        # Its message has the versions that exist.
        expected = "a version of TensorFlow Datasets"
        raise unfit(expected, f"source='tfds:{name}' ({error})") from error


def _record_files(name: str, split: str, builder: Any) -> list[RecordFile]:
    """Returns the files of a split; downloads and prepares the dataset if missing."""
    import requests

    urls = [url for url in builder.url_infos or () if url.startswith("http")]
    if urls and not builder.is_prepared():
        # Tries a server once, before TensorFlow Datasets tries it many times.
        try:
            requests.head(urls[0], timeout=_PATIENCE)
        except requests.RequestException as error:
            raise ConnectionError(
                f"Expected tfds:{name} in {builder.data_dir}, or to reach {urls[0]}; "
                f"received: {error}"
            ) from error
    try:
        builder.download_and_prepare()
    except AssertionError as error:
        # The data must be downloaded manually.
        raise unfit(f"tfds:{name} to be prepared", error) from error
    if builder.info.file_format != tfds.core.FileFormat.TFRECORD:
        expected = f"tfds:{name} to be prepared in TFRecord files"
        raise unfit(expected, file_format=builder.info.file_format.value)
    files = builder.info.splits[split].file_instructions
    for file in files:
        if "://" not in file.filename:
            regular_file(file.filename, builder.data_dir)
    return [RecordFile(file.filename, file.skip, file.take) for file in files]


def _classes(labels: Any) -> Classes:
    """Classes of a `ClassLabel`, a sequence of them, or sorted attributes."""
    if isinstance(labels, tfds.features.FeaturesDict):
        names = tuple(sorted(labels))
        return Classes(len(names), names, max_labels=len(names))
    if isinstance(labels, tfds.features.Sequence):
        one = labels.feature
        return Classes(one.num_classes, tuple(one.names), max_labels=0)
    return Classes(labels.num_classes, tuple(labels.names))


def _features(name: str, info: Any) -> tuple[str, str]:
    """Returns the keys of image and label, or raises an error with all features."""
    features, keys = dict(info.features.items()), info.supervised_keys
    image, labels = "image", ("label", "attributes", "labels")
    label = next((key for key in labels if key in features), "label")
    if isinstance(keys, tuple) and len(keys) == 2:
        image, label = keys
    if _is_image(features.get(image)) and _are_labels(features.get(label)):
        return image, label
    raise ValueError(
        f"Expected tfds:{name} to have an image (1 or 3 channels, uint8) and class "
        f"labels, or attributes that it has or not; received: features={features}, "
        f"supervised_keys={keys}"
    )


def _decode(feature: Any) -> Callable:
    return decode_image if feature.shape[-1] == 3 else feature.decode_example


def _is_image(feature: Any) -> bool:
    return (
        isinstance(feature, tfds.features.Image)
        and feature.shape[-1] in (1, 3)
        and np.dtype(feature.np_dtype) == "uint8"
    )


def _are_labels(feature: Any) -> bool:
    """Whether a feature is a class, a sequence of classes, or a dict of booleans."""
    if isinstance(feature, tfds.features.FeaturesDict):
        of_one = [(one.shape, np.dtype(one.np_dtype)) for one in feature.values()]
        return {*of_one} == {((), np.dtype(bool))}
    if isinstance(feature, tfds.features.Sequence):
        feature = feature.feature
    return isinstance(feature, tfds.features.ClassLabel)


def _captions(features: dict[str, Any]) -> tuple[str, str | None] | None:
    """Returns the key of the captions and of the text in each, or None."""
    for key in filter(features.__contains__, _CAPTIONS):
        feature = features[key]
        if isinstance(feature, tfds.features.Sequence):
            feature = feature.feature
        if feature.tf_dtype == "string":
            return key, None
        if isinstance(feature, tfds.features.FeaturesDict):
            inner = [name for name in _TEXT if name in feature]
            if inner:
                return key, inner[0]
    return None
