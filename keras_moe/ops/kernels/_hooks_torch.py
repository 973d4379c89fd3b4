"""Hooks of PyTorch modules."""

from torch.nn.modules import module as modules

from keras_moe import _compat


def has_hooks(layer):
    """Whether a call of the layer runs something beside its own."""
    return _compat.has_hooks(layer, modules)
