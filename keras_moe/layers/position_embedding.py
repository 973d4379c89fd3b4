"""Position embeddings of image patches. Axes: B batch, N tokens, D hidden."""

from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from keras_moe._checks import check_one_of, check_pair, check_positive, unfit
from keras_moe._types import Tensor
from keras_moe.layers._layer import Layer

KINDS = ("learned", "sincos")
ROTARY_KINDS = ("axial", "golden")
# The first two also for images.
INTERPOLATIONS = ("bilinear", "bicubic", "torch_bicubic")


def sincos_table(grid: tuple[int, int], dim: int) -> np.ndarray:
    """Fixed sine-cosine embeddings of a grid of patches.

    Args:
        grid: number of patches down and across.
        dim: D, a multiple of 4.

    Returns: float32 (rows x columns, D): `[sin x, cos x, sin y, cos y]` with x the
    column, y the row, and frequencies `10000^(-i / (D/4 - 1))`.

    Example:

    >>> from keras_moe.layers import sincos_table
    >>> sincos_table((2, 3), 8).shape
    (6, 8)
    """
    if dim % 4 or dim < 8:
        raise unfit("a multiple of 4 of at least 8 for sine-cosine embeddings", dim=dim)
    quarter = dim // 4
    omega = 1.0 / 10000 ** (np.arange(quarter) / (quarter - 1))
    y, x = np.mgrid[: grid[0], : grid[1]]
    x, y = np.outer(x.ravel(), omega), np.outer(y.ravel(), omega)
    table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    return table.astype("float32")


def resize_positions(
    table: np.ndarray,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    interpolation: str = "bilinear",
) -> np.ndarray:
    """Resizes learned position embeddings to another grid of patches.

    Rows before the patches, such as the class token's, are copied.

    Args:
        table: array (1, N, D), with N at least rows x columns of `old_grid`.
        old_grid: patches down and across in `table`.
        new_grid: patches down and across in the result.
        interpolation: `"bilinear"` with aligned corners, as in the ViT and V-MoE
            releases; `"bicubic"` with antialiasing, as in timm; or `"torch_bicubic"`
            without, and with PyTorch's steeper kernel, as in DINOv2.

    Returns: Array (1, N', D) of the dtype of `table`.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import resize_positions
    >>> table = np.array([[[0.0], [2.0], [4.0], [6.0]]])
    >>> resize_positions(table, (2, 2), (2, 3))[0, :, 0].tolist()
    [0.0, 1.0, 2.0, 4.0, 5.0, 6.0]
    """
    num_extra = table.shape[1] - old_grid[0] * old_grid[1]
    check_one_of("interpolation", interpolation, INTERPOLATIONS)
    weights = {
        "bilinear": aligned_linear_weights,
        "bicubic": cubic_weights,
        "torch_bicubic": torch_cubic_weights,
    }[interpolation]
    values = table[0, num_extra:].astype("float64").reshape(*old_grid, -1)
    values = np.einsum(
        "yr,xc,rcd->yxd",
        weights(old_grid[0], new_grid[0]),
        weights(old_grid[1], new_grid[1]),
        values,
        optimize=True,
    )
    values = values.reshape(1, new_grid[0] * new_grid[1], -1).astype(table.dtype)
    return np.concatenate([table[:, :num_extra], values], axis=1)


@keras.saving.register_keras_serializable("keras_moe")
class PositionEmbedding(Layer):
    """Adds a learned or sine-cosine position embedding to each token.

    Learned embeddings of another resolution are resized on loading.

    Args:
        grid: number of patches down and across.
        kind: `"learned"` or `"sincos"`.
        interpolation: interpolation of loaded embeddings, see `resize_positions`.
        **kwargs: arguments of `keras.layers.Layer`.

    Output shape:
        (B, N, D). N may include a class token, which sine-cosine embeddings skip.

    Reference: *An Image is Worth 16x16 Words*, equation 1 and appendix D.4.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import PositionEmbedding
    >>> layer = PositionEmbedding((2, 2), kind="sincos")
    >>> tuple(layer(np.zeros((1, 5, 8), "float32")).shape)
    (1, 5, 8)
    """

    def __init__(
        self,
        grid: int | Sequence[int],
        kind: str = "learned",
        interpolation: str = "bilinear",
        **kwargs,
    ):
        check_one_of("kind", kind, KINDS)
        check_one_of("interpolation", interpolation, INTERPOLATIONS)
        super().__init__(**kwargs)
        self.grid = check_pair("grid", grid)
        self.kind = kind
        self.interpolation = interpolation

    def build(self, input_shape):
        num_patches = self.grid[0] * self.grid[1]
        if input_shape[1] not in (num_patches, num_patches + 1):
            raise ValueError(
                f"Expected {num_patches} tokens for grid={self.grid}, or one more for "
                f"a class token; received: shape={tuple(input_shape)}"
            )
        if self.kind == "learned":
            self.embedding = self.add_weight(
                name="embedding",
                shape=(1, *input_shape[1:]),
                initializer=keras.initializers.RandomNormal(stddev=0.02),
            )
        else:
            table = sincos_table(self.grid, input_shape[-1])
            table = np.pad(table, ((input_shape[1] - num_patches, 0), (0, 0)))
            self.embedding = table[None]

    def call(self, tokens: Tensor) -> Tensor:
        return tokens + keras.ops.cast(self.embedding, tokens.dtype)

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if self.kind == "learned":
            # The number of tokens alone does not determine the grid.
            store["grid"] = np.array(self.grid)

    def load_own_variables(self, store):
        if self.kind != "learned":
            return super().load_own_variables(store)
        old_grid = check_pair("grid", np.array(store["grid"]).tolist())
        extra = self.embedding.shape[1] - self.grid[0] * self.grid[1]
        expected = (1, old_grid[0] * old_grid[1] + extra, self.embedding.shape[2])
        # Checked before reading: a file may declare a table of any size.
        if tuple(store["0"].shape) != expected:
            raise ValueError(
                f"Expected position embeddings of shape {expected} for '{self.path}' "
                f"with grid={old_grid}; received: {tuple(store['0'].shape)}"
            )
        value = np.array(store["0"])
        if old_grid != self.grid:
            value = resize_positions(value, old_grid, self.grid, self.interpolation)
        self.embedding.assign(value)  # pyright: ignore[reportAttributeAccessIssue]

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        return {"embedding": (1, *shape)} if self.kind == "learned" else {}


@keras.saving.register_keras_serializable("keras_moe")
class RotaryEmbedding2D(Layer):
    """Rotates queries or keys of patches by their place in the image.

    Tokens before the patches, such as the class token and registers, stay as they are.
    Nothing depends on the number of patches, so that images may have any size.

    With `kind="axial"`, as in DINOv3, a patch with centre (y, x) in [-1, 1] has angles
    `2 pi y w` and `2 pi x w` for the frequencies `w = base^(-4 i / key_dim)`, each of
    which rotates two numbers half a head apart. With `kind="golden"`, as in SigLino,
    the second half of a head rotates in pairs of neighbours by angles `f . (y, x)`, for
    a vector f of each head and pair, in the ratio of the image's sides: y is within
    sqrt(rows / columns), x within sqrt(columns / rows). These vectors are a weight that
    is not trained, since published models store it.

    Args:
        grid: number of patches down and across.
        kind: `"axial"` or `"golden"`.
        base: base of the axial frequencies.
        max_frequency: largest length of a golden vector; the smallest is 1.
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape: (B, N, heads, key_dim), with the patches last, and key_dim a multiple
    of 4. Output shape: the same.

    Reference: *DINOv3*, section 3.2; *RoFormer*; Jerry Xiong, *On n-dimensional rotary
    positional embeddings*, for golden directions.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import RotaryEmbedding2D
    >>> x = np.ones((1, 5, 2, 4), "float32")
    >>> rotated = np.array(RotaryEmbedding2D((2, 2))(x))
    >>> bool((rotated[:, 0] == 1).all()), rotated.shape
    (True, (1, 5, 2, 4))
    """

    def __init__(
        self,
        grid: int | Sequence[int],
        kind: str = "axial",
        base: float = 100.0,
        max_frequency: float = 20.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.grid = check_pair("grid", grid)
        self.kind = check_one_of("kind", kind, ROTARY_KINDS)
        self.base = check_positive("base", base)
        self.max_frequency = check_positive("max_frequency", max_frequency)
        self.supports_masking = True

    def build(self, input_shape):
        heads, key_dim = input_shape[-2:]
        if key_dim % 4:
            raise unfit("heads whose size 4 divides", key_dim=key_dim)
        if self.kind == "golden":
            self.frequencies = self.add_weight(
                name="frequencies",
                shape=(heads, key_dim // 4, 2),
                initializer=self._golden,
                trainable=False,
                autocast=False,
                dtype="float32",
            )

    def _golden(self, shape, dtype=None):
        heads, count, _ = shape
        lengths = self.max_frequency ** np.linspace(0.0, 1.0, count)
        # Directions over the half circle that no two share, whatever their number.
        turns = np.arange(heads * count).reshape(heads, count) * (5**0.5 - 1) / 2
        angles = np.pi * (turns % 1.0)
        vectors = np.stack([np.cos(angles), np.sin(angles)], -1) * lengths[:, None]
        return ops.convert_to_tensor(vectors.astype("float32"))

    def _angles(self, key_dim):
        """Angles (N, heads or 1, pairs) of the grid's patches, row by row."""
        rows, columns = self.grid
        if self.kind == "axial":
            y, x = ((np.arange(n) + 0.5) / n * 2 - 1 for n in self.grid)
        else:
            ratio = (rows / columns) ** 0.5
            y, x = (
                limit * (2 * np.arange(n) / max(n - 1, 1) - 1)
                for n, limit in ((rows, ratio), (columns, 1 / ratio))
            )
        places = np.stack(np.meshgrid(y, x, indexing="ij"), -1).reshape(-1, 2)
        if self.kind == "golden":
            places = ops.convert_to_tensor(places.astype("float32"))
            return ops.einsum("np,hfp->nhf", places, self.frequencies)
        frequencies = self.base ** -(np.arange(0, key_dim, 4) / key_dim)
        angles = 2 * np.pi * places[:, :, None] * frequencies
        angles = angles.reshape(len(places), 1, key_dim // 2)
        return ops.convert_to_tensor(angles.astype("float32"))

    def call(self, x: Tensor, positions: None = None) -> Tensor:
        key_dim, first = x.shape[-1], x.shape[1] - self.grid[0] * self.grid[1]
        if first < 0:
            expected = f"tokens with the patches of grid={self.grid}"
            raise unfit(expected, tokens=x.shape[1])
        patches = ops.cast(x[:, first:], "float32")
        angles = self._angles(key_dim)
        cos, sin = ops.cos(angles), ops.sin(angles)
        if self.kind == "axial":
            # (a, b) -> (a cos - b sin, b cos + a sin), a and b half a head apart.
            a, b = patches[..., : key_dim // 2], patches[..., key_dim // 2 :]
            rotated = ops.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        else:
            kept, turned = patches[..., : key_dim // 2], patches[..., key_dim // 2 :]
            a, b = turned[..., 0::2], turned[..., 1::2]
            pairs = ops.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
            shape = ops.shape(turned)
            rotated = ops.concatenate([kept, ops.reshape(pairs, shape)], axis=-1)
        return ops.concatenate([x[:, :first], ops.cast(rotated, x.dtype)], axis=1)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        return {}


# Interpolation along one axis as matrices: new = weights (new, old) @ old. `start` and
# `count` select rows of the matrix, for crops.


def aligned_linear_weights(old: int, new: int) -> np.ndarray:
    """Linear interpolation with aligned corners."""
    return _hat(np.linspace(0.0, old - 1, new), old)


def linear_weights(
    old: int, new: int, start: int = 0, count: int | None = None
) -> np.ndarray:
    """Linear interpolation between pixel centres, without antialiasing."""
    return _hat(np.clip(_centres(old, new, start, count), 0, old - 1), old)


def widened_linear_weights(
    old: int, new: int, start: int = 0, count: int | None = None
) -> np.ndarray:
    """Linear interpolation with Pillow's antialiasing when shrinking."""
    x = _distances(old, new, start, count)
    weights = np.maximum(1.0 - x, 0.0)
    return weights / np.sum(weights, axis=1, keepdims=True)


def cubic_weights(
    old: int, new: int, start: int = 0, count: int | None = None
) -> np.ndarray:
    """Keys's cubic interpolation (a = -1/2), antialiased when shrinking."""
    x = _distances(old, new, start, count)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    weights = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
    # At the border part of the kernel lies outside.
    return weights / np.sum(weights, axis=1, keepdims=True)


def torch_cubic_weights(old: int, new: int) -> np.ndarray:
    """PyTorch's cubic interpolation (a = -3/4), which repeats the border's values."""
    centres, weights = _centres(old, new, 0, None), np.zeros((new, old))
    for place in np.floor(centres).astype(int) + np.arange(-1, 3)[:, None]:
        x = np.abs(centres - place)
        near = (1.25 * x - 2.25) * x * x + 1.0
        far = ((-0.75 * x + 3.75) * x - 6.0) * x + 3.0
        column = np.clip(place, 0, old - 1)
        weights[np.arange(new), column] += np.where(x <= 1, near, far)
    return weights


def _distances(old, new, start, count):
    """Distances from new to old pixel centres, in kernel units."""
    centres = _centres(old, new, start, count)
    return np.abs(centres[:, None] - np.arange(old)) / max(old / new, 1.0)


def _centres(old, new, start, count):
    """Centres of the new pixels, in old pixel coordinates."""
    stop = new if count is None else start + count
    return (np.arange(start, stop) + 0.5) * old / new - 0.5


def _hat(place, old):
    return np.maximum(1.0 - np.abs(place[:, None] - np.arange(old)), 0.0)
