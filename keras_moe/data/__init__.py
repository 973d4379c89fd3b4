"""Input pipelines and augmentation. Needs TensorFlow only when a pipeline is built."""

from keras_moe.data.augmentation import RandAugment, RandomResizedCrop
from keras_moe.data.digits import load_digits
from keras_moe.data.loading import load, num_classes
from keras_moe.data.oversampling import oversample
from keras_moe.data.padding import padded, predictions

__all__ = [
    "RandAugment",
    "RandomResizedCrop",
    "load",
    "load_digits",
    "num_classes",
    "oversample",
    "padded",
    "predictions",
]
