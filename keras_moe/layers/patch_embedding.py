"""Patch embeddings of images. Axes: B batch, N patches, D hidden."""

import math
from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from keras_moe._checks import check_integer, check_one_of, check_pair, unfit
from keras_moe._types import Tensor
from keras_moe.layers._layer import Layer
from keras_moe.layers.position_embedding import (
    INTERPOLATIONS,
    axis_weights,
)
from keras_moe.ops._nn import linear
from keras_moe.ops.cost import Cost

PADDINGS = ("valid", "same")
# Largest patch side accepted in stored weights.
_LONGEST_SIDE = 1024


def fold_channels(kernel: np.ndarray, channels: int) -> np.ndarray:
    """Converts a patch kernel to another number of channels, as timm does.

    A single channel gets the sum of all; more channels repeat the old ones, rescaled.

    Args:
        kernel: array (height, width, old channels, D).
        channels: new number of channels.

    Returns: Array (height, width, channels, D).

    Example:

    >>> from keras_moe.layers import fold_channels
    >>> kernel = np.array([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)
    >>> fold_channels(kernel, 1).ravel().tolist()
    [6.0]
    >>> fold_channels(kernel, 4).ravel().tolist()
    [0.75, 1.5, 2.25, 0.75]
    """
    check_integer("channels", channels)
    old = kernel.shape[2]
    if channels == 1:
        return kernel.sum(axis=2, keepdims=True)
    folded = np.take(kernel, np.arange(channels) % old, axis=2)
    return (folded * (old / channels)).astype(kernel.dtype)


def resize_patch_kernel(
    kernel: np.ndarray, patch_size: int | Sequence[int], interpolation: str = "bilinear"
) -> np.ndarray:
    """Resizes a patch kernel to another patch size, as FlexiViT does.

    The new kernel is `pinv(B^T) w`, with `B` the matrix that resizes a patch.

    Args:
        kernel: array (height, width, channels, D).
        patch_size: new patch size, an int or (height, width).
        interpolation: `"bilinear"` without antialiasing, as in FlexiViT and
            `keras_moe.data`; `"bicubic"` with antialiasing, as in timm, for which
            `"torch_bicubic"` is another name here; or `"antialiased"`, bilinear with
            it.

    Returns: Array (new height, new width, channels, D) of the dtype of `kernel`.

    Reference: *FlexiViT: One Model for All Patch Sizes*, equation 4.

    Example:

    >>> from keras_moe.layers import resize_patch_kernel
    >>> kernel = np.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> resized = resize_patch_kernel(kernel, (1, 4))
    >>> # [5, 7] had the token 26; it is resized to [5, 5.5, 6.5, 7].
    >>> round(float(resized.ravel() @ [5.0, 5.5, 6.5, 7.0]), 6)
    26.0
    """
    check_one_of("interpolation", interpolation, INTERPOLATIONS)
    kind = {"bilinear": "linear", "torch_bicubic": "bicubic"}
    kind = kind.get(interpolation, interpolation)
    # B is separable: the Kronecker product of a matrix for rows and one for columns.
    rows, columns = (
        np.linalg.pinv(axis_weights(old, new, kind).T)
        for old, new in zip(kernel.shape[:2], check_pair("patch_size", patch_size))
    )
    resized = np.einsum(
        "yr,xc,rcid->yxid", rows, columns, kernel.astype("float64"), optimize=True
    )
    return resized.astype(kernel.dtype)


@keras.saving.register_keras_serializable("keras_moe")
class PatchEmbedding(Layer):
    """Cuts images into patches and projects each to a token.

    Loaded weights of another patch size are resized (`resize_patch_kernel`), and those
    of another number of channels folded (`fold_channels`).

    Args:
        hidden_dim: width D of tokens.
        patch_size: an int or (height, width).
        interpolation: interpolation of loaded weights, see `resize_patch_kernel`.
        padding: `"valid"`, or `"same"` to pad the image with zeros to whole patches.
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape: (B, height, width, channels); or patches that are cut already, (B, N,
    patch height x patch width x channels), each flattened in that order.

    Output shape: (B, N, D), patches row by row.

    Reference: *An Image is Worth 16x16 Words*, equation 1.

    Example:

    >>> from keras_moe.layers import PatchEmbedding
    >>> tuple(PatchEmbedding(8, patch_size=4)(np.zeros((2, 16, 8, 3))).shape)
    (2, 8, 8)
    """

    def __init__(
        self,
        hidden_dim: int,
        patch_size: int | Sequence[int],
        interpolation: str = "bilinear",
        padding: str = "valid",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.padding = check_one_of("padding", padding, PADDINGS)
        self.interpolation = check_one_of(
            "interpolation", interpolation, INTERPOLATIONS
        )
        self.hidden_dim = check_integer("hidden_dim", hidden_dim)
        self.patch_size = check_pair("patch_size", patch_size)

    def build(self, input_shape):
        if len(input_shape) != 3:
            self.grid(input_shape)
        self.kernel = self.add_weight(
            name="kernel",
            shape=self.weight_shapes(input_shape[1:])["kernel"],
            initializer="lecun_normal",
        )
        self.bias = self.add_weight(
            name="bias", shape=(self.hidden_dim,), initializer="zeros"
        )

    def grid(self, image_shape: tuple) -> tuple[int, int]:
        """Patches down and across, for images (..., height, width, channels)."""
        if len(image_shape) < 3 or None in image_shape[-3:]:
            raise ValueError(
                "Expected images of shape (batch, height, width, channels) with "
                f"known sizes; received: shape={tuple(image_shape)}"
            )
        height, width = image_shape[-3:-1]
        if self.padding == "same":
            return -(-height // self.patch_size[0]), -(-width // self.patch_size[1])
        if height % self.patch_size[0] or width % self.patch_size[1]:
            raise ValueError(
                "Expected an image that the patch size divides; received: height and "
                f"width={(height, width)}, patch_size={self.patch_size}"
            )
        return height // self.patch_size[0], width // self.patch_size[1]

    def call(self, images: Tensor) -> Tensor:
        x = images if len(images.shape) == 3 else self._cut(images)
        return linear(x, ops.reshape(self.kernel, (-1, self.hidden_dim)), self.bias)

    def _cut(self, images):
        rows, columns = self.grid(tuple(images.shape))
        height, width = self.patch_size
        channels = images.shape[-1]
        if self.padding == "same":
            missing = (
                rows * height - images.shape[1],
                columns * width - images.shape[2],
            )
            around = [(n // 2, n - n // 2) for n in missing]
            images = ops.pad(images, ((0, 0), *around, (0, 0)))
        # Moving whole pixel rows of a patch keeps the copy fast.
        x = ops.reshape(images, (-1, rows, height, columns, width * channels))
        x = ops.transpose(x, (0, 1, 3, 2, 4))
        return ops.reshape(x, (-1, rows * columns, height * width * channels))

    def load_own_variables(self, store):
        kernel = store["0"]
        shape = tuple(kernel.shape)
        # Checked before reading: a file may declare a kernel of any size.
        longest = max(_LONGEST_SIDE, *self.patch_size)
        if (
            len(shape) != 4
            or shape[3] != self.hidden_dim
            or min(shape) < 1
            or max(shape[:2]) > longest
        ):
            raise ValueError(
                f"Expected a patch kernel (height, width, channels, {self.hidden_dim}) "
                f"of patches up to {longest} for '{self.path}'; received: {shape}"
            )
        kernel = np.array(kernel)
        if shape[:2] != self.patch_size:
            kernel = resize_patch_kernel(kernel, self.patch_size, self.interpolation)
        if kernel.shape[2] != self.kernel.shape[2]:
            kernel = fold_channels(kernel, self.kernel.shape[2])
        self.kernel.assign(kernel)
        self.bias.assign(np.array(store["1"]))

    def compute_output_shape(self, input_shape):
        return (input_shape[0], self._count(input_shape[1:]), self.hidden_dim)

    def _count(self, shape):
        return shape[0] if len(shape) == 2 else math.prod(self.grid(shape))

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        channels, (height, width) = shape[-1], self.patch_size
        if len(shape) == 2:
            if channels % (height * width):
                expected = f"flattened patches of patch_size={self.patch_size}"
                raise unfit(expected, shape=tuple(shape))
            channels //= height * width
        return {
            "kernel": (height, width, channels, self.hidden_dim),
            "bias": (self.hidden_dim,),
        }

    def cost(self, shape: tuple) -> Cost:
        shapes = self.weight_shapes(shape)
        flops = 2 * self._count(shape) * math.prod(shapes["kernel"])
        return Cost.all_active(shapes, flops)


@keras.saving.register_keras_serializable("keras_moe")
class ClassToken(Layer):
    """Prepends a learned class token.

    Args:
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape: (B, N, D). Output shape: (B, N + 1, D).

    Reference: *An Image is Worth 16x16 Words*, equation 1.

    Example:

    >>> from keras_moe.layers import ClassToken
    >>> tuple(ClassToken()(np.ones((2, 4, 8), "float32")).shape)
    (2, 5, 8)
    """

    def build(self, input_shape):
        shape = (1, 1, input_shape[-1])
        self.token = self.add_weight(name="token", shape=shape, initializer="zeros")

    def call(self, tokens: Tensor) -> Tensor:
        batch = ops.shape(tokens)[0]
        token = ops.broadcast_to(self.token, (batch, 1, tokens.shape[-1]))
        return ops.concatenate([token, tokens], axis=1)

    def compute_output_shape(self, input_shape):
        batch, num_tokens, dim = input_shape
        return (batch, None if num_tokens is None else num_tokens + 1, dim)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        return {"token": (1, 1, shape[-1])}


@keras.saving.register_keras_serializable("keras_moe")
class RegisterTokens(Layer):
    """Inserts learned tokens that carry no patch, behind the class token if any.

    Args:
        count: number of registers.
        index: where the first one goes: 1 behind a class token, else 0.
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape: (B, N, D). Output shape: (B, N + count, D).

    Reference: *Vision Transformers Need Registers*.

    Example:

    >>> from keras_moe.layers import RegisterTokens
    >>> tuple(RegisterTokens(4)(np.ones((2, 5, 8), "float32")).shape)
    (2, 9, 8)
    """

    def __init__(self, count: int, index: int = 1, **kwargs):
        super().__init__(**kwargs)
        self.count = check_integer("count", count)
        self.index = check_integer("index", index, minimum=0)

    def build(self, input_shape):
        if input_shape[1] is not None and self.index > input_shape[1]:
            expected = f"at least index={self.index} tokens before registers"
            raise unfit(expected, tokens=input_shape[1])
        self.tokens = self.add_weight(
            name="tokens",
            shape=(1, self.count, input_shape[-1]),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
        )

    def call(self, tokens: Tensor) -> Tensor:
        shape = (ops.shape(tokens)[0], self.count, tokens.shape[-1])
        registers = ops.broadcast_to(self.tokens, shape)
        parts = [tokens[:, : self.index], registers, tokens[:, self.index :]]
        return ops.concatenate(parts, axis=1)

    def compute_output_shape(self, input_shape):
        batch, num_tokens, dim = input_shape
        return (batch, None if num_tokens is None else num_tokens + self.count, dim)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        return {"tokens": (1, self.count, shape[-1])}
