"""muMoE: many experts in one factorised weight tensor, none of which is dropped.

Axes: L levels of hierarchy, N_l experts of a level, I inputs, O units, R ranks.
"""

import itertools
import math
from typing import Any

import keras
from keras import ops

from keras_moe.layers import activations
from keras_moe.layers.expert_coefficients import (
    ExpertCoefficients,
    check_levels,
    serialize_activation,
)
from keras_moe.layers.normalization import LayerNorm
from keras_moe.ops import multilinear as tensors
from keras_moe.ops.checks import (
    check_bool,
    check_integer,
    check_not_negative,
    check_one_of,
)


@keras.saving.register_keras_serializable("keras_moe")
class MultilinearExperts(keras.layers.Layer):
    """Experts as one factorised weight tensor, mixed by given coefficients.

    `y_o = sum over n_1 ... n_L, i of W[n_1, ..., n_L, i, o] a^1[n_1] ... a^L[n_L]
    x[i]`. Factors are all that is stored and computed with. The bias is a constant
    input of 1, the last of the input mode, so that each expert has one.

    Args:
        units: O.
        num_experts: N, or (N_1, ..., N_L) for L levels of hierarchy.
        factorization: `"cp"`, `"tr"` (tensor ring), `"tucker"`, or None for the whole
            tensor, which is also the dense mixture of linear experts.
        rank: CP's R; (R_1, ..., R_(L+2)) for `"tr"` and `"tucker"`; or `"match_dense"`
            for as many parameters as a dense layer of I to O has, or one of
            `match_shape`; TR then has ranks 4, ..., 4, R_(L+2).
        match_shape: (inputs, units) of the dense layer for `"match_dense"`.
        use_bias: fold a bias into the input mode.
        expert_noise: sigma of the first expert mode's factors, N(1, sigma).
        **kwargs: see `keras.layers.Layer`.

    Call arguments:
        inputs: (..., I).
        coefficients: a sequence of (..., N_l) for each level.

    Output shape:
        (..., O).

    Raises:
        ValueError: if an argument is out of range, or ranks or coefficients do not fit.

    Reference:
        *Multilinear Mixture of Experts*, equations 1 to 3, 15 to 18, appendix F.2.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import MultilinearExperts
    >>> experts = MultilinearExperts(5, num_experts=4, rank=3)
    >>> tuple(experts(np.ones((2, 8)), [np.ones((2, 4)) / 4]).shape)
    (2, 5)
    """

    def __init__(
        self,
        units: int,
        num_experts: Any,
        factorization: str | None = "cp",
        rank: Any = "match_dense",
        match_shape: tuple[int, int] | None = None,
        use_bias: bool = True,
        expert_noise: float = 1.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.units = check_integer("units", units)
        self.num_experts = check_levels(num_experts)
        self.factorization = check_one_of(
            "factorization", factorization, tensors.FACTORIZATIONS
        )
        self.rank = check_rank(rank, self.factorization, len(self.num_experts))
        if match_shape is not None:
            if self.rank != "match_dense":
                raise ValueError(
                    "Expected rank='match_dense' for a match_shape; "
                    f"received: rank={rank}, match_shape={match_shape}"
                )
            match_shape = tuple(
                check_integer("match_shape", size) for size in match_shape
            )
        self.match_shape = match_shape
        self.use_bias = check_bool("use_bias", use_bias)
        self.expert_noise = check_not_negative("expert_noise", expert_noise)

    def build(self, inputs_shape, coefficients_shape=None):
        self._inputs = inputs_shape[-1]
        shapes = self._shapes(self._inputs)
        levels = len(self.num_experts)
        if self.factorization is None:
            names = ["tensor"]
        else:
            names = [f"expert_factor_{level}" for level in range(levels)]
            names += ["input_factor", "output_factor", "core"]
        self.factors = [
            self.add_weight(
                name=name,
                shape=shape,
                initializer=self._initializer(index, name, shape),
            )
            for index, (name, shape) in enumerate(zip(names, shapes))
        ]

    def _initializer(self, index, name, shape):
        """Appendix F.2: experts alike but for noise, the rest as PyTorch's linear."""
        if name == "tensor":
            limit = 1 / math.sqrt(shape[-2])
            return keras.initializers.RandomUniform(-limit, limit)
        if name.startswith("expert_factor"):
            return ExpertMode(self.expert_noise if index == 0 else 0.0)
        # What a factor contracts with, or, of the output's and the core, all ranks.
        if name == "core":
            fan_in = math.prod(shape[:-1])
        elif self.factorization == "tr":
            fan_in = shape[1] if name == "input_factor" else shape[0] * shape[2]
        else:
            fan_in = shape[0] if name == "input_factor" else shape[1]
        limit = 1 / math.sqrt(fan_in)
        return keras.initializers.RandomUniform(-limit, limit)

    def call(self, inputs: Any, coefficients: Any) -> Any:
        if len(coefficients) != len(self.num_experts):
            raise ValueError(
                f"Expected coefficients for {len(self.num_experts)} levels, "
                f"num_experts={self.num_experts}; received: {len(coefficients)}"
            )
        if self.use_bias:
            ones = ops.ones_like(inputs[..., :1])
            inputs = ops.concatenate([inputs, ones], axis=-1)
        coefficients = [ops.cast(a, inputs.dtype) for a in coefficients]
        factors = [ops.convert_to_tensor(factor) for factor in self.factors]
        return tensors.multilinear(inputs, coefficients, factors, self.factorization)

    def expert_weights(self, indices: Any) -> Any:
        """The matrices of chosen experts, for inspection.

        Args:
            indices: a list of experts: integers, with more than one level tuples of
                them.

        Returns:
            (len(indices), I, O); with a bias I + 1 rows, of which it is the last.

        Raises:
            ValueError: if an expert is out of range.
        """
        matrices = []
        for index in indices:
            place = tuple(index) if isinstance(index, (list, tuple)) else (index,)
            fits = len(place) == len(self.num_experts) and all(
                0 <= i < count for i, count in zip(place, self.num_experts)
            )
            if not fits:
                raise ValueError(
                    f"Expected experts of num_experts={self.num_experts}; "
                    f"received: {index}"
                )
            factors = [ops.convert_to_tensor(factor) for factor in self.factors]
            matrices.append(tensors.expert_matrix(factors, place, self.factorization))
        return ops.stack(matrices)

    @property
    def expert_rank_bound(self) -> int:
        """The largest rank that an expert's matrix can have (appendix D)."""
        return tensors.rank_bound(
            self.factorization,
            self.num_experts,
            self._inputs + self.use_bias,
            self.units,
            self._rank(self._inputs),
        )

    @property
    def holds_any_matrix(self) -> bool:
        """Whether an expert can be any matrix (I, O), its bias included."""
        inputs = self._inputs + self.use_bias
        return self.expert_rank_bound == min(inputs, self.units)

    def _rank(self, inputs):
        if self.rank != "match_dense":
            return self.rank
        return matching_rank(
            self.factorization,
            self.num_experts,
            [(inputs + self.use_bias, self.units)],
            dense_parameters(self.match_shape or (inputs, self.units)),
        )

    def _shapes(self, inputs):
        return tensors.factor_shapes(
            self.factorization,
            self.num_experts,
            inputs + self.use_bias,
            self.units,
            self._rank(inputs),
        )

    def compute_output_spec(self, inputs, coefficients):
        shape = (*inputs.shape[:-1], self.units)
        return keras.KerasTensor(shape, self.compute_dtype)

    def parameters(self, dim: int) -> int:
        """The number of parameters for inputs of size `dim`."""
        return sum(math.prod(shape) for shape in self._shapes(dim))

    def multiply_adds(self, dim: int) -> int:
        """Multiply-adds of one token's matmuls (Table 5 of the paper)."""
        total = self.parameters(dim)
        if self.factorization == "tr":
            first, *others = self._rank(dim)[1:]
            # The chain of matrices R_1 x R_l, then the ring's closing.
            narrow = self._rank(dim)[0]
            for following in others:
                total += narrow * first * following
                first = following
        return total

    def get_config(self):
        config = super().get_config()
        config.update(
            units=self.units,
            num_experts=self.num_experts,
            factorization=self.factorization,
            rank=self.rank,
            match_shape=self.match_shape,
            use_bias=self.use_bias,
            expert_noise=self.expert_noise,
        )
        return config


@keras.saving.register_keras_serializable("keras_moe")
class ExpertMode(keras.initializers.Initializer):
    """Expert factors that replicate one matrix, with noise: N(1, sigma).

    Of a matrix (N, R) every entry, of a tensor (R, N, S) the diagonal of each slice.

    Args:
        sigma: standard deviation.

    Reference:
        *Multilinear Mixture of Experts*, appendix F.2.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers.mumoe import ExpertMode
    >>> np.array(ExpertMode(0.0)((2, 1, 2))).tolist()
    [[[1.0, 0.0]], [[0.0, 1.0]]]
    """

    def __init__(self, sigma: float = 1.0):
        self.sigma = sigma

    def __call__(self, shape, dtype=None):
        draw = keras.initializers.RandomNormal(1.0, self.sigma)
        if len(shape) == 2:
            return draw(shape, dtype=dtype)
        eye = ops.eye(shape[0], shape[2], dtype=dtype)
        return ops.expand_dims(eye, 1) * draw(shape, dtype=dtype)

    def get_config(self):
        return {"sigma": self.sigma}


@keras.saving.register_keras_serializable("keras_moe")
class MuMoE(keras.layers.Layer):
    """A muMoE layer: coefficients from the input, and factorised experts mixed by them.

    Every expert takes part with its coefficient; entmax makes most of these zero.
    There is no capacity, no dropping and no auxiliary loss.

    Args:
        units: O.
        num_experts: N, or (N_1, ..., N_L) for L levels of hierarchy.
        factorization: see `MultilinearExperts`.
        rank: see `MultilinearExperts`; `"match_dense"` counts the gate, too.
        match_shape: see `MultilinearExperts`.
        activation: see `ExpertCoefficients`.
        normalization: see `ExpertCoefficients`.
        use_bias: see `MultilinearExperts`.
        expert_noise: see `MultilinearExperts`.
        **kwargs: see `keras.layers.Layer`.

    Call arguments:
        inputs: (..., I).
        training: whether batch statistics are those of the batch.

    Output shape:
        `(outputs, Routing)`: (..., O), and the record of the coefficients (..., E).

    Raises:
        ValueError: as the two layers.

    Reference:
        *Multilinear Mixture of Experts*, section 3.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import MuMoE
    >>> layer = MuMoE(10, num_experts=16, rank=8)
    >>> outputs, routing = layer(np.ones((2, 3, 6), "float32"))
    >>> tuple(outputs.shape), tuple(routing.gates.shape)
    ((2, 3, 10), (2, 3, 16))
    """

    def __init__(
        self,
        units: int,
        num_experts: Any,
        factorization: str | None = "cp",
        rank: Any = "match_dense",
        match_shape: tuple[int, int] | None = None,
        activation: Any = "entmax",
        normalization: str | None = "batch",
        use_bias: bool = True,
        expert_noise: float = 1.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.gate = ExpertCoefficients(
            num_experts, activation, normalization, name="gate"
        )
        arguments = {
            "units": units,
            "num_experts": self.gate.num_experts,
            "factorization": factorization,
            "rank": rank,
            "match_shape": match_shape,
            "use_bias": use_bias,
            "expert_noise": expert_noise,
        }
        # It checks them, and says how they are kept; the rank may depend on the input.
        checked = MultilinearExperts(**arguments).get_config()
        self._arguments = {name: checked[name] for name in arguments}

    def build(self, input_shape):
        self.gate.build(input_shape)
        self.experts = self._experts(input_shape[-1])
        self.experts.build(input_shape)

    def _experts(self, dim):
        """The experts for inputs of size `dim`, not built."""
        given = dict(self._arguments)
        if given["rank"] == "match_dense" and given["factorization"] is not None:
            shape = given.pop("match_shape") or (dim, given["units"])
            given["rank"] = matching_rank(
                given["factorization"],
                given["num_experts"],
                [(dim + given["use_bias"], given["units"])],
                dense_parameters(shape) - self.gate.parameters(dim),
            )
        return MultilinearExperts(dtype=self.dtype_policy, name="experts", **given)

    def call(self, inputs: Any, training: bool | None = None) -> tuple[Any, Any]:
        coefficients, routing = self.gate(inputs, training=training)
        return self.experts(inputs, coefficients), routing

    def compute_output_spec(self, inputs, training=None):
        _, routing = self.gate.compute_output_spec(inputs)
        shape = (*inputs.shape[:-1], self._arguments["units"])
        return keras.KerasTensor(shape, self.compute_dtype), routing

    def parameters(self, dim: int) -> int:
        """The number of parameters for inputs of size `dim`."""
        return self.gate.parameters(dim) + self._experts(dim).parameters(dim)

    def get_config(self):
        config = super().get_config()
        config.update(
            **self._arguments,
            activation=serialize_activation(self.gate.activation),
            normalization=self.gate.normalization,
        )
        return config


@keras.saving.register_keras_serializable("keras_moe")
class MuMoEBlock(keras.layers.Layer):
    """Two muMoE layers with shared coefficients and GELU between them.

    Args:
        mlp_dim: H, the units of the first layer.
        units: O; None takes the inputs' size.
        num_experts: see `MuMoE`.
        factorization: see `MuMoE`.
        rank: see `MuMoE`; of both layers. `"match_dense"` matches the dense MLP, the
            gate counted.
        hidden_activation: between the layers; `"gelu"` is the exact form.
        input_norm: normalise the input of the first layer, but not the gate's.
        activation: see `MuMoE`.
        normalization: see `MuMoE`.
        use_bias: see `MuMoE`.
        expert_noise: see `MuMoE`.
        **kwargs: see `keras.layers.Layer`.

    Call arguments:
        inputs: (..., I).
        training: whether batch statistics are those of the batch.

    Output shape:
        `(outputs, Routing)`: (..., O), and the record of the coefficients (..., E).

    Raises:
        ValueError: as `MuMoE`.

    Reference:
        *Multilinear Mixture of Experts*, section 4.3.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import MuMoEBlock
    >>> outputs, routing = MuMoEBlock(16, num_experts=4, rank=8)(np.ones((2, 3, 6)))
    >>> tuple(outputs.shape)
    (2, 3, 6)
    """

    def __init__(
        self,
        mlp_dim: int,
        units: int | None = None,
        num_experts: Any = 64,
        factorization: str | None = "cp",
        rank: Any = "match_dense",
        hidden_activation: Any = "gelu",
        input_norm: bool = False,
        activation: Any = "entmax",
        normalization: str | None = "batch",
        use_bias: bool = True,
        expert_noise: float = 1.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.mlp_dim = check_integer("mlp_dim", mlp_dim)
        self.units = units if units is None else check_integer("units", units)
        self.hidden_activation = activations.get(hidden_activation)
        self.input_norm = check_bool("input_norm", input_norm)
        self.gate = ExpertCoefficients(
            num_experts, activation, normalization, name="gate"
        )
        levels = self.gate.num_experts
        self._options = {
            "num_experts": levels,
            "factorization": factorization,
            "rank": rank,
            "use_bias": check_bool("use_bias", use_bias),
            "expert_noise": expert_noise,
        }
        # It checks the arguments.
        self._options["rank"] = self._layer(self.mlp_dim, None, rank).rank
        self.norm = None
        if self.input_norm:
            self.norm = LayerNorm(1e-5, dtype=self.dtype_policy, name="input_norm")

    def _layer(self, units, name, rank):
        return MultilinearExperts(
            units, dtype=self.dtype_policy, name=name, **{**self._options, "rank": rank}
        )

    def _both(self, dim):
        """Both layers for inputs of size `dim`, not built."""
        rank, units = self._options["rank"], self.units or dim
        if rank == "match_dense":
            bias, hidden = self._options["use_bias"], self.mlp_dim
            budget = dense_parameters((dim, hidden)) + dense_parameters((hidden, units))
            rank = matching_rank(
                self._options["factorization"],
                self.gate.num_experts,
                [(dim + bias, hidden), (hidden + bias, units)],
                budget - self.gate.parameters(dim),
            )
        return (
            self._layer(self.mlp_dim, "hidden", rank),
            self._layer(units, "output", rank),
        )

    def build(self, input_shape):
        self.hidden, self.output_experts = self._both(input_shape[-1])
        self.gate.build(input_shape)
        if self.norm is not None:
            self.norm.build(input_shape)
        self.hidden.build(input_shape)
        self.output_experts.build((*input_shape[:-1], self.mlp_dim))

    def call(self, inputs: Any, training: bool | None = None) -> tuple[Any, Any]:
        coefficients, routing = self.gate(inputs, training=training)
        x = inputs if self.norm is None else self.norm(inputs)
        x = self.hidden_activation(self.hidden(x, coefficients))
        return self.output_experts(x, coefficients), routing

    def compute_output_spec(self, inputs, training=None):
        _, routing = self.gate.compute_output_spec(inputs)
        shape = (*inputs.shape[:-1], self.units or inputs.shape[-1])
        return keras.KerasTensor(shape, self.compute_dtype), routing

    def parameters(self, dim: int) -> int:
        """The number of parameters for inputs of size `dim`."""
        hidden, output = self._both(dim)
        layers = hidden.parameters(dim) + output.parameters(self.mlp_dim)
        return self.gate.parameters(dim) + layers + 2 * dim * self.input_norm

    def active_parameters(self, num_tokens: int, dim: int) -> int:
        """The parameters that one token meets: all."""
        return self.parameters(dim)

    def flops(self, num_tokens: int, dim: int) -> int:
        """Floating-point operations of the matmuls (2 per multiply-add)."""
        hidden, output = self._both(dim)
        multiply_adds = self.gate.parameters(dim)
        multiply_adds += hidden.multiply_adds(dim) + output.multiply_adds(self.mlp_dim)
        return 2 * num_tokens * multiply_adds

    @property
    def router(self) -> ExpertCoefficients:
        """What decides which experts a token gets, as an MoE layer's `router`."""
        return self.gate

    def get_config(self):
        config = super().get_config()
        config.update(
            mlp_dim=self.mlp_dim,
            units=self.units,
            **self._options,
            hidden_activation=activations.serialize(self.hidden_activation),
            input_norm=self.input_norm,
            activation=serialize_activation(self.gate.activation),
            normalization=self.gate.normalization,
        )
        return config


def check_rank(rank: Any, factorization: str | None, levels: int) -> Any:
    """The rank, if it fits the factorisation; sequences as tuples."""
    if factorization is None:
        if rank not in (None, "match_dense"):
            raise ValueError(
                f"Expected no rank for factorization=None; received: rank={rank!r}"
            )
        return "match_dense"
    if rank == "match_dense" and factorization != "tucker":
        return rank
    if factorization == "cp":
        return check_integer("rank", rank)
    if not isinstance(rank, (list, tuple)) or len(rank) != levels + 2:
        raise ValueError(
            f"Expected rank to be {levels + 2} integers for "
            f"factorization={factorization!r} and {levels} levels of experts; "
            f"received: rank={rank!r}"
        )
    return tuple(check_integer("rank", size) for size in rank)


def dense_parameters(shape: tuple[int, int]) -> int:
    """The parameters of a dense layer (inputs, units), which has a bias."""
    return (shape[0] + 1) * shape[1]


def matching_rank(
    factorization: str | None,
    num_experts: tuple[int, ...],
    shapes: list[tuple[int, int]],
    budget: int,
) -> Any:
    """The largest rank whose factors have at most `budget` parameters.

    At least 1, whatever the budget.

    Args:
        factorization: `"cp"` or `"tr"`, whose ranks are then 4, ..., 4, R; or None.
        num_experts: N_1, ..., N_L.
        shapes: (I, O) of each layer that has this rank, a bias's input included.
        budget: parameters of all the factors.

    Returns:
        An int for CP, a tuple for TR, None without a factorisation.

    Reference:
        *Multilinear Mixture of Experts*, appendix F.1: R_1 = R_2 = 4.

    Example:

    >>> from keras_moe.layers.mumoe import matching_rank
    >>> matching_rank("cp", (64,), [(769, 1000)], 769_000)
    419
    """
    if factorization is None:
        return None
    modes = sum(inputs + units for inputs, units in shapes)
    if factorization == "cp":
        return max(budget // (len(shapes) * sum(num_experts) + modes), 1)
    narrow = 4
    fixed = len(shapes) * sum(narrow * count * narrow for count in num_experts)
    last = max((budget - fixed) // (narrow * modes), 1)
    return (*itertools.repeat(narrow, len(num_experts) + 1), last)
