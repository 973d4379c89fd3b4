"""Calls of layers as training does them: one program on JAX."""

import weakref
from typing import Any

import keras

from tests.gradients import one_program as compiled  # noqa: F401

_PROGRAMS = weakref.WeakKeyDictionary()


def call(layer: keras.layers.Layer, *inputs: Any, training: bool = False, **kwargs):
    """The layer's outputs; the first call builds it."""
    return _outputs_and_losses(layer, inputs, training, kwargs)[0]


def call_with_losses(layer: keras.layers.Layer, *inputs: Any, training: bool):
    """The layer's outputs, and the values that it adds to the loss."""
    outputs, losses = _outputs_and_losses(layer, inputs, training, {})
    return outputs, [float(value) for value in losses]


def _outputs_and_losses(layer, inputs, training, kwargs):
    if keras.backend.backend() != "jax":
        outputs = layer(*inputs, training=training, **kwargs)
        return outputs, layer.losses
    import jax

    if not layer.built:
        layer.build(tuple(inputs[0].shape))
    programs = _PROGRAMS.setdefault(layer, {})
    if training not in programs:
        # The layer is the key of a program, which would keep it.
        weak = weakref.ref(layer)

        def program(trainable, state, inputs, kwargs):
            return weak().stateless_call(
                trainable,
                state,
                *inputs,
                training=training,
                return_losses=True,
                **kwargs,
            )

        programs[training] = jax.jit(program)
    outputs, state, losses = programs[training](
        [v.value for v in layer.trainable_variables],
        [v.value for v in layer.non_trainable_variables],
        inputs,
        kwargs,
    )
    for variable, value in zip(layer.non_trainable_variables, state):
        variable.assign(value)
    return outputs, losses
