"""Configs that say which layers of a model are quantised.

KerasHub's own map has no default policy, so that a model is loaded in the global one,
and making the map removes the names of the layers' own policies.
"""

from typing import Any

import keras
from keras.dtype_policies import DTypePolicyMap

from keras_moe.compat import flatten_layers, set_dtype_policy


def quantized_policies(layers: list, policy: Any) -> Any:
    """The policy of some layers, with a map of those that are quantised."""
    policy = keras.dtype_policies.get(policy)
    if isinstance(policy, DTypePolicyMap):
        return policy
    modes = {layer.path: layer.quantization_mode for layer in layers}
    policies = {
        path: keras.dtype_policies.get(f"{mode}_from_{policy.name}")
        for path, mode in modes.items()
        if mode is not None
    }
    return DTypePolicyMap(policy.name, policies) if policies else policy


def saved_policy(model: keras.Model) -> dict[str, Any]:
    """The config of a model's policy, with the layers that are quantised."""
    layers = flatten_layers(model, include_self=False)
    policy = quantized_policies(layers, model.dtype_policy)
    return keras.dtype_policies.serialize(policy)


def settle_policies(model: Any) -> None:
    """Gives each layer its own policy in the place of a map for all.

    Keras's quantised layers could not be saved again with a map (3.15): they ask it for
    its default, which is not quantised.
    """
    for layer in flatten_layers(model):
        policy = layer.dtype_policy
        if isinstance(policy, DTypePolicyMap):
            # A model's own path may be none, or none of the map's.
            set_dtype_policy(layer, policy[layer.path or ""])


def new_head_dtype(saved: Any) -> Any:
    """A saved `head_dtype` for a new head, which is not quantised."""
    if saved is None:
        return None
    policy = keras.dtype_policies.get(saved)
    return policy.default_policy if isinstance(policy, DTypePolicyMap) else policy


def quantized_head(task: Any, head_dtype: Any) -> Any:
    """The config of a task's `head_dtype`, with the layers that are quantised."""
    of_backbone = {id(layer) for layer in flatten_layers(task.backbone)}
    layers = [
        layer
        for layer in flatten_layers(task, include_self=False)
        if id(layer) not in of_backbone
    ]
    if head_dtype is None:
        policy = task.backbone.dtype_policy
        if isinstance(policy, DTypePolicyMap):
            policy = policy.default_policy
        head = quantized_policies(layers, policy)
        if not isinstance(head, DTypePolicyMap):
            return None
    else:
        head = quantized_policies(layers, head_dtype)
        if isinstance(head_dtype, str) and not isinstance(head, DTypePolicyMap):
            return head_dtype
    return keras.dtype_policies.serialize(head)
