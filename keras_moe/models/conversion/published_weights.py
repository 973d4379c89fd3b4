"""Fills a model with published weights, and reports how."""

import collections
import contextlib
import dataclasses
import functools
import math
import os
from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_moe._checks import check_pair, unfit
from keras_moe._files import write_json
from keras_moe._types import OnProgress
from keras_moe.layers import fold_channels, resize_positions
from keras_moe.models.conversion._readers import FLOATS, PublishedTensors
from keras_moe.models.conversion._rules import Filled, PatchKernel
from keras_moe.models.conversion._spec import ConversionSpec

KERNEL, POSITIONS = "patch_embedding/kernel", "position_embedding/embedding"


class ConvertedWeight(NamedTuple):
    """A weight of the model and the tensors it was converted from.

    Attributes:
        weight: path of the weight.
        shape: shape of the weight.
        sources: dict from tensor name to shape.
        how: conversion steps, as text.
    """

    weight: str
    shape: tuple[int, ...]
    sources: dict[str, tuple[int, ...]]
    how: str


class ConversionReport(NamedTuple):
    """The report of a conversion.

    Attributes:
        source: name of the source.
        scheme: naming scheme, such as "ViT (timm)".
        library: publisher of the weights, or the library that reads them.
        licence: licence of the weights, where the library implies it.
        backbone: class of the backbone.
        arguments: arguments of the backbone in the source.
        weights: list of `ConvertedWeight`.
        new: weights that keep their initial values, such as those of a new head.
        ignored: dict from unused tensors to the reason.
        notes: remarks for the user.
        nbytes: total bytes read.
    """

    source: str
    scheme: str
    library: str
    licence: str
    backbone: str
    arguments: dict
    weights: list[ConvertedWeight]
    new: list[str]
    ignored: dict[str, str]
    notes: list[str]
    nbytes: int

    def to_dict(self) -> dict:
        """Returns a JSON-serialisable dict."""
        content = self._asdict()
        content["weights"] = [weight._asdict() for weight in self.weights]
        return content

    def save(self, path: str | os.PathLike) -> None:
        """Writes the report as JSON."""
        write_json(path, self.to_dict())

    def print(self, console: Console | None = None) -> None:
        """Prints a table of all weights and the unused tensors."""
        console = console or Console()
        title = f"{self.source}: {self.scheme}, {self.licence}"
        table = Table(title=Text(title, "table.title"))
        for column in ("weight", "shape", "from", "how"):
            table.add_column(column, overflow="fold")
        for weight in self.weights:
            sources = "\n".join(
                f"{name} {list(shape)}" for name, shape in weight.sources.items()
            )
            values = weight.weight, list(weight.shape), sources, weight.how
            table.add_row(*(Text(str(value)) for value in values))
        for name in self.new:
            table.add_row(Text(name), "", "", "new: initial values")
        console.print(table)
        for reason, count in collections.Counter(self.ignored.values()).items():
            console.print(f"left out: {count} tensors, {reason}", markup=False)
        for note in self.notes:
            console.print(f"note: {note}", markup=False)


class _ImageSizes(NamedTuple):
    """Sizes of an image tower, its weights' `prefix` and its `interpolation`."""

    prefix: str
    patch_size: tuple[int, int]
    channels: int
    grid: tuple[int, int]
    class_token: bool
    interpolation: str

    @classmethod
    def of(cls, config: dict) -> "_ImageSizes | None":
        prefix = ""
        if isinstance(config.get("image"), dict):
            prefix, config = "image/", config["image"]
        if "image_shape" not in config:
            return None
        height, width, channels = config["image_shape"]
        patch_size = check_pair("patch_size", config["patch_size"])
        return cls(
            prefix,
            patch_size,
            channels,
            (height // patch_size[0], width // patch_size[1]),
            config.get("class_token", False),
            config.get("position_interpolation", "bilinear"),
        )

    def shape_of(self, path: str, shape: tuple) -> tuple:
        if path == self.prefix + KERNEL:
            return (*self.patch_size, self.channels, shape[3])
        if path == self.prefix + POSITIONS:
            return (1, math.prod(self.grid) + self.class_token, shape[2])
        return shape

    def fit(
        self, value: np.ndarray, path: str, target: "_ImageSizes"
    ) -> tuple[np.ndarray, str]:
        """Resizes a weight to another tower's sizes; also returns the steps."""
        if path == self.prefix + KERNEL:
            how = []
            if target.patch_size != self.patch_size:
                how.append(f"resized from {self.patch_size} to {target.patch_size}")
            if target.channels != self.channels:
                value = fold_channels(value, target.channels)
                how.append(f"folded to {target.channels} channels")
            return value, ", ".join(how)
        if path == self.prefix + POSITIONS and target.grid != self.grid:
            kind = target.interpolation
            table = resize_positions(value, self.grid, target.grid, kind)
            return table, f"resized from {self.grid} to {target.grid}, {kind}"
        return value, ""


@dataclasses.dataclass(frozen=True)
class PublishedWeights:
    """Published weights and the rules for converting them."""

    source: str
    file: PublishedTensors
    spec: ConversionSpec
    # Path prefixes of weights that keep their initial values.
    new_weights: tuple[str, ...] = ()
    # False only compares names and shapes.
    load_weights: bool = True

    def fills_backbone(self) -> bool:
        return self.load_weights

    def fills_head(self) -> bool:
        return self.load_weights and not self.new_weights

    def load(
        self, model: keras.Model, progress: OnProgress | None = None
    ) -> ConversionReport:
        """Fills a model; `progress(done, total, name)` is called before each weight."""
        file, spec = self.file, self.spec
        sizes = _ImageSizes.of(spec.arguments)
        steps, new, ignored = self._match(model, sizes)
        backbone: Any = getattr(model, "backbone", model)
        target = _ImageSizes.of(backbone.get_config())
        done, nbytes = [], 0
        if not self.load_weights:
            steps = []
        for number, (weight, rule, shape) in enumerate(steps):
            if progress is not None:
                progress(number, len(steps), weight.path)
            how = self._fill(weight, rule, shape, sizes, target)
            sources = {name: file[name].shape for name in rule.names}
            nbytes += sum(file[name].nbytes for name in rule.names)
            done.append(ConvertedWeight(weight.path, tuple(weight.shape), sources, how))
        return ConversionReport(
            self.source,
            f"{spec.architecture} ({spec.library.name})",
            spec.library.name,
            spec.library.licence,
            spec.backbone,
            spec.arguments,
            done,
            new,
            ignored,
            [*spec.notes, *self._normalization_notes(sizes)],
            nbytes,
        )

    def _fill(self, weight, rule, shape, sizes, target):
        how = ""
        if isinstance(rule, PatchKernel) and target.patch_size != sizes.patch_size:
            rule = dataclasses.replace(
                rule, patch_size=target.patch_size, interpolation=target.interpolation
            )
        value = rule.make(functools.partial(_read, self.file), shape)
        if sizes is not None:
            value, how = sizes.fit(value, weight.path, target)
        value = np.asarray(value, "float32", order="C")
        # Extremes need no temporary array; those of NaN are NaN.
        if not (np.isfinite(value.min()) and np.isfinite(value.max())):
            raise ValueError(
                f"Expected finite values for {weight.path!r}; received others, "
                f"made of {list(rule.names)} in {self.file.path}"
            )
        weight.assign(value)
        return how or _how(rule)

    def _match(self, model, sizes):
        """Pairs weights with rules and checks them without reading values."""
        file, spec, replaced = self.file, self.spec, self.new_weights
        weights = [w for w in model.weights if keras.backend.is_float_dtype(w.dtype)]
        # A backbone's own pooling does not belong to a head.
        is_task = model.backbone is not model
        steps, new, used = [], [], set()
        for weight in weights:
            if is_task and weight.path.startswith(replaced):
                new.append(weight.path)
                continue
            rule = spec.rules.get(weight.path)
            if rule is None:
                raise ValueError(
                    f"Expected a tensor of {file.path} for each weight; received: none "
                    f"for {weight.path!r} with shape {tuple(weight.shape)}"
                )
            shape = tuple(weight.shape)
            if sizes is not None:
                shape = sizes.shape_of(weight.path, shape)
            for name, expected in rule.shapes(shape).items():
                _check_tensor(file, name, expected, weight)
            used.update(rule.names)
            steps.append((weight, rule, shape))
        ignored = dict(spec.ignored)
        for path, rule in spec.rules.items():
            if path.startswith(replaced):
                for name in set(rule.names) - used:
                    ignored.setdefault(name, "of a head that is not wanted")
        left = sorted(set(file) - used - set(ignored))
        if left:
            raise ValueError(
                "Expected a weight for each tensor; received: "
                f"{len(left)} left over in {file[left[0]].file}: {left[:5]}"
            )
        kept = {name: ignored[name] for name in sorted(ignored) if name in file}
        return steps, new, kept

    def _normalization_notes(self, sizes):
        rule = None if sizes is None else self.spec.rules.get(sizes.prefix + KERNEL)
        images = getattr(rule, "normalization", None)
        if images is not None:
            yield (
                "images are in [-1, 1]: the source's normalisation, "
                f"mean={images.mean} and std={images.std} of [0, 1], is folded into "
                "the patch embedding"
            )

    def check(self) -> None:
        """Does nothing: `load` compares names and shapes."""

    def explained(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def close(self) -> None:
        self.file.close()


def _read(file, name):
    array = file.read(name)
    return array.astype("float32") if array.dtype == "bfloat16" else array


def _check_tensor(file, name, expected, weight):
    info = file.get(name)
    shape = None if info is None else info.shape
    if info is None or shape != tuple(expected):
        raise ValueError(
            f"Expected a tensor {name!r} of shape {tuple(expected)} for "
            f"{weight.path!r} in {file.path}; received: shape={shape}"
        )
    if info.dtype not in FLOATS.values() and not name.endswith("position_ids"):
        expected = f"floats as {name!r} for {weight.path!r} in {info.file}"
        raise unfit(expected, f"dtype={info.dtype}")


def _how(rule):
    if isinstance(rule, Filled):
        return rule.value
    if getattr(rule, "normalization", None) is not None:
        return "with the images' normalisation"
    if getattr(rule, "parts", 1) > 1:
        return f"part {rule.part + 1} of {rule.parts}"
    return type(rule).__name__.lower()
