"""Small models of images and texts, and pairs for them."""

import numpy as np

from keras_moe.models import CLIPBackbone, LIMoEBackbone, TextBackbone
from tests.small_models import images

SIZES = {"hidden_dim": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 16}
IMAGE = {"image_shape": (8, 8, 3), "patch_size": 4, **SIZES}
TEXT = {"vocabulary_size": 20, "max_length": 6, **SIZES}
MOE = {"moe_layers": [1], "num_experts": 4}
# Towers of one block, for what takes a compiled step of training.
ONE = {"moe_layers": [0], "num_layers": 1}
IDS = np.array([[1, 7, 19, 0, 0], [1, 5, 6, 8, 19], [1, 3, 19, 0, 0]], "int32")
TEXTS = {"token_ids": IDS, "padding_mask": IDS != 0}
IMAGES = images(3, 8, 8, 3)
PAIRS = {"images": IMAGES, **TEXTS}
# The first pair stands in for padding at the end of a batch.
FOUR = {name: np.concatenate([x, x[:1]]) for name, x in PAIRS.items()}


def clip(moe=MOE, **kwargs):
    """CLIP-UP's separated backbone, small; dense with `moe={}`."""
    towers = {"image": {**IMAGE, **moe}, "text": {**TEXT, **moe}}
    return CLIPBackbone(**{**towers, "projection_dim": 4, "seed": 3, **kwargs})


def limoe(moe=(), **kwargs):
    """LIMoE with its losses, small; dense with `moe=None`."""
    sizes = {**IMAGE, **TEXT, "projection_dim": 4, "seed": 3}
    if moe is None:
        return LIMoEBackbone(**{**sizes, **kwargs})
    losses = {"limoe": {"thresholds": {"text": 0.7, "image": 1.1}}}
    fields = {**MOE, "num_selected_experts": 1, "auxiliary_losses": losses}
    return LIMoEBackbone.from_config({**sizes, **fields, **dict(moe), **kwargs})


def text_of_modalities():
    """A text tower whose router has a kernel for each of two modalities."""
    facts = {"num_selected_experts": 1, "num_modalities": 2, "pooling": "last"}
    return TextBackbone.from_config({**TEXT, **MOE, **facts})


def one_block(kind, moe=(), **kwargs):
    """The same, of one block with experts in each tower."""
    if kind == "limoe":
        moe = {"moe_layers": [0], **dict(moe)}
        return limoe(moe, num_layers=1, **kwargs)
    return clip({**MOE, **ONE}, **kwargs)
