"""LoRA adapters, what is frozen, and dtype policies of quantised layers."""

import functools
import os
from typing import Any

import h5py
import keras
import keras_hub
from keras.dtype_policies import DTypePolicyMap

from keras_moe._checks import check_bool, unfit
from keras_moe._compat import flatten_layers, set_dtype_policy
from keras_moe._freezing import FROZEN, freeze, frozen_paths, inner_layers
from keras_moe._types import KerasModel
from keras_moe.models.saving import _weights_file

# Parts of a model's config that are no arguments.
TRAINING = (TRAINABLE, FROZEN, LORA) = ("trainable", FROZEN, "lora")


def add_adapters(backbone: Any, rank: int, names: list[str]) -> None:
    """Freezes a backbone, biases included, and adds trainable low-rank adapters."""
    layers = flatten_layers(backbone, include_self=False)
    able = {
        layer.name
        for layer in layers
        if hasattr(layer, "enable_lora") and layer.weights
    }
    if unknown := sorted(set(names) - able):
        expected = f"target_layer_names among {sorted(able)}"
        raise unfit(expected, f"target_layer_names={names}, without {unknown}")
    keras_hub.models.Backbone.enable_lora(
        backbone, rank, target_layer_names=list(names)
    )
    for layer in layers:
        if not flatten_layers(layer, include_self=False):
            for weight in layer.weights:
                weight.trainable = "lora" in weight.name


def save_adapters(backbone: Any, filepath: str | os.PathLike) -> None:
    adapters = adapter_weights(backbone)
    if not adapters or not str(filepath).endswith(".lora.h5"):
        expected = "a backbone on which enable_lora was called, and a .lora.h5 file"
        raise unfit(expected, f"{len(adapters)} adapters, filepath={str(filepath)!r}")
    layers = list(_adapted_layers(backbone).values())
    with _weights_file.new_hdf5(filepath, adapters.values()) as file:
        file.attrs["rank"] = layers[0].lora_rank
        file.attrs["target_layer_names"] = sorted({layer.name for layer in layers})
        for path, weight in adapters.items():
            file[path] = keras.ops.convert_to_numpy(weight)


def load_adapters(backbone: Any, filepath: str | os.PathLike) -> None:
    """Loads adapters from a file of `save_adapters`, adding them if missing."""
    with _weights_file.checked_weights(filepath), h5py.File(filepath, "r") as file:
        if "rank" not in file.attrs:
            raise unfit("a file of save_lora_weights", filepath)
        attributes: Any = file.attrs
        names, rank = list(attributes["target_layer_names"]), attributes["rank"]
        stored = _weights_file.plain_values(file)
    if not adapter_weights(backbone):
        backbone.enable_lora(int(rank), names)
    adapters = adapter_weights(backbone)
    expected = {path: tuple(weight.shape) for path, weight in adapters.items()}
    received = {path: value.shape for path, value in stored.items()}
    if expected != received:
        path = min({*expected.items()} ^ {*received.items()})[0]
        raise ValueError(
            f"Expected adapters that fit the backbone, {path} of shape "
            f"{expected.get(path)}; received: shape={received.get(path)}"
        )
    for path, weight in adapters.items():
        weight.assign(stored[path])


def adapter_weights(backbone: keras.Model) -> dict[str, keras.Variable]:
    """Returns adapter weights by path, without the backbone's name."""
    return {
        weight.path.removeprefix(f"{backbone.name}/"): weight
        for weight in backbone.weights
        if "lora" in weight.name
    }


def _adapted_layers(model):
    """Returns layers with adapters by path, but not those of inner models."""
    layers = inner_layers(model)
    return {path: x for path, x in layers if getattr(x, "lora_enabled", False)}


def training_config(model: KerasModel) -> dict[str, Any]:
    """Returns the parts of a model's config that say what is trained."""
    config = {} if model.trainable else {TRAINABLE: False}
    adapted = _adapted_layers(model)
    if adapted and _weights_file.merges_adapters():
        # The adapters, and with them what they froze, are not in the file.
        return config
    adapters = {}
    for path, layer in adapted.items():
        adapters[path] = {"rank": layer.lora_rank, "lora_alpha": layer.lora_alpha}
        _keep_adapters(layer)
    parts = {FROZEN: frozen_paths(model), LORA: adapters}
    return {**config, **{name: part for name, part in parts.items() if part}}


def apply_training(model: KerasModel, config: dict[str, Any]) -> None:
    """Adds adapters and freezes layers, as `training_config` says."""
    layers = dict(inner_layers(model))
    for path, settings in (config.get(LORA) or {}).items():
        if not hasattr(layers.get(path), "enable_lora"):
            raise ValueError(
                f"Expected {LORA} paths of layers of {type(model).__name__} that take "
                f"adapters; received: {path!r}"
            )
        layers[path].enable_lora(**settings)
        _keep_adapters(layers[path])
    if not check_bool(TRAINABLE, config.get(TRAINABLE, True)):
        model.trainable = False
    freeze(model, config.get(FROZEN) or ())


def _keep_adapters(layer):
    """Lets a layer save its adapters, which Keras merges into the kernels."""
    layer.save_own_variables = functools.partial(_save_adapted, layer)
    layer.load_own_variables = functools.partial(_load_adapted, layer)


def _save_adapted(layer, store):
    if _weights_file.merges_adapters():
        type(layer).save_own_variables(layer, store)
        return
    for weight in layer.weights:
        store[weight.name] = weight


def _load_adapted(layer, store):
    if {*store.keys()} != {weight.name for weight in layer.weights}:
        # A file with merged weights.
        type(layer).load_own_variables(layer, store)
        return
    for weight in layer.weights:
        weight.assign(store[weight.name])


def quantized_policies(layers: list, policy: Any) -> Any:
    """Returns a policy for layers, with a map of the quantised ones."""
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


def saved_policy(model: KerasModel) -> Any:
    """Returns the config of a model's policy, including quantised layers."""
    layers = flatten_layers(model, include_self=False)
    policy = quantized_policies(layers, model.dtype_policy)
    return keras.dtype_policies.serialize(policy)


def settle_policies(model: KerasModel) -> None:
    """Gives each layer its own policy: Keras 3.15 cannot save quantised policy maps."""
    for layer in flatten_layers(model):
        policy = layer.dtype_policy
        if isinstance(policy, DTypePolicyMap):
            # The model's path may be missing from the map.
            set_dtype_policy(layer, policy[layer.path or ""])


def new_head_dtype(saved: Any) -> Any:
    """Returns a saved `head_dtype` for a new, unquantised head."""
    if saved is None:
        return None
    policy = keras.dtype_policies.get(saved)
    return policy.default_policy if isinstance(policy, DTypePolicyMap) else policy


def quantized_head(task: Any, head_dtype: Any) -> Any:
    """Returns the config of `head_dtype`, including quantised layers."""
    of_backbone = {id(layer) for layer in flatten_layers(task.backbone)}
    layers = [
        layer
        for layer in flatten_layers(task, include_self=False)
        if id(layer) not in of_backbone
    ]
    policy = task.backbone.dtype_policy if head_dtype is None else head_dtype
    if head_dtype is None and isinstance(policy, DTypePolicyMap):
        policy = policy.default_policy
    head = quantized_policies(layers, policy)
    if not isinstance(head, DTypePolicyMap) and isinstance(
        head_dtype, (str, type(None))
    ):
        return head_dtype
    return keras.dtype_policies.serialize(head)
