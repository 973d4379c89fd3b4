"""The entropy losses by short names, their values as arrays, and what they read."""

from types import SimpleNamespace

import keras
import numpy as np

from keras_moe import losses
from keras_moe.ops import Routing
from tests.gradients import one_program

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


ROUTER = SimpleNamespace(num_selected_experts=2, num_experts=4, noise_std=1.0)
