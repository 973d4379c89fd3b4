"""Position embeddings of image patches. Axes: B batch, N tokens, D hidden."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe._checks import (
    check_integer,
    check_one_of,
    check_pair,
    check_positive,
    unfit,
)
from keras_moe._types import Tensor
from keras_moe.layers._layer import Layer

KINDS = ("learned", "sincos")
ROTARY_KINDS = ("axial", "golden")
# The first two also for images.
INTERPOLATIONS = ("bilinear", "bicubic", "antialiased", "torch_bicubic")
_ALONG_AXIS: dict[str, str] = dict(
    zip(INTERPOLATIONS, ("aligned", *INTERPOLATIONS[1:]))
)


def sincos_table(grid: tuple[int, int], dim: int) -> np.ndarray:
    """Fixed embeddings (rows x columns, D) of a grid of patches, row by row."""
    if dim % 4 or dim < 8:
        raise unfit("a multiple of 4 of at least 8 for sine-cosine embeddings", dim=dim)
    omega = _sincos_frequencies(dim)
    y, x = np.mgrid[: grid[0], : grid[1]]
    x, y = np.outer(x.ravel(), omega), np.outer(y.ravel(), omega)
    table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    return table.astype("float32")


def _sincos_frequencies(dim):
    quarter = dim // 4
    return 1.0 / 10000 ** (np.arange(quarter) / (quarter - 1))


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
            releases; `"bicubic"` with antialiasing, as in timm; `"antialiased"`,
            bilinear with antialiasing, as in SigLIP 2; or `"torch_bicubic"` without,
            and with PyTorch's steeper kernel, as in DINOv2.

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
    values = table[0, num_extra:].astype("float64").reshape(*old_grid, -1)
    kind = _ALONG_AXIS[interpolation]
    down, across = (axis_weights(*sizes, kind) for sizes in zip(old_grid, new_grid))
    values = np.einsum("yr,xc,rcd->yxd", down, across, values, optimize=True)
    values = values.reshape(1, new_grid[0] * new_grid[1], -1).astype(table.dtype)
    return np.concatenate([table[:, :num_extra], values], axis=1)


@keras.saving.register_keras_serializable("keras_moe")
class PositionEmbedding(Layer):
    """Adds a learned or sine-cosine position embedding to each token.

    Learned embeddings of another resolution are resized on loading.

    Args:
        grid: number of patches down and across.
        kind: `"learned"` or `"sincos"`.
        interpolation: interpolation of loaded embeddings, and of those of images of
            other shapes; see `resize_positions`.
        max_patches: most patches of an image where calls have `grids`; None for `grid`.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        grids: integers (B, 2), patches down and across in each image, whose tokens are
            padded; None for images of `grid`.

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
        max_patches: int | None = None,
        **kwargs,
    ):
        check_one_of("kind", kind, KINDS)
        check_one_of("interpolation", interpolation, INTERPOLATIONS)
        super().__init__(**kwargs)
        self.max_patches = check_integer("max_patches", max_patches, optional=True)
        self.grid = check_pair("grid", grid)
        self.kind = kind
        self.interpolation = interpolation

    def build(self, input_shape):
        num_patches = self.max_patches or self.grid[0] * self.grid[1]
        if input_shape[1] not in (num_patches, num_patches + 1):
            raise ValueError(
                f"Expected {num_patches} tokens for grid={self.grid}, or one more for "
                f"a class token; received: shape={tuple(input_shape)}"
            )
        if self.kind == "learned":
            self.embedding = self.add_weight(
                name="embedding",
                shape=self.weight_shapes(input_shape[1:])["embedding"],
                initializer=keras.initializers.RandomNormal(stddev=0.02),
            )
        else:
            table = sincos_table(self.grid, input_shape[-1])
            table = np.pad(table, ((input_shape[1] - num_patches, 0), (0, 0)))
            self.embedding = table[None]

    def call(self, tokens: Tensor, grids: Tensor | None = None) -> Tensor:
        embedding: Any = self.embedding
        if grids is not None:
            embedding = self._of_grids(embedding, grids, ops.shape(tokens)[1])
        return tokens + ops.cast(embedding, tokens.dtype)

    def _of_grids(self, embedding, grids, num_tokens):
        """Embeddings (B, N, D) of images of the given grids."""
        rows, columns = self.grid
        first = embedding.shape[1] - rows * columns
        place, size = patch_places(grids, num_tokens - first)
        if self.kind == "sincos":
            omega = _sincos_frequencies(embedding.shape[2])
            omega = ops.convert_to_tensor(omega.astype("float32"))
            angles = ops.expand_dims(place, -1) * omega
            y, x = ops.unstack(angles, axis=2)
            parts = [ops.sin(x), ops.cos(x), ops.sin(y), ops.cos(y)]
            patches = ops.concatenate(parts, axis=-1)
        else:
            kind = _ALONG_AXIS[self.interpolation]
            # Resizing is linear: the product of a row's weights and a column's.
            down, across = (
                _weights_at(place[..., i], size[..., i], old, kind)
                for i, old in enumerate(self.grid)
            )
            weights = ops.expand_dims(down, -1) * ops.expand_dims(across, -2)
            weights = ops.reshape(weights, (*ops.shape(place)[:2], rows * columns))
            patches = ops.matmul(weights, ops.cast(embedding[0, first:], "float32"))
        if not first:
            return patches
        shape = (ops.shape(patches)[0], first, embedding.shape[2])
        before = ops.broadcast_to(ops.cast(embedding[:, :first], "float32"), shape)
        return ops.concatenate([before, patches], axis=1)

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
        rows = self.grid[0] * self.grid[1]
        rows += shape[0] - (self.max_patches or rows)
        return {"embedding": (1, rows, shape[1])} if self.kind == "learned" else {}


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
        grid: number of patches down and across; None where calls have `positions`.
        first: number of tokens before the patches, where there is no `grid`.
        kind: `"axial"` or `"golden"`.
        base: base of the axial frequencies.
        max_frequency: largest length of a golden vector; the smallest is 1.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        x: (B, N, heads, key_dim), with the patches last, and key_dim a multiple of 4.
        positions: integers (B, 2), patches down and across in each image, for images
            of any shape in one batch; None for images of `grid`.

    Output shape: that of `x`.

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
        grid: int | Sequence[int] | None = None,
        kind: str = "axial",
        base: float = 100.0,
        max_frequency: float = 20.0,
        first: int = 0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.grid = None if grid is None else check_pair("grid", grid)
        self.first = check_integer("first", first, minimum=0)
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

    def _angles(self, grid, key_dim):
        """Angles (N, heads or 1, pairs) of the grid's patches, row by row."""
        rows, columns = grid
        if self.kind == "axial":
            y, x = ((np.arange(n) + 0.5) / n * 2 - 1 for n in grid)
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

    def _angles_at(self, grids, count, key_dim):
        """Angles (B, N, heads or 1, pairs) of patches of images of several grids."""
        place, size = patch_places(grids, count)
        if self.kind == "golden":
            limits = ops.sqrt(size / ops.flip(size, axis=-1))
            places = limits * (2 * place / ops.maximum(size - 1, 1) - 1)
            return ops.einsum("bnp,hfp->bnhf", places, self.frequencies)
        frequencies = 2 * np.pi * self.base ** -(np.arange(0, key_dim, 4) / key_dim)
        frequencies = ops.convert_to_tensor(frequencies.astype("float32"))
        places = (place + 0.5) / size * 2 - 1
        angles = ops.expand_dims(places, -1) * frequencies
        return ops.reshape(angles, (*ops.shape(place)[:2], 1, key_dim // 2))

    def call(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        key_dim, first = x.shape[-1], self.first
        if positions is not None:
            count = ops.shape(x)[1] - first
            angles = self._angles_at(positions, count, key_dim)
        elif self.grid is None:
            raise unfit("positions of the tokens, or a grid", positions=None, grid=None)
        else:
            first = x.shape[1] - self.grid[0] * self.grid[1]
            if first < 0:
                expected = f"tokens with the patches of grid={self.grid}"
                raise unfit(expected, tokens=x.shape[1])
            angles = self._angles(self.grid, key_dim)
        patches = ops.cast(x[:, first:], "float32")
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


def patch_places(grids: Tensor, count: int | Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns (B, N, 2) of patches in grids (B, 2), and these (B, 1, 2)."""
    # Padding, behind an image's last patch, lies at its first.
    grids = ops.cast(grids, "int32")
    columns = grids[:, 1:]
    index = ops.expand_dims(ops.arange(count, dtype="int32"), 0)
    index = index * ops.cast(index < grids[:, :1] * columns, "int32")
    place = ops.stack([index // columns, index % columns], axis=-1)
    return ops.cast(place, "float32"), ops.cast(ops.expand_dims(grids, 1), "float32")


@keras.saving.register_keras_serializable("keras_moe")
class PatchMask(Layer):
    """Which tokens (B, first + N) of images of any shape are no padding."""

    def __init__(self, first: int = 0, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.first = check_integer("first", first, minimum=0)

    def call(self, patches: Tensor, grids: Tensor) -> Tensor:
        num_patches = ops.prod(ops.cast(grids, "int32"), axis=1, keepdims=True)
        length = self.first + ops.shape(patches)[1]
        index = ops.arange(length, dtype="int32") - self.first
        return ops.expand_dims(index, 0) < num_patches

    def compute_output_spec(self, patches, grids):
        batch, count = patches.shape[:2]
        length = None if count is None else self.first + count
        return keras.KerasTensor((batch, length), "bool")


def axis_weights(
    old: int, new: int, interpolation: str, start: int = 0, count: int | None = None
) -> np.ndarray:
    """Interpolation along one axis as a matrix: new = weights (new, old) @ old.

    `start` and `count` select rows of the matrix, for crops. "aligned" is linear with
    aligned corners, "linear" between pixel centres; "antialiased" is Pillow's when
    shrinking, and so is "bicubic", Keys's with a = -1/2; "torch_bicubic" is PyTorch's,
    a = -3/4, which repeats the border's values.
    """
    stop = new if count is None else start + count
    return np.asarray(_weights_at(np.arange(start, stop), new, old, interpolation, np))


def _weights_at(place, size, old, interpolation, library=ops):
    """Weights (..., old) of a table's rows for the row `place` (...) of `size`."""
    # With the functions of NumPy or `keras.ops`.
    rows = np.arange(old, dtype="float32")
    rows = rows if library is np else ops.convert_to_tensor(rows)
    centre = (place + 0.5) * old / size - 0.5
    if interpolation == "aligned":
        centre = place * (old - 1) / library.maximum(size - 1, 1)
    elif interpolation == "linear":
        centre = library.clip(centre, 0, old - 1)
    centre = library.expand_dims(centre, -1)
    if interpolation == "torch_bicubic":
        total = 0.0
        for offset in range(-1, 3):
            near = library.floor(centre) + offset
            column = library.clip(near, 0, old - 1)
            weight = _cubic(library.abs(centre - near), library, -0.75)
            total = total + library.where(library.equal(column, rows), weight, 0.0)
        return total
    x = library.abs(centre - rows)
    if interpolation in ("aligned", "linear"):
        return library.maximum(1.0 - x, 0.0)
    x = x / library.expand_dims(library.maximum(old / size, 1.0), -1)
    cubic = interpolation == "bicubic"
    weights = _cubic(x, library) if cubic else library.maximum(1.0 - x, 0.0)
    # At the border part of the kernel lies outside.
    return weights / library.sum(weights, axis=-1, keepdims=True)


def _cubic(x, library, a=-0.5):
    """Keys's kernel of distances."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1.0
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return library.where(x <= 1, near, library.where(x < 2, far, 0.0))
