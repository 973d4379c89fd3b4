"""Losses by short names, their values as arrays, and what they read."""

from types import SimpleNamespace

import keras
import numpy as np

from keras_moe import losses
from keras_moe.ops import Routing
from tests.gradients import gradient_and_outputs, one_program

# Every loss as a function of (logits, modality_ids, mask), with K = 2 and M = 2.
LOSSES = {
    "local": lambda x, ids, mask=None: losses.local_entropy_loss(x, mask=mask),
    "global": lambda x, ids, mask=None: losses.global_entropy_loss(x, mask=mask),
    "threshold": lambda x, ids, mask=None: losses.global_entropy_loss(
        x, threshold=3.0, mask=mask
    ),
    "mutual": lambda x, ids, mask=None: losses.mutual_information_loss(
        x, ids, 2, mask=mask
    ),
    "target": lambda x, ids, mask=None: losses.target_entropy_loss(x, 2, mask=mask),
    "merged": lambda x, ids, mask=None: losses.merged_entropy_loss(x, 2, mask=mask),
}

# The losses without modalities, likewise.
LOSSES_OF_TOKENS = {
    "importance": lambda x, ids, mask=None: losses.importance_loss(x, mask),
    "load": lambda x, ids, mask=None: losses.load_loss(x, x, 0.5, 1, mask),
    "balance": lambda x, ids, mask=None: losses.load_balance_loss(
        keras.ops.softmax(x, axis=-1), mask
    ),
    "z": lambda x, ids, mask=None: losses.router_z_loss(x, mask),
}
# Pairs that share an image or a caption.
IMAGE_IDS = np.array([7, 3, 7, 5, 3, 1], "int32")
TEXT_IDS = np.array([0, 1, 2, 0, 4, 5], "int32")
CONTRASTIVE = ("softmax", "sigmoid")


def contrastive_loss(name, images, texts, log_scale, bias, **options):
    """Either contrastive loss, of the logarithm that a model learns."""
    scale = keras.ops.exp(log_scale)
    if name == "softmax":
        return losses.softmax_contrastive_loss(images, texts, scale, **options)
    return losses.sigmoid_contrastive_loss(images, texts, scale, bias, **options)


def with_gradient(loss_of, logits):
    """A loss (G,), and the gradient of its sum."""

    def program(logits):
        loss = loss_of(logits)
        return keras.ops.sum(loss), (loss,)

    (gradient,), (loss,) = gradient_and_outputs(program, logits)
    return loss, gradient


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def tensor(array):
    return None if array is None else keras.ops.convert_to_tensor(array)


def numbers(fn, *arrays):
    """The result of a function of arrays, as the backend computes it."""
    return keras.ops.convert_to_numpy(one_program(fn)(*map(tensor, arrays)))


def routing_of(logits):
    """A record of which only the clean logits may be read."""
    return Routing(**{**dict.fromkeys(Routing._fields), "logits": logits})


ROUTER = SimpleNamespace(num_selected_experts=2, num_experts=4, noise_deviation=0.25)
