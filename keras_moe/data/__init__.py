"""Input pipelines and augmentation. Needs TensorFlow only when a pipeline is built."""

from keras_moe.data.augmentation import RandAugment, RandomResizedCrop
from keras_moe.data.digits import load_digits
from keras_moe.data.loading import load, num_classes, num_examples
from keras_moe.data.oversampling import oversample

__all__ = [
    "RandAugment",
    "RandomResizedCrop",
    "load",
    "load_digits",
    "num_classes",
    "num_examples",
    "oversample",
]
