"""Where image models attend. Axes: B batch, N tokens."""

from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_moe._checks import check_integer, fits_shape
from keras_moe._compat import flatten_layers
from keras_moe._processes import predict_batch
from keras_moe._types import KerasModel
from keras_moe.analysis._hooks import recording, with_layers


def attention_rollout(
    model: KerasModel, images: ArrayLike, batch_size: int = 32
) -> np.ndarray:
    """Each patch's share in the embedding of an image, by attention rollout.

    With A the mean of a block's attention over heads, the rollout is the product of
    (A + I) / 2 over all blocks. The map is the row of the class token or first patch,
    the mean row of an average, or MAP pooling's attention times the rollout, over the
    patches alone. It follows attention through residuals only: neither values nor
    experts weigh a patch, so it shows where a model looks and not what causes its
    output.

    Args:
        model: backbone, classifier or image-text model whose image blocks have
            attention: any of ours but Mixers.
        images: (B, height, width, channels), prepared for the model.
        batch_size: images per batch.

    Returns:
        float32 (B, rows, columns) over the grid of patches; each map sums to 1.

    Raises:
        ValueError: if the model has no attention over patches, or for other images.

    Reference: *Quantifying Attention Flow in Transformers*, section 3.

    Example:

    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("vmoe_digits")
    >>> maps = analysis.attention_rollout(model, np.zeros((2, 16, 16, 1), "float32"))
    >>> maps.shape, round(float(maps[0].sum()), 3)
    ((2, 4, 4), 1.0)
    """
    check_integer("batch_size", batch_size)
    if not has_attention(model):
        raise ValueError(
            "Expected an image model with attention over patches, such as a ViT; a "
            f"Mixer has none; received: {type(model).__name__}"
        )
    rollout, images = _Rollout(model), np.asarray(images)
    expected = (None, *keras.tree.flatten(rollout.encoder.input)[0].shape[1:])
    if not fits_shape(images.shape, expected) or not len(images):
        raise ValueError(
            f"Expected images of shape (batch, {', '.join(map(str, expected[1:]))}), "
            f"at least one; received: shape={images.shape}"
        )
    starts = range(0, len(images), batch_size)
    batches = (images[start : start + batch_size] for start in starts)
    return np.concatenate([predict_batch(rollout, batch) for batch in batches])


def has_attention(model: KerasModel) -> bool:
    """Whether `attention_rollout` is defined for a model."""
    backbone = getattr(model, "backbone", model)
    if not hasattr(type(backbone), "grid"):
        return False
    mixers = [getattr(x, "token_mixer", None) for x in flatten_layers(_encoder(model))]
    mixers = [mixer for mixer in mixers if mixer is not None]
    return bool(mixers) and all(hasattr(mixer, "query_dense") for mixer in mixers)


def _encoder(model) -> Any:
    """The model from images alone."""
    backbone = getattr(model, "backbone", model)
    return backbone.encoder("image") if hasattr(backbone, "encoder") else model


class _Rollout(keras.Model):
    """Computes the maps of images, (B, rows, columns)."""

    def __init__(self, model):
        # The global dtype policy may differ from the model's.
        super().__init__(name="attention_rollout", dtype="float32")
        self.encoder, self.built = _encoder(model), True
        backbone: Any = getattr(model, "backbone", model)
        self.grid = tuple(backbone.grid)
        self.ensemble_size = getattr(backbone, "ensemble_size", 1)
        self.pooling, self.registers = "average", 0
        if getattr(backbone, "class_token", False):
            self.pooling = "class_token"
        for layer in flatten_layers(self.encoder):
            if layer.name in ("pooler", "image_pooler"):
                self.pooling = getattr(layer, "pooling", "map")
                self.registers = getattr(layer, "register_tokens", 0)

    def call(self, images):
        attention = []
        layers = flatten_layers(self.encoder)
        layers = [layer for layer in layers if hasattr(layer, "query_dense")]
        hooks = {id(layer): recording(layer, attention) for layer in layers}
        with_layers(self.encoder, hooks)(images, training=False)
        if self.pooling == "map":
            *attention, pooled = attention
            share = pooled[:, 0]
        else:
            row = np.ones(attention[-1].shape[-1], "float32")
            if self.pooling == "class_token":
                row[1:] = 0.0
            else:
                first = self.registers + (self.pooling == "patch_average")
                row[:first] = 0.0
                row[first + 1 :] *= self.pooling != "first"
            row = ops.convert_to_tensor(row / row.sum())
            share = ops.zeros_like(attention[-1][:, 0]) + row
        # One row of the product of (A + I) / 2, from the last block to the first.
        for weights in reversed(attention):
            share = self._members_mean(share, weights)
            share = 0.5 * (share + ops.einsum("bn,bnm->bm", share, weights))
        share = self._members_mean(share, images)
        # A class token comes first.
        share = share[:, -self.grid[0] * self.grid[1] :]
        share = share / ops.sum(share, axis=1, keepdims=True)
        return ops.reshape(share, (-1, *self.grid))

    def _members_mean(self, share, fewer):
        """The mean of rows (B M, N) over an ensemble's members, if `fewer` has B."""
        if self.ensemble_size == 1:
            return share
        rows, length = ops.shape(fewer)[0], share.shape[-1]
        return ops.mean(ops.reshape(share, (rows, -1, length)), axis=1)
