"""Rules by which a weight is made of the tensors of a checkpoint.

A rule knows the names that it reads, the shapes that they must have for a weight of
a given shape, and how to make that weight's values. Shapes are compared before
anything is read. Axes: D hidden, N tokens.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_moe.layers import resize_patch_kernel
from keras_moe.models.conversion.image_range import Normalization


def _size(shape):
    return int(np.prod(shape, dtype="int64"))


@dataclass(frozen=True)
class Direct:
    """The tensor as it is."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that are read."""
        return (self.name,)

    def shapes(self, target: tuple) -> dict[str, tuple]:
        """The shapes that the tensors must have for a weight of shape `target`."""
        return {self.name: target}

    def make(self, read: Callable, target: tuple) -> np.ndarray:
        """The weight's values, with `read(name, rows=None)` for the tensors'."""
        return read(self.name)


@dataclass(frozen=True)
class Squeezed(Direct):
    """A tensor without the weight's leading axes of size 1."""

    axes: int = 1

    def shapes(self, target):
        return {self.name: target[self.axes :]}

    def make(self, read, target):
        return read(self.name).reshape(target)


@dataclass(frozen=True)
class Scalar(Direct):
    """One number, which may be stored with axes of size 1.

    Args:
        shape: shape of the tensor.
    """

    shape: tuple[int, ...] = ()

    def shapes(self, target):
        return {self.name: self.shape}

    def make(self, read, target):
        return read(self.name).reshape(target)


@dataclass(frozen=True)
class Matrix(Direct):
    """PyTorch's kernel (outputs, inputs): one of several that are stored together.

    Args:
        inputs: number of the weight's axes that are inputs: 1, and 2 (heads, size of a
            head) for the output of attention.
        part: number of the kernel among those that are stored together.
        parts: number of kernels that are stored together.
        scale: name of factors on the outputs (LayerScale), which become part of
            the kernel.
    """

    inputs: int = 1
    part: int = 0
    parts: int = 1
    scale: str | None = None

    @property
    def names(self):
        return (self.name, self.scale) if self.scale else (self.name,)

    def shapes(self, target):
        rows, columns = _size(target[self.inputs :]), _size(target[: self.inputs])
        shapes = {self.name: (self.parts * rows, columns)}
        return {**shapes, self.scale: (rows,)} if self.scale else shapes

    def make(self, read, target):
        rows = _size(target[self.inputs :])
        kernel = read(self.name, _part(self.part, self.parts, rows)).T
        if self.scale:
            kernel = kernel * read(self.scale)
        return kernel.reshape(target)


@dataclass(frozen=True)
class Vector(Direct):
    """PyTorch's bias: one of several that are stored together; see `Matrix`."""

    part: int = 0
    parts: int = 1
    scale: str | None = None

    @property
    def names(self):
        return (self.name, self.scale) if self.scale else (self.name,)

    def shapes(self, target):
        shapes = {self.name: (self.parts * _size(target),)}
        return {**shapes, self.scale: (_size(target),)} if self.scale else shapes

    def make(self, read, target):
        bias = read(self.name, _part(self.part, self.parts, _size(target)))
        if self.scale:
            bias = bias * read(self.scale)
        return bias.reshape(target)


def _part(part, parts, rows):
    return slice(part * rows, (part + 1) * rows) if parts > 1 else None


@dataclass(frozen=True)
class PatchKernel(Direct):
    """The convolution that embeds patches, with the images' normalisation in it.

    Args:
        torch: whether it is stored as (D, channels, height, width).
        normalization: normalisation of the images, or None.
        patch_size: patch size of the model, to which the kernel is resized; None keeps
            it.
        interpolation: argument of `keras_moe.layers.resize_patch_kernel`.
    """

    torch: bool = False
    normalization: Normalization | None = None
    patch_size: tuple[int, int] | None = None
    interpolation: str = "bilinear"

    def shapes(self, target):
        height, width, channels, dim = target
        if self.torch:
            return {self.name: (dim, channels, height, width)}
        return {self.name: target}

    def make(self, read, target):
        kernel = self._kernel(read)
        if self.normalization is None:
            return kernel
        # Pixels x in [-1, 1] are (x + 1) / 2 in [0, 1].
        std = np.array(self.normalization.std, "float32")
        return kernel.astype("float32") / (2.0 * std[:, None])

    def _kernel(self, read):
        kernel = read(self.name)
        if self.torch:
            kernel = kernel.transpose(2, 3, 1, 0)
        if self.patch_size is None:
            return kernel
        kernel = kernel.astype("float32")
        return resize_patch_kernel(kernel, self.patch_size, self.interpolation)


@dataclass(frozen=True)
class PatchBias(PatchKernel):
    """The bias of that convolution: stored or zero, and what normalisation adds.

    Args:
        name: name of the kernel.
        bias: name of the bias, or None.
    """

    bias: str | None = None

    @property
    def names(self):
        # The kernel belongs to its own weight.
        return (self.bias,) if self.bias else ()

    def shapes(self, target):
        return {self.bias: target} if self.bias else {}

    def make(self, read, target):
        bias = read(self.bias) if self.bias else np.zeros(target, "float32")
        if self.normalization is None:
            return bias
        mean, std = (np.array(x, "float64") for x in self.normalization)
        # The sum is that of the resized kernel: a smaller kernel has another one.
        per_channel = self._kernel(read).sum(axis=(0, 1), dtype="float64")
        return (bias + ((0.5 - mean) / std) @ per_channel).astype("float32")


@dataclass(frozen=True)
class Positions(Direct):
    """A table of position embeddings.

    Args:
        axes: number of leading axes of size 1 that the tensor lacks.
        without_class_token: whether it lacks a row for the class token, which then gets
            zeros.
        ids: name of the rows' numbers, which KerasHub stores, or None.
    """

    axes: int = 0
    without_class_token: bool = False
    ids: str | None = None

    @property
    def names(self):
        return (self.name, self.ids) if self.ids else (self.name,)

    def shapes(self, target):
        one, rows, dim = target
        rows -= self.without_class_token
        shapes = {self.name: (one, rows, dim)[self.axes :]}
        return {**shapes, self.ids: (1, rows)} if self.ids else shapes

    def make(self, read, target):
        table = read(self.name)
        if self.ids:
            table = table[read(self.ids)[0]]
        table = table.reshape(1, *table.shape[-2:])
        if self.without_class_token:
            table = np.pad(table, ((0, 0), (1, 0), (0, 0)))
        return table


@dataclass(frozen=True)
class Filled:
    """Values that the checkpoint's architecture has without a tensor.

    Args:
        value: `"zeros"`, or `"identity"` for a matrix.
    """

    value: str = "zeros"
    names = ()

    def shapes(self, target: tuple) -> dict[str, tuple]:
        """None are read."""
        return {}

    def make(self, read: Callable, target: tuple) -> np.ndarray:
        """The weight's values."""
        if self.value == "identity":
            return np.eye(*target, dtype="float32")
        return np.zeros(target, "float32")


def renamed(rule: Any, rename: Callable[[str], str]) -> Any:
    """The same rule for tensors of other names."""
    fields = {
        field: rename(getattr(rule, field))
        for field in ("name", "ids", "bias", "scale")
        if getattr(rule, field, None) is not None
    }
    return dataclasses.replace(rule, **fields) if fields else rule


def norm(place: str, name: str, scale: str = "weight", offset: str = "bias") -> dict:
    """Rules of a normalisation: `gamma` and `beta`."""
    return {
        f"{place}/gamma": Direct(f"{name}{scale}"),
        f"{place}/beta": Direct(f"{name}{offset}"),
    }


def direct(place: str, name: str) -> dict:
    """Rules of a kernel and a bias that are stored as in the model."""
    return {
        f"{place}/kernel": Direct(f"{name}kernel"),
        f"{place}/bias": Direct(f"{name}bias"),
    }


def linear(
    place: str, name: str, has_bias: bool = True, scale: str | None = None, **part
) -> dict:
    """Rules of a PyTorch linear layer."""
    inputs = part.pop("inputs", 1)
    bias = Filled()
    if has_bias:
        bias = Vector(f"{name}bias", scale=scale, **part)
    return {
        f"{place}/kernel": Matrix(f"{name}weight", inputs=inputs, scale=scale, **part),
        f"{place}/bias": bias,
    }
