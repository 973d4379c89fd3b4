"""Weights of an image tower for images and patches of another size than the source's.

The sizes are those of configs: of a source, and of the model that its weights fill.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from keras_moe.checks import check_pair
from keras_moe.layers import fold_channels, resize_positions
from keras_moe.models.conversion.weight_rules import PatchKernel

KERNEL, POSITIONS = "patch_embedding/kernel", "position_embedding/embedding"


class ImageSizes(NamedTuple):
    """The sizes of an image tower.

    Attributes:
        place: start of the paths of the tower's weights.
        patch_size: (height, width) of a patch.
        channels: number of the images' channels.
        grid: number of patches down and across.
        class_token: whether there is a class token.
        interpolation: interpolation that resizes positions and patches.
    """

    place: str
    patch_size: tuple[int, int]
    channels: int
    grid: tuple[int, int]
    class_token: bool
    interpolation: str

    @classmethod
    def of(cls, config: dict) -> "ImageSizes | None":
        """The sizes in the arguments of a backbone; None without images."""
        place = ""
        if isinstance(config.get("image"), dict):
            place, config = "image/", config["image"]
        if "image_shape" not in config:
            return None
        height, width, channels = config["image_shape"]
        patch_size = check_pair("patch_size", config["patch_size"])
        return cls(
            place,
            patch_size,
            channels,
            (height // patch_size[0], width // patch_size[1]),
            config.get("class_token", False),
            config.get("position_interpolation", "bilinear"),
        )

    def shape_of(self, path: str, shape: tuple) -> tuple:
        """The shape of a weight in a tower of these sizes."""
        if path == self.place + KERNEL:
            return (*self.patch_size, self.channels, shape[3])
        if path == self.place + POSITIONS:
            rows, columns = self.grid
            return (1, rows * columns + self.class_token, shape[2])
        return shape

    def rule_for(self, rule: Any, target: "ImageSizes") -> Any:
        """A weight's rule, for a tower of other patches."""
        if isinstance(rule, PatchKernel) and target.patch_size != self.patch_size:
            return dataclasses.replace(
                rule, patch_size=target.patch_size, interpolation=target.interpolation
            )
        return rule

    def fit(
        self, value: np.ndarray, path: str, target: "ImageSizes"
    ) -> tuple[np.ndarray, str]:
        """A weight's values for a tower of other sizes, and the steps that it took."""
        if path == self.place + KERNEL:
            how = []
            if target.patch_size != self.patch_size:
                how.append(f"resized from {self.patch_size} to {target.patch_size}")
            if target.channels != self.channels:
                value = fold_channels(value, target.channels)
                how.append(f"folded to {target.channels} channels")
            return value, ", ".join(how)
        if path == self.place + POSITIONS and target.grid != self.grid:
            kind = target.interpolation
            table = resize_positions(value, self.grid, target.grid, kind)
            return table, f"resized from {self.grid} to {target.grid}, {kind}"
        return value, ""
