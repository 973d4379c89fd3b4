"""Preprocessing of images of any size."""

import math
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any

import keras
import numpy as np

from keras_moe import _checks
from keras_moe._files import IMAGE_FORMATS, open_regular
from keras_moe.layers.position_embedding import (
    INTERPOLATIONS,
    axis_weights,
)
from keras_moe.models.preprocessing.patches import budget, pad_patches, patch_grid

# Pillow modes and the modes to convert their images to; other modes do not hold pixel
# values.
_MODES = {"1": "L", "L": "L", "LA": "L"}
_MODES.update(dict.fromkeys(("P", "RGB", "RGBA", "CMYK", "YCbCr"), "RGB"))
# Luminance weights of TensorFlow's and Pillow's conversion to grey.
_LUMINANCE = np.array([0.299, 0.587, 0.114], "float32")


@keras.saving.register_keras_serializable("keras_moe")
@dataclass(frozen=True)
class ImagePreprocessor:
    """Resizes, crops and normalises images for a model.

    Images are arrays, Pillow's, or paths of files (BMP, GIF, JPEG, PNG, WebP). A
    classifier applies its `model.preprocessor` in `classify`. `fit`, `evaluate` and
    `predict` do not: they expect preprocessed images, such as those of
    `keras_moe.data.load` or `model.preprocessor(photos)`.

    It runs in NumPy, so that varying image sizes do not recompile anything, and gives
    the same numbers on every backend. Photos opened by Pillow are turned upright, as
    their Exif says. In `tf.data` it runs through `tf.numpy_function`.

    Args:
        image_shape: (height, width, channels) of the model's images.
        mean: mean of pixels in [0, 1], a number or one per channel.
        std: standard deviation, likewise. Mean and std of 0.5 give the range [-1, 1].
        interpolation: `"bilinear"` or `"bicubic"`.
        antialias: whether to average pixels when shrinking; always on for `"bicubic"`.
        center_crop: share of the shorter side to crop, in (0, 1], keeping the aspect
            ratio (timm's `crop_pct`). None resizes without keeping it.
        class_names: names of the classes in order, or None.
        max_patches: most patches of an image, for a model with `max_patches`: images
            keep their aspect ratio and become dicts of `"patches"` and `"grids"`, as
            `pad_patches` makes them. None for images of `image_shape`.
        min_patches: None to resize images to as many patches as `max_patches` allows,
            as SigLIP 2 does (NaFlex). With a number, images keep their size, rounded to
            whole patches, if they have so many patches at least, as in SigLino.
        patch_size: an int or (height, width), with `max_patches`.

    Example:

    >>> from keras_moe.models import ImagePreprocessor
    >>> preprocessor = ImagePreprocessor((32, 32, 3))
    >>> photo = np.full((48, 64, 3), 255, "uint8")
    >>> preprocessor(photo).shape, float(preprocessor(photo).max())
    ((32, 32, 3), 1.0)
    """

    image_shape: tuple[int, int, int]
    mean: Any = 0.5
    std: Any = 0.5
    interpolation: str = "bilinear"
    _: KW_ONLY
    antialias: bool = False
    center_crop: float | None = None
    class_names: Sequence[str] | None = None
    max_patches: int | None = None
    min_patches: int | None = None
    patch_size: Any = None

    def __post_init__(self):
        shape = _checks.check_image_shape(self.image_shape)
        _checks.check_one_of("interpolation", self.interpolation, INTERPOLATIONS[:2])
        _checks.check_bool("antialias", self.antialias)
        crop, names = self.center_crop, self.class_names
        if crop is not None and not 0 < crop <= 1:
            raise _checks.unfit("center_crop to be None or in (0, 1]", center_crop=crop)
        values = {
            "image_shape": shape,
            "mean": _per_channel("mean", self.mean, shape[2]),
            "std": _per_channel("std", self.std, shape[2]),
            "antialias": self.antialias or self.interpolation == "bicubic",
            "class_names": None if names is None else tuple(names),
        }
        if isinstance(names, str) or not all(isinstance(x, str) for x in names or ()):
            raise _checks.unfit(
                "class_names to be None or a list of names", class_names=names
            )
        if min(values["std"]) <= 0:
            raise ValueError(f"Expected std above 0; received: std={self.std!r}")
        most, size = self.max_patches, self.patch_size
        _checks.check_integer("max_patches", most, optional=True)
        _checks.check_integer("min_patches", self.min_patches, 1, most, optional=True)
        if (most is None) != (size is None) or (most is None and self.min_patches):
            expected = "patch_size with max_patches, and min_patches only with them"
            raise _checks.unfit(
                expected,
                max_patches=most,
                min_patches=self.min_patches,
                patch_size=size,
            )
        if most is not None:
            values["patch_size"] = _checks.check_pair("patch_size", size)
            if crop is not None:
                raise _checks.unfit(
                    "center_crop=None with max_patches", center_crop=crop
                )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """Name in model summaries."""
        return "image_preprocessor"

    def __call__(self, images: object, max_value: float | None = None) -> Any:
        """Preprocesses arrays, Pillow images or files; grey and RGB as the model's."""
        batch, is_one = self.batch(images, max_value)
        return keras.tree.map_structure(lambda x: x[0], batch) if is_one else batch

    def batch(self, images: object, max_value: float | None = None) -> tuple[Any, bool]:
        """A batch of preprocessed images, and whether a single image was given."""
        _checks.check_positive("max_value", max_value, optional=True)
        is_one = False
        if isinstance(images, (list, tuple)):
            images = [_array(image) for image in images]
        else:
            images = _array(images)
            is_one = images.ndim != 4
            images = [images] if is_one else images
        parts = [self._prepared(image, max_value) for image in images]
        if self.max_patches is not None:
            # None at all have the shapes of one.
            some = parts or [np.zeros((*self.patch_size, self.image_shape[2]))]
            batch = pad_patches(some, self.patch_size, self.max_patches)
            batch = {name: value[: len(parts)] for name, value in batch.items()}
        else:
            empty = np.zeros((0, *self.image_shape), "float32")
            batch = np.stack(parts) if parts else empty
        return batch, is_one

    def _prepared(self, image, max_value):
        if image.ndim == 2:
            image = image[..., None]
        channels = self.image_shape[2]
        allowed = (1, 3) if channels in (1, 3) else (channels,)
        if image.ndim != 3 or image.shape[2] not in allowed or 0 in image.shape:
            raise ValueError(
                "Expected images (height, width, channels) with a number of channels "
                f"in {allowed}; received: shape={image.shape}"
            )
        size = self.image_shape[:2]
        if self.max_patches is not None:
            grid = patch_grid(
                image.shape[:2], self.patch_size, self.max_patches, self.min_patches
            )
            size = tuple(n * side for n, side in zip(grid, self.patch_size))
        image = self._resized(image, size, _white(image, max_value))
        if image.shape[2] == 3 and channels == 1:
            image = image @ _LUMINANCE[:, None]
        mean, std = np.array(self.mean, "float32"), np.array(self.std, "float32")
        # Broadcasts grey to the model's channels.
        return np.broadcast_to((image - mean) / std, (*size, channels)).copy()

    def _resized(self, image, size, white):
        sizes, starts = size, (0, 0)
        if self.center_crop is not None:
            # The size to resize to, keeping the aspect ratio, before cropping.
            wanted = [math.floor(n / self.center_crop) for n in size]
            scale = max(new / old for new, old in zip(wanted, image.shape))
            sizes = [max(new, int(n * scale)) for new, n in zip(wanted, image.shape)]
            starts = [round((now - new) / 2) for now, new in zip(sizes, size)]
        rows, columns = (
            self._weights(old, now, start, new).astype("float32")
            for old, now, start, new in zip(image.shape, sizes, starts, size)
        )
        # Only the rows that are read: without antialiasing, few of a large photo.
        down, across = (np.flatnonzero(x.any(axis=0)) for x in (rows, columns))
        image = image[np.ix_(down, across)].astype("float32") / np.float32(white)
        # Cubic weights overshoot; like Pillow, clip after each direction.
        image = np.tensordot(columns[:, across], image, (1, 1)).clip(0.0, 1.0)
        return np.tensordot(rows[:, down], image, (1, 1)).clip(0.0, 1.0)

    def _weights(self, old, new, start, count):
        """Returns resize weights for `count` rows; all rows could exhaust memory."""
        kind = "antialiased" if self.antialias else "linear"
        kind = "bicubic" if self.interpolation == "bicubic" else kind
        return axis_weights(old, new, kind, start, count)

    def adapted(
        self,
        image_shape: tuple | None = None,
        num_classes: int | None = None,
        max_patches: int | None = None,
        patch_size: int | Sequence[int] | None = None,
    ) -> "ImagePreprocessor":
        """Returns a copy for another image shape or number of classes.

        Args:
            image_shape: new image shape; other channels get averaged mean and std.
            num_classes: new number of classes; drops class names if it changes.
            max_patches: most patches with a new image shape; None for images of it.
            patch_size: their size.
        """
        changes: dict[str, Any] = {}
        if image_shape is not None:
            least = None
            if max_patches is not None and self.min_patches is not None:
                least = min(self.min_patches, max_patches)
            changes.update(max_patches=max_patches, min_patches=least)
            changes["patch_size"] = None if max_patches is None else patch_size
            if max_patches is not None:
                changes["center_crop"] = None
            changes["image_shape"] = image_shape
            for name in ("mean", "std"):
                value = getattr(self, name)
                if len(value) not in (1, image_shape[-1]):
                    changes[name] = float(np.mean(value))
        names = self.class_names
        if names is not None and num_classes not in (None, len(names)):
            changes["class_names"] = None
        return replace(self, **changes)

    def check_model(self, backbone: Any, num_classes: int | None = None) -> None:
        """Raises ValueError if images or class names do not fit a model."""
        image_shape, own = tuple(backbone.image_shape), budget(backbone.config)
        if image_shape != self.image_shape:
            expected = f"a preprocessor of image_shape={image_shape}"
            raise _checks.unfit(expected, image_shape=self.image_shape)
        if own != budget(self):
            raise _checks.unfit(
                f"a preprocessor of {own or 'whole images'}", **budget(self)
            )
        names = self.class_names
        if names is not None and num_classes not in (None, len(names)):
            raise _checks.unfit(f"class_names of {num_classes} classes", len(names))

    def get_config(self) -> dict:
        config = asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}

    @classmethod
    def from_config(cls, config: dict) -> "ImagePreprocessor":
        return cls(**config)

    def save_to_preset(self, preset_dir: str) -> None:
        """Does nothing: the preprocessor is stored in the preset's `task.json`."""


def _per_channel(name, value, channels):
    values = tuple(np.ravel(value).tolist())
    if len(values) not in (1, channels):
        expected = f"{name} to be a number or one per channel, {channels} in all"
        raise _checks.unfit(expected, f"{name}={value!r}")
    return tuple(_checks.check_number(name, x) for x in values)


def _read(path):
    """The pixels of an image file, upright."""
    message = "Photos in files need Pillow: pip install pillow"
    photos: Any = _checks.import_extra("PIL.Image", message)
    try:
        with open_regular(path) as file:
            return _array(photos.open(file, formats=IMAGE_FORMATS))
    except Exception as error:
        # Pillow fails over damaged files in many ways; the system's errors have a name.
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = f"{os.fspath(path)} ({type(error).__name__}: {error})"
        raise _checks.unfit("an image that can be decoded", reason) from error


def _array(image):
    """Returns an image, a file's or a batch, as a numeric array."""
    if isinstance(image, (str, os.PathLike)):
        return _read(image)
    mode = getattr(image, "mode", None)
    if isinstance(mode, str) and hasattr(image, "convert"):
        # Pillow images: a palette's indices are not pixels, and photos may lie on
        # their side, as their Exif says.
        if mode not in _MODES:
            raise _checks.unfit(
                f"a Pillow image of a mode of {sorted(_MODES)}", mode=mode
            )
        from PIL import ImageOps

        return np.asarray(ImageOps.exif_transpose(image).convert(_MODES[mode]))
    if hasattr(image, "graph"):
        raise ValueError(
            "Expected arrays; received a symbolic tensor. Inside tf.data use "
            "tf.numpy_function(preprocessor, [images], tf.float32), which takes "
            "functions that return arrays alone."
        )
    if keras.ops.is_tensor(image):
        image = keras.ops.convert_to_numpy(image)
    array = np.asarray(image)
    # NumPy's kind for bfloat16 is "V", as for structured arrays.
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        expected = "images as numbers"
        raise _checks.unfit(expected, f"{type(image).__name__} of dtype={array.dtype}")
    return array


def _white(image, max_value):
    """Returns the pixel value of white, if all pixels are in range."""
    white = float(max_value or (255 if image.dtype.kind in "iu" else 1))
    if image.dtype == np.uint8 and white >= 255:
        return white
    low, high = (float(x) for x in (image.min(), image.max()))
    # NaN is not in any range.
    if not (low >= -1e-6 * white and high <= (1 + 1e-6) * white):
        expected = f"pixels in [0, {white:g}], or max_value=..."
        raise _checks.unfit(expected, f"minimum={low:g}, maximum={high:g}")
    return white


def checked_preprocessor(
    preprocessor: object, backbone: Any
) -> ImagePreprocessor | None:
    """Returns a model's preprocessor, if it fits the backbone."""
    if isinstance(preprocessor, dict):
        preprocessor = keras.saving.deserialize_keras_object(preprocessor)
    if preprocessor is None:
        return None
    if not isinstance(preprocessor, ImagePreprocessor):
        expected = "image_preprocessor to be an ImagePreprocessor or None"
        raise _checks.unfit(expected, image_preprocessor=preprocessor)
    preprocessor.check_model(backbone)
    return preprocessor
