"""The base class of muMoE layers: a gate, experts, and a normalisation of their input.

Axes: I inputs, E experts of all levels, R rank.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_bool
from keras_moe.layers.expert_coefficients import ExpertCoefficients
from keras_moe.layers.normalization import LayerNorm
from keras_moe.ops.cost import Cost, under
from keras_moe.ops.multilinear import projections


class MuMoEBase(keras.layers.Layer):
    """Base class of `MuMoE` and `MuMoEBlock`.

    Subclasses implement `unbuilt_experts`.
    """

    def __init__(
        self,
        num_experts: Any,
        activation: Any,
        normalization: str | None,
        input_norm: bool,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.gate = ExpertCoefficients(
            num_experts, activation, normalization, name="gate"
        )
        self.input_norm = check_bool("input_norm", input_norm)
        self.norm = None
        if input_norm:
            self.norm = LayerNorm(1e-5, dtype=self.dtype_policy, name="input_norm")

    def unbuilt_experts(self, shape: tuple[int, int]) -> dict:
        """Each layer of experts, not built, with the shape of its inputs."""
        raise NotImplementedError

    def project(self, inputs: Any, experts: Any) -> tuple[Any, Any, Any]:
        """The experts' input, the gate's logits and the experts' projection."""
        if self.norm is not None:
            return self.norm(inputs), None, None
        gate, factor = self.gate, experts.input_factor()
        if factor is None or experts.compute_dtype != gate.compute_dtype:
            return inputs, None, None
        kernels = [ops.cast(kernel, gate.compute_dtype) for kernel in gate.kernels]
        *logits, projected = projections(inputs, *kernels, factor)
        return inputs, logits, projected

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by path."""
        shapes = under(self.gate.name, self.gate.weight_shapes(shape))
        if self.norm is not None:
            shapes.update(under(self.norm.name, self.norm.weight_shapes(shape)))
        for experts, inputs in self.unbuilt_experts(shape).items():
            shapes.update(under(experts.name, experts.weight_shapes(inputs)))
        return shapes

    def cost(self, shape: tuple[int, int]) -> Cost:
        """The cost of rows, every one of which meets all experts."""
        total = self.gate.cost(shape)
        if self.norm is not None:
            total += self.norm.cost(shape)
        experts = self.unbuilt_experts(shape).items()
        return sum((layer.cost(inputs) for layer, inputs in experts), total)
