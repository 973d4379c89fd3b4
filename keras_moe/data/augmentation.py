"""Augmentation inside the input pipeline: which, in what order, and from which seed.

Every augmentation sees float32 pixels in [0, 255], channels last. Those before the
first one that mixes labels work on single images (height, width, channels); it and
those after it work on batches.
"""

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from keras_moe.data.cut_mix import CutMix
from keras_moe.data.rand_augment import RandAugment
from keras_moe.data.random_flip import RandomFlip
from keras_moe.data.random_resized_crop import RandomResizedCrop
from keras_moe.data.seeded_layers import (
    PLAIN,
    call_with_seed,
    has_argument,
    takes_seeds,
)

# The layers of Keras and KerasCV that mix labels.
LABEL_MIXERS = {"MixUp", "CutMix", "FourierMix"}
# The names of augmentations that are such layers.
LABEL_MIXING_NAMES = ("mixup", "cutmix")


class Step(NamedTuple):
    """One augmentation, ready for the pipeline."""

    function: Callable[[Any, Any, Any], tuple[Any, Any]]
    crop: RandomResizedCrop | None
    mixes_labels: bool
    is_stateless: bool
    keeps_range: bool


def build_steps(
    augment: Any, image_shape: tuple[int, int, int], seed: int
) -> list[Step]:
    """Turns the `augment` argument of `load` into steps."""
    if augment is None:
        return []
    if isinstance(augment, (str, dict)) or callable(augment):
        augment = [augment]
    if not isinstance(augment, Sequence):
        raise ValueError(
            "Expected None, the name of an augmentation or a dict of its name and "
            "options, a Keras layer, a callable or a sequence of these; "
            f"received: augment={augment!r}"
        )
    return [
        _build_step(
            _by_name(item, image_shape, seed + i)
            if isinstance(item, (str, dict))
            else item
        )
        for i, item in enumerate(augment)
    ]


def _by_name(
    item: str | dict, image_shape: tuple[int, int, int], seed: int
) -> Callable:
    plain = {**PLAIN, "seed": seed}
    moved = {**plain, "fill_mode": "nearest"}
    layers, (height, width, _) = keras.layers, image_shape
    makers = {
        "flip": RandomFlip,
        "translation": lambda factor=0.1: layers.RandomTranslation(
            factor, factor, **moved
        ),
        "rotation": lambda factor=0.03: layers.RandomRotation(factor, **moved),
        "randaugment": lambda num_ops=2, magnitude=1.0: RandAugment(num_ops, magnitude),
        "mixup": lambda alpha=0.2: layers.MixUp(_positive(alpha), **plain),
        "cutmix": lambda factor=1.0: CutMix(factor, **plain),
        "random_resized_crop": lambda scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3): (
            RandomResizedCrop(height, width, scale, ratio)
        ),
    }
    options = dict(item) if isinstance(item, dict) else {"name": item}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in makers:
        close = difflib.get_close_matches(str(name), makers, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"Expected an augmentation, one of {sorted(makers)}; "
            f"received: augment={item!r}{hint}"
        )
    known = list(inspect.signature(makers[name]).parameters)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"Expected options of {name!r}, any of {known}; received: augment={item!r}"
        )
    try:
        return makers[name](**options)
    except TypeError as error:
        raise ValueError(
            f"Expected numbers as options of {name!r}; received: augment={item!r}"
        ) from error


def _positive(alpha: float) -> float:
    """Refuses an alpha for which Keras would make images of NaN."""
    if not alpha > 0:
        raise ValueError(f"Expected a positive number; received: alpha={alpha}")
    return alpha


def _build_step(item: Any) -> Step:
    if not callable(item) or inspect.isclass(item):
        raise ValueError(
            "Expected a name, a Keras layer or a callable in `augment`; "
            f"received: {item!r}"
        )
    is_layer = isinstance(item, keras.layers.Layer)
    mixes_labels = _mixes_labels(item)
    is_stateless = takes_seeds(item) if is_layer else has_argument(item, "seed")

    def apply(data, seed):
        if is_layer:
            return call_with_seed(item, data, seed if is_stateless else None)
        return item(data, seed=seed) if is_stateless else item(data)

    def function(images, labels, seed):
        import tensorflow as tf

        if mixes_labels:
            mixed = apply({"images": images, "labels": labels}, seed)
            images, labels = mixed["images"], tf.cast(mixed["labels"], "float32")
        else:
            images = apply(images, seed)
        return tf.cast(images, "float32"), labels

    crop = item if isinstance(item, RandomResizedCrop) else None
    keeps_range = type(item) in (RandomFlip, RandomResizedCrop)
    return Step(function, crop, mixes_labels, is_stateless, keeps_range)


def _mixes_labels(item: Any) -> bool:
    if getattr(item, "mixes_labels", False):
        return True
    if any(kind.__name__ in LABEL_MIXERS for kind in type(item).__mro__):
        return True
    # A pipeline of layers mixes labels if one of them does.
    layers = getattr(item, "layers", None)
    return isinstance(layers, (list, tuple)) and any(map(_mixes_labels, layers))
