"""Rematerialisation that supports losses, seeds and batch statistics.

`keras.RematScope` recomputes a call as it is, so that losses and seeds leak out of the
region (JAX) or are refused (TensorFlow). Here the region is a pure function: weights
and seeds are arguments; losses and new seeds are results.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import tree

from keras_moe._compat import AutocastScope, clear_losses, flatten_layers, own_variables
from keras_moe.ops._primitives import remat


def rematerialized(layer: Any, function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, recomputing intermediate values for the gradient."""
    weights = [v for v in layer.variables if not _is_seed(v)]
    seeds = [v for v in layer.variables if _is_seed(v)]
    state = _state(layer)
    # Uncast weights, since each sublayer casts them by its own policy.
    with AutocastScope(None):
        # Seeds and statistics are copied, because PyTorch changes them in place.
        values = [v.value * 1 if id(v) in state else v.value for v in weights]
        values += [v.value * 1 for v in seeds]
    structure, num_inputs = {}, len(inputs)

    def region(*arguments):
        inputs, values = arguments[:num_inputs], arguments[num_inputs:]
        with keras.StatelessScope(
            state_mapping=zip((*weights, *seeds), values), collect_losses=True
        ) as scope:
            outputs = function(*inputs)
            losses = list(scope.losses)
            # Sublayers remember losses by id, which later tensors may reuse.
            clear_losses(layer)
        # State that changes without gradients, such as batch statistics.
        structure["changed"] = [
            v
            for v, value in zip(weights, values)
            if id(v) in state and scope.get_current_value(v) is not value
        ]
        results = {
            "outputs": outputs,
            "state": [scope.get_current_value(v) for v in structure["changed"]],
            "losses": losses,
            # As floats, because not every backend can return integers. Only the second
            # half of a seed changes, which counts the draws.
            "draws": [
                keras.ops.cast(scope.get_current_value(v)[1] - v0[1], "float32")
                for v, v0 in zip(seeds, values[len(weights) :])
            ],
        }
        structure["results"] = tree.map_structure(lambda _: None, results)
        return tuple(tree.flatten(results))

    results = remat(region)(*inputs, *values)
    results = tree.pack_sequence_as(structure["results"], list(results))
    for seed, draws in zip(seeds, results["draws"]):
        moved = keras.ops.stack([keras.ops.zeros_like(draws), draws])
        seed.assign_add(keras.ops.cast(moved, seed.dtype))
    for variable, value in zip(structure["changed"], results["state"]):
        variable.assign(keras.ops.stop_gradient(value))
    for loss in results["losses"]:
        layer.add_loss(loss)
    return results["outputs"]


def _state(layer):
    """Ids of float variables that change without gradients: batch statistics."""
    return {
        id(v)
        for sublayer in flatten_layers(layer)
        for v in own_variables(sublayer, trainable=False)
        if "float" in v.dtype
    }


def _is_seed(variable):
    return "int" in variable.dtype and variable.path.endswith("seed_generator_state")
