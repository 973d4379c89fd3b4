"""Data sets of TensorFlow Datasets with an image and its captions.

Captions are a text, a sequence of texts, as in Flickr30k, or a sequence of dicts with a
text, as in `coco_captions`.
"""

from typing import Any

import numpy as np

from keras_moe.data.pairs.records import record_pairs
from keras_moe.data.pairs.source import PairSource
from keras_moe.data.tfds import open_builder, record_files

_CAPTIONS, _TEXT = ("captions", "caption"), ("text", "caption", "raw")


def has_captions(name: str, data_dir: str | None) -> bool:
    """Whether a data set has captions, or else classes; downloads nothing."""
    return _captions(open_builder(name, data_dir).info.features) is not None


def read_pairs(
    name: str, split: str, every_caption: bool, data_dir: str | None
) -> PairSource:
    """The pairs of a split, downloaded and prepared if they are not there."""
    import tensorflow as tf

    builder = open_builder(name, data_dir)
    import tensorflow_datasets as tfds

    features = builder.info.features
    key, inner = _captions(features)
    image = dict(features.items()).get("image")
    if (
        not isinstance(image, tfds.features.Image)
        or image.shape[-1] not in (1, 3)
        or np.dtype(image.np_dtype) != "uint8"
    ):
        raise ValueError(
            f"Expected tfds:{name} to have an image (1 or 3 channels, uint8) beside "
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

    return record_pairs(
        f"tfds:{name}",
        record_files(name, split, builder),
        parse,
        image.decode_example,
        image.shape[-1],
        every_caption,
    )


def _captions(features: Any) -> tuple[str, str | None] | None:
    """The key of the captions, and of the text in each; None if there are none."""
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
    """Whether a feature is one string."""
    shape = getattr(feature, "shape", None)
    return shape == () and feature.tf_dtype.name == "string"
