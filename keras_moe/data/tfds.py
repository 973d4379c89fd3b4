"""Classification data sets of TensorFlow Datasets: an image and its class labels.

Several labels are a sequence of classes, or yes or no for each of some attributes.
"""

import difflib
from pathlib import Path
from typing import Any

import numpy as np

from keras_moe.data.examples import RecordExamples, RecordFile
from keras_moe.data.labels import Classes
from keras_moe.data.network import answer_of, check_reachable


def read_examples(name: str, split: str, data_dir: str | None) -> RecordExamples:
    """Opens a split, downloading and preparing the data set if it is not there.

    Images stay encoded until `decode`, so that shuffling holds bytes, not pixels.
    """
    builder = open_builder(name, data_dir)
    import tensorflow_datasets as tfds

    info = builder.info
    image, label = _features(name, info)
    files = record_files(name, split, builder)

    def read(record, path):
        example = info.features.deserialize_example(
            record, decoders={image: tfds.decode.SkipDecoding()}
        )
        return example[image], _label_numbers(example[label])

    return RecordExamples(
        files,
        read,
        info.features[image].decode_example,
        _classes(info.features[label]),
        encoded_channels=info.features[image].shape[-1],
    )


def record_files(name: str, split: str, builder: Any) -> list[RecordFile]:
    """The files of a split, downloading and preparing the data set if it is
    not there.
    """
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


def count_classes(name: str, data_dir: str | None) -> int:
    """Number of classes, without downloading the data."""
    info = open_builder(name, data_dir).info
    return _classes(info.features[_features(name, info)[1]]).count


def class_names(name: str, data_dir: str | None) -> tuple[str, ...] | None:
    """The names of the classes, without downloading the data."""
    info = open_builder(name, data_dir).info
    return _classes(info.features[_features(name, info)[1]]).names


def open_builder(name: str, data_dir: str | None) -> Any:
    """The builder of a data set, which may not be there yet."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError(
            'tfds: sources need TensorFlow Datasets: pip install "keras-moe[data]"'
        ) from error
    try:
        # TensorFlow Datasets may look for a name in several places of the network.
        return answer_of(
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
        # A namespace such as huggingface: has errors of its own.
        raise ValueError(
            "Expected a data set that TensorFlow Datasets can open; "
            f"received: source='tfds:{name}' ({type(error).__name__}: {error})"
        ) from error


def _prepare(name: str, builder: Any) -> None:
    """Downloads a data set that is not there, if the network answers."""
    if not builder.is_prepared():
        urls = [url for url in builder.url_infos or () if url.startswith("http")]
        if urls:
            check_reachable(urls[0], f"tfds:{name}, which is not in {builder.data_dir}")
    try:
        builder.download_and_prepare()
    except AssertionError as error:
        # The data are to be downloaded by hand.
        raise ValueError(
            f"Expected tfds:{name} to be prepared; received: {error}"
        ) from error


def _label_numbers(label: Any) -> Any:
    """The number of a class, or the numbers of several classes, int32."""
    import tensorflow as tf

    if not isinstance(label, dict):
        return tf.cast(label, "int32")
    has = tf.stack([label[name] for name in sorted(label)])
    return tf.cast(tf.where(has)[:, 0], "int32")


def _classes(labels: Any) -> Classes:
    """The classes of a feature: a `ClassLabel`, a sequence of such, or attributes.

    Attributes are sorted by name, since a data set that is read without its code has
    lost their order; those of CelebA are sorted in any case.
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
    """The keys of the image and of the label, or an error with all features."""
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
