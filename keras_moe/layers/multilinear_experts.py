"""muMoE's gate, and its experts as slices of one factorised weight tensor.

Axes: L levels of hierarchy, N_l experts of level l, E experts in all, I inputs, O
units, R ranks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops

from keras_moe import _checks
from keras_moe._types import Activation, Tensor
from keras_moe.layers import activations
from keras_moe.layers._layer import Layer
from keras_moe.ops import _multilinear as tensors
from keras_moe.ops._initializers import PathInitializer, host_values
from keras_moe.ops._nn import standardize
from keras_moe.ops.cost import Cost
from keras_moe.ops.entmax import entmax15_and_source
from keras_moe.ops.expert_types import ExpertTypes
from keras_moe.ops.plans import Routing

# A rank for each mode, as a number or a fraction of the input size.
Rank: TypeAlias = "int | float | str | Sequence[Rank] | None"
NORMALIZATIONS = ("batch", "layer", None)
_EPSILON = 1e-5
_MOMENTUM = 0.9
# Above this ratio to the input size, coefficients are recomputed for the gradient.
_LARGE = 1 / 3


@keras.saving.register_keras_serializable("keras_moe")
class ExpertCoefficients(Layer):
    """muMoE's gate: expert coefficients `activation(norm(x G_l))` at each level l.

    Gating weights start at zero. Computed in float32 under every dtype policy.

    Args:
        num_experts: N, or (N_1, ..., N_L) for L levels of hierarchy.
        activation: activation over the last axis: `"entmax"` (alpha = 1.5),
            `"softmax"`, or a registered callable.
        normalization: normalisation of the logits, without scale and offset: `"batch"`
            over batch and tokens, `"layer"` over experts, or None.
        **kwargs: arguments of `keras.layers.Layer`; `dtype` is always float32.

    Call arguments:
        inputs: (..., I).
        training: whether to normalise by the statistics of the batch.
        logits: products of the inputs with each kernel, if already computed.
        mask: boolean (...), False for padding, which batch statistics ignore.
        with_sources: whether to also return the `sources` of `MultilinearExperts`.

    Output shape: `(coefficients, Routing)`: a tuple of float32 (..., N_l), and a record
    over all N_1 x ... x N_L experts.

    Reference: *Multilinear Mixture of Experts*, section 3.1 and appendix H.3.

    Example:

    >>> from keras_moe.layers import ExpertCoefficients
    >>> gate = ExpertCoefficients((4, 2))
    >>> coefficients, routing = gate(np.ones((1, 3, 8), "float32"))
    >>> [tuple(value.shape) for value in coefficients], tuple(routing.gates.shape)
    ([(1, 3, 4), (1, 3, 2)], (1, 3, 8))
    """

    # Attributes shared with routers.
    gating_residual = False
    summary = "muMoE"

    def __init__(
        self,
        num_experts: int | Sequence[int],
        activation: Activation = "entmax",
        normalization: str | None = "batch",
        **kwargs,
    ):
        kwargs["dtype"] = "float32"
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_experts = check_levels(num_experts)
        self.activation = activations.get(activation)
        self.normalization = _checks.check_one_of(
            "normalization", normalization, NORMALIZATIONS
        )

    def build(self, input_shape):
        self.kernels, self.means, self.variances = [], [], []
        for name, shape in self.weight_shapes(input_shape).items():
            kernel = self.add_weight(
                name=name, shape=shape, initializer="zeros", autocast=False
            )
            self.kernels.append(kernel)
        if self.normalization != "batch":
            return
        for level, count in enumerate(self.num_experts):
            for kept, name, initializer in (
                (self.means, f"moving_mean_{level}", "zeros"),
                (self.variances, f"moving_variance_{level}", "ones"),
            ):
                fixed = {"name": name, "trainable": False, "autocast": False}
                kept.append(self.add_weight((count,), initializer, **fixed))

    def call(
        self,
        inputs: Tensor,
        training: bool | None = None,
        logits: Sequence[Tensor] | None = None,
        mask: Tensor | None = None,
        with_sources: bool = False,
    ) -> tuple[Any, ...]:
        if logits is None:
            logits = [ops.matmul(inputs, kernel) for kernel in self.kernels]
        normalised = [
            self._normalise(level, x, training, mask) for level, x in enumerate(logits)
        ]
        limit = _LARGE * inputs.shape[-1] if with_sources else math.inf
        coefficients, sources = [], []
        for x in normalised:
            source = ()
            if x.shape[-1] > limit and self.activation is activations.entmax15:
                x, source = entmax15_and_source(x)
            else:
                x = self.activation(x)
            coefficients.append(x)
            sources.append(source)
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
            return tuple(coefficients), routing, tuple(sources)
        return tuple(coefficients), routing

    def _normalise(self, level, x, training, mask):
        if self.normalization is None:
            return x
        if self.normalization == "layer":
            return standardize(x, (-1,), _EPSILON)[0]
        if training and self.trainable:
            axes = tuple(range(len(x.shape) - 1))
            normalised, *statistics = standardize(x, axes, _EPSILON, mask)
            mean, variance = (ops.reshape(value, (-1,)) for value in statistics)
            if mask is None:
                count = ops.size(x) // x.shape[-1]
            else:
                count = ops.sum(ops.cast(mask, x.dtype))
            self._keep(level, mean, variance, count)
            return normalised
        scale = ops.rsqrt(self.variances[level] + _EPSILON)
        return (x - self.means[level]) * scale

    def _keep(self, level, mean, variance, count):
        """Updates the moving averages, with the unbiased variance as in PyTorch."""
        count = ops.cast(count, "float32")
        variance = variance * count / ops.maximum(count - 1.0, 1.0)
        averages = self.means[level], self.variances[level]
        for kept, new in zip(averages, (mean, variance)):
            old = ops.convert_to_tensor(kept)
            # A batch of padding only has no statistics.
            new = ops.where(count > 0, ops.stop_gradient(new), old)
            kept.assign(_MOMENTUM * old + (1.0 - _MOMENTUM) * new)

    def compute_output_spec(self, inputs, training=None, logits=None, mask=None):
        leading = tuple(inputs.shape[:-1])
        coefficients = tuple(
            keras.KerasTensor((*leading, count), "float32")
            for count in self.num_experts
        )
        shape = (*leading, math.prod(self.num_experts))
        return coefficients, Routing(
            *(keras.KerasTensor(shape, "float32") for _ in Routing._fields)
        )

    @property
    def expert_types(self) -> ExpertTypes:
        """Number of experts over all levels."""
        return ExpertTypes(math.prod(self.num_experts))

    @property
    def expert_columns(self) -> tuple[int, ...]:
        """Columns of the experts in the routing record, which are all."""
        return tuple(range(self.expert_types.ffn))

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        return {
            f"kernel_{level}": (shape[-1], count)
            for level, count in enumerate(self.num_experts)
        }

    def cost(self, shape: tuple) -> Cost:
        num_tokens, dim = shape
        flops = 2 * num_tokens * dim * sum(self.num_experts)
        return Cost.all_active(self.weight_shapes(shape), flops)


def check_levels(num_experts: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the number of experts of each level as a tuple."""
    levels = num_experts if isinstance(num_experts, (list, tuple)) else [num_experts]
    if not levels:
        expected = "num_experts to be an integer or one for each level"
        raise _checks.unfit(expected, num_experts=num_experts)
    return tuple(_checks.check_integer("num_experts", count) for count in levels)


def outer(
    values: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Combines the levels' values into one value per expert."""
    total = values[0]
    for value in values[1:]:
        total = combine(total[..., :, None], value[..., None, :])
        total = ops.reshape(
            total, (*ops.shape(value)[:-1], total.shape[-2] * total.shape[-1])
        )
    return total


@keras.saving.register_keras_serializable("keras_moe")
class MultilinearExperts(Layer):
    """Linear experts stored as one factorised weight tensor, mixed by coefficients.

    Computes `y_o = sum over n_1 ... n_L, i of W[n_1, ..., n_L, i, o] a^1[n_1] ...
    a^L[n_L] x[i]` from the factors of W, without building W. Biases are the weights of
    a constant input 1, appended to the inputs.

    Args:
        units: width O of the output.
        num_experts: N, or (N_1, ..., N_L) for L levels of hierarchy.
        factorization: `"cp"`, `"tr"` (tensor ring), `"tucker"`, or None for the full
            tensor, a dense mixture of linear experts.
        rank: R for CP; (R_1, ..., R_(L+2)) for `"tr"` and `"tucker"`; or
            `"match_dense"` for as many parameters as a dense layer: TR then has ranks
            4, ..., 4, R, and Tucker up to 4 per level and R for inputs and units. A
            fraction up to 1 is relative to I, rounded down.
        use_bias: whether each expert has a bias.
        expert_noise: sigma of N(1, sigma), which initialises the first expert factor.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: (..., I).
        coefficients: sequence of (..., N_l), one per level.
        projected: product of the inputs with `input_factor()`, if already computed.
        sources: per level, tensors to recompute coefficients from, or an empty tuple.

    Output shape: (..., O).

    Reference:
        *Multilinear Mixture of Experts*, equations 1 to 3, 15 to 18, appendix F.2.

    Example:

    >>> from keras_moe.layers import MultilinearExperts
    >>> experts = MultilinearExperts(5, num_experts=4, rank=3)
    >>> tuple(experts(np.ones((2, 8)), [np.ones((2, 4)) / 4]).shape)
    (2, 5)
    """

    def __init__(
        self,
        units: int,
        num_experts: int | Sequence[int],
        factorization: str | None = "cp",
        rank: Rank = "match_dense",
        use_bias: bool = True,
        expert_noise: float = 1.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.units = _checks.check_integer("units", units)
        self.num_experts = check_levels(num_experts)
        self.factorization = _checks.check_one_of(
            "factorization", factorization, tensors.FACTORIZATIONS
        )
        self.rank = check_rank(rank, self.factorization, len(self.num_experts))
        self.use_bias = _checks.check_bool("use_bias", use_bias)
        self.expert_noise = _checks.check_not_negative("expert_noise", expert_noise)

    def build(self, inputs_shape, coefficients_shape=None):
        self._inputs = inputs_shape[-1]
        shapes = self.weight_shapes((None, self._inputs))
        self.factors = [
            self.add_weight(
                name=name,
                shape=shape,
                initializer=self._initializer(index, name, shape),
            )
            for index, (name, shape) in enumerate(shapes.items())
        ]

    def _initializer(self, index, name, shape):
        """Appendix F.2: noise around equal experts; PyTorch's linear init elsewhere."""
        if name.startswith("expert_factor"):
            return ExpertMode(self.expert_noise if index == 0 else 0.0)
        # Fan-in: the modes that the factor contracts; all ranks for output and core.
        if name == "tensor":
            fan_in = shape[-2]
        elif name == "core":
            fan_in = math.prod(shape[:-1])
        elif self.factorization == "tr":
            fan_in = shape[1] if name == "input_factor" else shape[0] * shape[2]
        else:
            fan_in = shape[0] if name == "input_factor" else shape[1]
        limit = 1 / math.sqrt(fan_in)
        return keras.initializers.RandomUniform(-limit, limit)

    def call(
        self,
        inputs: Tensor,
        coefficients: Sequence[Tensor],
        projected: Tensor | None = None,
        sources: Sequence[tuple] | None = None,
    ) -> Tensor:
        if len(coefficients) != len(self.num_experts):
            expected = f"coefficients for each level of num_experts={self.num_experts}"
            raise _checks.unfit(expected, len(coefficients))
        coefficients = [ops.cast(a, inputs.dtype) for a in coefficients]
        if self.compute_dtype != "float32":
            # Keras has cast the sources, so they no longer match the coefficients.
            sources = None
        return tensors.multilinear(
            inputs,
            coefficients,
            self._tensors(),
            self.factorization,
            projected,
            sources,
        )

    def input_factor(self) -> Tensor | None:
        """The factor that multiplies the inputs first; None for the full tensor."""
        return tensors.input_factor(self._tensors(), self.factorization)

    def _tensors(self):
        return [ops.cast(factor, self.compute_dtype) for factor in self.factors]

    def expert_weights(self, indices: Sequence[int | Sequence[int]]) -> Tensor:
        """Matrices (len(indices), I, O) of some experts; biases are the last row."""
        factors = [ops.convert_to_tensor(factor) for factor in self.factors]
        matrices = []
        for index in indices:
            levels: Any = tuple(index) if isinstance(index, (list, tuple)) else (index,)
            counts = self.num_experts
            if len(levels) != len(counts) or not all(
                i in range(count) for i, count in zip(levels, counts)
            ):
                raise _checks.unfit(f"experts of num_experts={counts}", index)
            matrices.append(tensors.expert_matrix(factors, levels, self.factorization))
        return ops.stack(matrices)

    @property
    def expert_rank_bound(self) -> int:
        """Upper bound of the rank of an expert's matrix (appendix D)."""
        return self.tensor_spec(self._inputs).rank_bound

    @property
    def holds_any_matrix(self) -> bool:
        """Whether an expert can represent any matrix (I, O) and bias."""
        inputs = self._inputs + self.use_bias
        return self.expert_rank_bound == min(inputs, self.units)

    def _rank(self, inputs):
        if self.rank != "match_dense":
            return resolved_rank(self.rank, inputs)
        sizes = [(inputs, self.units)]
        return matching_rank(self.factorization, self.num_experts, sizes, self.use_bias)

    def tensor_spec(self, inputs: int) -> tensors.TensorSpec:
        """The weight tensor: the ranks of its experts, and multiply-adds per token."""
        return tensors.TensorSpec(
            self.factorization,
            self.num_experts,
            inputs + self.use_bias,
            self.units,
            self._rank(inputs),
        )

    def compute_output_spec(self, inputs, coefficients, projected=None, sources=None):
        shape = (*inputs.shape[:-1], self.units)
        return keras.KerasTensor(shape, self.compute_dtype)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        if self.factorization is None:
            names = ["tensor"]
        else:
            levels = range(len(self.num_experts))
            names = [f"expert_factor_{level}" for level in levels]
            names += ["input_factor", "output_factor", "core"]
        # Only Tucker has a core.
        return dict(zip(names, self.tensor_spec(shape[-1]).factor_shapes))

    def cost(self, shape: tuple) -> Cost:
        num_tokens, dim = shape
        flops = 2 * num_tokens * self.tensor_spec(dim).multiply_adds
        return Cost.all_active(self.weight_shapes(shape), flops)


@keras.saving.register_keras_serializable("keras_moe")
class ExpertMode(keras.initializers.Initializer):
    """Noise N(1, sigma) for each entry (CP) or slice's diagonal (tensor ring)."""

    def __init__(self, sigma: float = 1.0):
        self.sigma = sigma

    def __call__(self, shape, dtype=None):
        return PathInitializer(self)(shape, dtype)

    def host_values(self, shape: tuple[int, ...], stream: str) -> np.ndarray | None:
        """The values of a stream, as `keras_moe.ops._initializers` draws them."""
        noise = keras.initializers.RandomNormal(1.0, self.sigma)
        values = host_values(noise, shape, stream)
        if len(shape) > 2 and values is not None:
            values *= np.eye(shape[0], shape[2], dtype="float32")[:, None]
        return values

    def get_config(self):
        return {"sigma": self.sigma}


def check_rank(rank: Rank, factorization: str | None, levels: int) -> Rank:
    """Checks that the rank fits the factorisation; returns sequences as tuples."""
    if factorization is None or rank == "match_dense":
        _checks.check_one_of("rank", rank, (None, "match_dense"))
        return "match_dense"
    if factorization == "cp":
        return _check_size(rank)
    if not isinstance(rank, (list, tuple)) or len(rank) != levels + 2:
        raise ValueError(
            f"Expected {levels + 2} integers for factorization={factorization!r} and "
            f"{levels} levels of experts; received: rank={rank!r}"
        )
    return tuple(_check_size(size) for size in rank)


def _check_size(rank):
    """Checks an integer, or a fraction of the input size."""
    if isinstance(rank, (float, np.floating)) and 0 < rank <= 1:
        return float(rank)
    return _checks.check_integer("rank", rank)


def resolved_rank(rank: Rank, inputs: int) -> Rank:
    """Replaces fractions of the input size by integers of at least 1."""
    if isinstance(rank, tuple):
        return tuple(resolved_rank(size, inputs) for size in rank)
    return max(int(rank * inputs), 1) if isinstance(rank, float) else rank


def dense_parameters(shape: tuple) -> int:
    """Number of parameters of a dense layer (inputs, units) with bias."""
    return (shape[0] + 1) * shape[1]


def matching_rank(
    factorization: str | None,
    num_experts: tuple[int, ...],
    sizes: list[tuple[int, int]],
    use_bias: bool,
    gate_parameters: int = 0,
) -> Rank:
    """Smallest rank with the parameters of dense layers of `sizes` (inputs, units)."""
    if factorization is None:
        return None
    budget = sum(map(dense_parameters, sizes)) - gate_parameters
    layers = len(sizes)
    modes = sum(inputs + use_bias + units for inputs, units in sizes)
    if factorization == "cp":
        return max(-(-budget // (layers * sum(num_experts) + modes)), 1)
    narrow = 4
    if factorization == "tucker":
        experts = [min(count, narrow) for count in num_experts]
        factors = sum(count * rank for count, rank in zip(num_experts, experts))
        core, rest = math.prod(experts), budget - layers * factors
        # Solves layers core R^2 + modes R = rest for R, rounded up.
        root = math.isqrt(max(modes**2 + 4 * layers * core * rest, 0))
        last = max((root - modes) // (2 * layers * core), 1)
        while last * (modes + layers * core * last) < rest:
            last += 1
        return (*experts, last, last)
    fixed = layers * sum(narrow * count * narrow for count in num_experts)
    last = max(-(-(budget - fixed) // (narrow * modes)), 1)
    return (*[narrow] * (len(num_experts) + 1), last)
