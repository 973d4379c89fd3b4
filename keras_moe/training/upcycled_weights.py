"""Weights and optimizer slots of a dense model in its mixture of experts.

Axes: E experts, D hidden, H mlp.
"""

from typing import Any

import keras
import numpy as np

from keras_moe.compat import own_variables
from keras_moe.layers import MuMoEBlock
from keras_moe.training.factors_of_dense import factors_of_dense

# The end of an expert weight's path, and of the dense one it is tiled from.
_TILED = {
    f"moe/experts/{layer}_{kind}": f"mlp/{layer}/{kind}"
    for layer in ("hidden", "output")
    for kind in ("kernel", "bias")
}
# Lists of an optimizer that are not one kind of slot.
_NOT_SLOTS = ("_variables", "_trainable_variables")


def copy_weights(
    dense_model: keras.Model, sparse_model: keras.Model, noise: float, seed: int
) -> None:
    """Gives a sparse model the weights of the dense one; MLPs become all experts."""
    dense = {weight.path: weight for weight in dense_model.weights}
    generator = np.random.default_rng(seed)
    _copy_to_mumoe(dense_model, sparse_model, noise, generator)
    for weight in sparse_model.weights:
        source = dense.get(weight.path)
        if source is not None:
            # A copy: on JAX two models would share, and donate, one buffer.
            weight.assign(keras.ops.convert_to_numpy(source))
            continue
        end = next((end for end in _TILED if weight.path.endswith(end)), None)
        if end is None:
            continue  # The routers' own.
        source = dense[weight.path.removesuffix(end) + _TILED[end]]
        value = keras.ops.convert_to_numpy(source).astype("float32")
        scale = noise * value.std()
        tiled = np.repeat(value[None], weight.shape[0], axis=0)
        if scale:
            tiled += generator.normal(scale=scale, size=tiled.shape).astype("float32")
        weight.assign(tiled)


def _copy_to_mumoe(dense_model, sparse_model, noise, generator):
    dense, sparse = (
        getattr(model, "backbone", model) for model in (dense_model, sparse_model)
    )
    # Modalities that share a block have two names for it.
    blocks = {id(sparse.get_layer(name)): name for name in sparse.routing}
    for name in blocks.values():
        block = sparse.get_layer(name).feed_forward
        mlp = dense.get_layer(name).feed_forward
        if not isinstance(block, MuMoEBlock) or isinstance(mlp, MuMoEBlock):
            continue
        for layer, experts in (
            (mlp.hidden, block.hidden),
            (mlp.output_dense, block.output_experts),
        ):
            kernel, bias = (
                keras.ops.convert_to_numpy(keras.ops.cast(weight, "float32"))
                for weight in (layer.kernel, layer.bias)
            )
            values = factors_of_dense(kernel, bias, experts, noise, generator)
            for factor, value in zip(experts.factors, values):
                factor.assign(value)


def carry_state(dense: Any, sparse: Any) -> int:
    """Copies one optimizer's state; the slots of MLPs become those of all experts."""
    carried = 0
    if hasattr(dense, "inner_optimizer"):
        carried += carry_state(dense.inner_optimizer, sparse.inner_optimizer)
    dense_paths = [weight.path for weight in own_variables(dense, trainable=True)]
    sparse_paths = [weight.path for weight in own_variables(sparse, trainable=True)]
    places = {path: place for place, path in enumerate(dense_paths)}
    for name, slots in vars(dense).items():
        # A kind of slot is a list with one for each trainable variable.
        if isinstance(slots, keras.Variable):
            # Such as the iterations and the scale of a loss.
            getattr(sparse, name).assign(keras.ops.convert_to_numpy(slots))
            carried += 1
            continue
        if name in _NOT_SLOTS or not _is_slots(slots, len(dense_paths)):
            continue
        for path, slot in zip(sparse_paths, getattr(sparse, name)):
            end = None
            if path not in places:
                end = next((end for end in _TILED if path.endswith(end)), None)
            if end is not None:
                path = path.removesuffix(end) + _TILED[end]
            if path not in places:
                continue  # A router's.
            value = keras.ops.convert_to_numpy(slots[places[path]])
            if end is not None:
                value = np.broadcast_to(value, slot.shape)
            slot.assign(value)
            carried += 1
    return carried


def _is_slots(value, length):
    is_list = isinstance(value, (list, tuple)) and len(value) == length
    return is_list and all(isinstance(slot, keras.Variable) for slot in value)
