"""muMoE's gating: from an input to the coefficients of its experts.

Axes: L levels of hierarchy, N_l experts of a level, E all experts, I inputs.
"""

import math
from typing import Any

import keras
from keras import ops

from keras_moe.checks import check_integer, check_one_of
from keras_moe.layers import activations
from keras_moe.ops.cost import Cost
from keras_moe.ops.entmax import entmax15_and_source
from keras_moe.ops.expert_types import ExpertTypes
from keras_moe.ops.nn import standardize
from keras_moe.ops.plans import Routing

NORMALIZATIONS = ("batch", "layer", None)
_EPSILON = 1e-5
_MOMENTUM = 0.9
# The part of the inputs' size above which coefficients are not kept, but computed
# again, which takes eager PyTorch a twentieth of the layer's time.
_LARGE = 1 / 3


@keras.saving.register_keras_serializable("keras_moe")
class ExpertCoefficients(keras.layers.Layer):
    """Coefficients of experts at each level: `activation(norm(x G_l))`.

    The gating weights begin at zero, so that all coefficients begin equal. The
    arithmetic is float32 under every dtype policy.

    Args:
        num_experts: N, or (N_1, ..., N_L) for L levels of hierarchy.
        activation: activation over the last axis, `"entmax"` (alpha = 1.5),
            `"softmax"`, or a registered callable.
        normalization: normalisation of the logits, `"batch"` over batch and tokens,
            `"layer"` over experts, both without scale and offset, or None.
        **kwargs: arguments of `keras.layers.Layer`; `dtype` is always float32.

    Call arguments:
        inputs: (..., I).
        training: whether statistics are those of the batch, and update the moving ones.
        logits: products of the inputs and each kernel, if the caller has them.
        mask: boolean (...), False for padding, which has no part in batch statistics.
        with_sources: whether what `MultilinearExperts` computes the coefficients from
            again is returned, too.

    Output shape:
        `(coefficients, Routing)`: a tuple of float32 (..., N_l), and a record whose
        expert axis has all N_1 x ... x N_L experts. With `with_sources` there comes a
        source for each level, which is empty for another activation than entmax, or
        where coefficients are few beside the inputs.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        *Multilinear Mixture of Experts*, section 3.1 and appendix H.3.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import ExpertCoefficients
    >>> gate = ExpertCoefficients((4, 2))
    >>> coefficients, routing = gate(np.ones((1, 3, 8), "float32"))
    >>> [tuple(value.shape) for value in coefficients], tuple(routing.gates.shape)
    ([(1, 3, 4), (1, 3, 2)], (1, 3, 8))
    """

    # The gate stands in the place of a router, and has these attributes of one.
    gating_residual = False
    summary = "muMoE"

    def __init__(
        self,
        num_experts: Any,
        activation: Any = "entmax",
        normalization: str | None = "batch",
        **kwargs,
    ):
        kwargs["dtype"] = "float32"
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_experts = check_levels(num_experts)
        self.activation = activations.get(activation)
        self.normalization = check_one_of(
            "normalization", normalization, NORMALIZATIONS
        )

    def build(self, input_shape):
        inputs = input_shape[-1]
        self.kernels = [
            self.add_weight(
                name=f"kernel_{level}",
                shape=(inputs, count),
                initializer="zeros",
                autocast=False,
            )
            for level, count in enumerate(self.num_experts)
        ]
        self.means, self.variances = [], []
        if self.normalization != "batch":
            return
        for level, count in enumerate(self.num_experts):
            for name, initializer, variables in (
                ("mean", "zeros", self.means),
                ("variance", "ones", self.variances),
            ):
                variables.append(
                    self.add_weight(
                        name=f"moving_{name}_{level}",
                        shape=(count,),
                        initializer=initializer,
                        trainable=False,
                        autocast=False,
                    )
                )

    def call(
        self,
        inputs: Any,
        training: bool | None = None,
        logits: Any = None,
        mask: Any = None,
        with_sources: bool = False,
    ) -> tuple[Any, ...]:
        if logits is None:
            logits = [ops.matmul(inputs, kernel) for kernel in self.kernels]
        normalised = [
            self._normalise(level, x, training, mask) for level, x in enumerate(logits)
        ]
        limit = _LARGE * inputs.shape[-1] if with_sources else math.inf
        coefficients, sources = zip(*(self._activate(x, limit) for x in normalised))
        gates = outer(coefficients, ops.multiply)
        routing = Routing(
            logits=outer(logits, ops.add),
            noisy_logits=outer(normalised, ops.add),
            affinity=gates,
            gates=gates,
            dispatched=ops.cast(gates != 0, "float32"),
            combined=gates,
        )
        if with_sources:
            return coefficients, routing, sources
        return coefficients, routing

    def _activate(self, x, limit):
        if x.shape[-1] > limit and self.activation is activations.entmax15:
            return entmax15_and_source(x)
        return self.activation(x), ()

    def _normalise(self, level, x, training, mask):
        if self.normalization is None:
            return x
        if self.normalization == "layer":
            normalised, _, _ = standardize(x, (-1,), _EPSILON)
        elif training and self.trainable:
            axes = tuple(range(len(x.shape) - 1))
            normalised, *statistics = standardize(x, axes, _EPSILON, mask)
            mean, variance = (ops.reshape(value, (-1,)) for value in statistics)
            self._keep(level, mean, variance, _row_count(x, mask))
        else:
            scale = ops.rsqrt(self.variances[level] + _EPSILON)
            normalised = (x - self.means[level]) * scale
        return normalised

    def _keep(self, level, mean, variance, count):
        """Updates the moving statistics, with the unbiased variance as in PyTorch."""
        count = ops.cast(count, "float32")
        variance = variance * count / ops.maximum(count - 1.0, 1.0)
        for kept, new in (
            (self.means[level], mean),
            (self.variances[level], variance),
        ):
            old = ops.convert_to_tensor(kept)
            # A batch without tokens has no statistics.
            new = ops.where(count > 0, ops.stop_gradient(new), old)
            kept.assign(_MOMENTUM * old + (1.0 - _MOMENTUM) * new)

    def compute_output_spec(self, inputs, training=None, logits=None, mask=None):
        leading = tuple(inputs.shape[:-1])
        coefficients = tuple(
            keras.KerasTensor((*leading, count), "float32")
            for count in self.num_experts
        )
        shape = (*leading, total_experts(self.num_experts))
        return coefficients, Routing(
            *(keras.KerasTensor(shape, "float32") for _ in Routing._fields)
        )

    @property
    def expert_types(self) -> ExpertTypes:
        """The experts of all levels."""
        return ExpertTypes(total_experts(self.num_experts))

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by name; moving statistics are not trained.

        Args:
            shape: (num_tokens, dim).
        """
        return {
            f"kernel_{level}": (shape[-1], count)
            for level, count in enumerate(self.num_experts)
        }

    def cost(self, shape: tuple[int, int]) -> Cost:
        """The cost for tokens of one image.

        Args:
            shape: (num_tokens, dim).
        """
        num_tokens, dim = shape
        flops = 2 * num_tokens * dim * sum(self.num_experts)
        return Cost.all_active(self.weight_shapes(shape), flops)

    def get_config(self):
        config = super().get_config()
        config.update(
            num_experts=self.num_experts,
            activation=activations.serialize(self.activation),
            normalization=self.normalization,
        )
        return config


def _row_count(x, mask):
    """The number of rows of (..., N) that are no padding."""
    if mask is None:
        return ops.size(x) // x.shape[-1]
    return ops.sum(ops.cast(mask, x.dtype))


def check_levels(num_experts: Any) -> tuple[int, ...]:
    """The number of experts of each level."""
    if isinstance(num_experts, (list, tuple)):
        if not num_experts:
            raise ValueError(
                "Expected num_experts to be an integer or one for each level; "
                f"received: num_experts={num_experts}"
            )
        return tuple(check_integer("num_experts", count) for count in num_experts)
    return (check_integer("num_experts", num_experts),)


def total_experts(num_experts: tuple[int, ...]) -> int:
    """E, the product over levels."""
    total = 1
    for count in num_experts:
        total *= count
    return total


def outer(values: Any, combine: Any) -> Any:
    """One value for each expert of all levels."""
    total = values[0]
    for value in values[1:]:
        total = combine(total[..., :, None], value[..., None, :])
        total = ops.reshape(
            total, (*ops.shape(value)[:-1], total.shape[-2] * total.shape[-1])
        )
    return total
