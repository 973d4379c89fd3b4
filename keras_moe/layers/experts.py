"""E expert MLPs, each of whose layers is one batched matmul, and MoE++'s experts.

Axes: G groups, E experts, C capacity, D hidden, H mlp, X inputs and Y outputs of a
kernel, R rows, or the rank of a low-rank update, B batch, N tokens, J constant experts,
Z zero-computation experts.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe import _checks
from keras_moe._backends import host_memory
from keras_moe._compat import stored_dataset, unlocked
from keras_moe._types import Activation, Initializer, Tensor
from keras_moe.layers import activations
from keras_moe.layers._layer import Layer
from keras_moe.ops import grouped
from keras_moe.ops._initializers import PerExpert
from keras_moe.ops._primitives import on_several_devices
from keras_moe.ops._row_blocks import in_blocks
from keras_moe.ops.cost import Cost
from keras_moe.ops.expert_types import expert_types


def with_layout(x: Any, path: str) -> Any:
    """Applies the distribution's layout for `path` to `x` if it divides evenly."""
    distribution = keras.distribution.distribution()
    layout = None if distribution is None else distribution.get_tensor_layout(path)
    if layout is None:
        return x
    mesh = layout.device_mesh
    sizes = {None: 1, **dict(zip(mesh.axis_names, mesh.shape))}
    if any(size % sizes[axis] for size, axis in zip(x.shape, layout.axes)):
        return x
    return keras.distribution.distribute_tensor(x, layout)


def by_device(plan: Any, experts: Any, training: bool | None) -> Any:
    """A plan without a capacity in blocks of rows if experts take each device's."""
    split = experts.row_split(training) if isinstance(experts, Experts) else None
    return plan if split is None else in_blocks(plan, split.num_blocks)


@keras.saving.register_keras_serializable("keras_moe")
class Experts(Layer):
    """E expert MLPs with separate weights.

    `enable_lora` adds a low-rank update to each expert's kernels. `quantize("int8")`
    stores kernels as int8 with a scale per expert and output channel.

    Args:
        num_experts: number E of experts.
        mlp_dim: H, hidden size of each expert.
        activation: `"gelu_tanh"` as in the JAX models, or any Keras activation.
        dropout: dropout rate after each layer (V-MoE's expert dropout).
        shared_initialization: whether all experts start equal, as in V-MoE.
        gated: whether experts are `output(activation(gate(x)) * hidden(x))`.
        use_bias: whether the layers have biases.
        seed: seed of the dropout.
        lora_rank: rank for `enable_lora` at build time, or None.
        lora_alpha: low-rank updates are scaled by `lora_alpha / lora_rank`; None for 1.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: slots (G, E, C, D), or rows (R, D) sorted by expert; on several devices
            those of each, (P, R, D).
        group_sizes: int32 (E,), rows per expert, the rest is padding, or (P, E); None
            for slots.
        training: whether dropout applies.

    Reference: *Routers in Vision Mixture of Experts*, equation 1; *GLU Variants Improve
    Transformer*, for gated experts.

    Example:

    >>> from keras_moe.layers import Experts
    >>> experts = Experts(num_experts=4, mlp_dim=16)
    >>> tuple(experts(np.ones((1, 4, 3, 8), "float32")).shape)
    (1, 4, 3, 8)
    """

    def __init__(
        self,
        num_experts: int,
        mlp_dim: int,
        activation: Activation = "gelu_tanh",
        dropout: float = 0.0,
        shared_initialization: bool = True,
        gated: bool = False,
        use_bias: bool = True,
        seed: int | None = None,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.activation = activations.get(activation)
        self.num_experts = _checks.check_integer("num_experts", num_experts)
        self.mlp_dim = _checks.check_integer("mlp_dim", mlp_dim)
        self.dropout = _checks.check_dropout("dropout", dropout)
        self.shared_initialization = _checks.check_bool(
            "shared_initialization", shared_initialization
        )
        self.gated = _checks.check_bool("gated", gated)
        self.use_bias = _checks.check_bool("use_bias", use_bias)
        self.seed = _checks.check_seed("seed", seed)
        self.lora_rank = _checks.check_integer("lora_rank", lora_rank, optional=True)
        self.lora_alpha = lora_alpha
        self.lora_enabled = False
        # Not a Dropout layer: `Model.quantize` skips layers that contain layers.
        self.seed_generator = None
        if dropout > 0:
            self.seed_generator = keras.random.SeedGenerator(seed)

    def build(self, input_shape):
        self._dim = input_shape[-1]
        if self.quantization_mode is not None:
            _check_mode(self.quantization_mode)
            self._add_int8_kernels()
        else:
            glorot = PerExpert("glorot_uniform", self.shared_initialization)
            for name, shape in self._kernel_shapes().items():
                self._add(name, shape, glorot)
        small = keras.initializers.RandomNormal(stddev=1e-6)
        small = PerExpert(small, self.shared_initialization)
        for name, shape in self.weight_shapes((None, self._dim)).items():
            if name.endswith("_bias"):
                self._add(name, shape, small)
        # `enable_lora` requires a built layer.
        self.built = True
        if self.lora_rank is not None:
            self.enable_lora(self.lora_rank, self.lora_alpha)

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Names of each expert's linear maps."""
        return ("hidden", "output", "gate") if self.gated else ("hidden", "output")

    def call(
        self,
        inputs: Tensor,
        group_sizes: Tensor | None = None,
        training: bool | None = None,
    ) -> Tensor:
        self._check(inputs, group_sizes)
        if group_sizes is not None:
            return self._call_rows(inputs, group_sizes, training)
        num_groups, num_experts, capacity, dim = ops.shape(inputs)
        # All-to-all from the tokens' devices to the experts'. Both layouts are fixed,
        # here and below, or the forward or backward pass would gather all tokens.
        x = with_layout(inputs, f"{self.path}/slots/dispatched")
        x = with_layout(x, f"{self.path}/slots/input")
        # One batched matmul per linear map, over the slots of all groups.
        x = ops.transpose(x, (1, 0, 2, 3))
        x = ops.reshape(x, (num_experts, num_groups * capacity, dim))
        x = self._mlp(
            x, ops.matmul, lambda weight: ops.expand_dims(weight, 1), training
        )
        x = ops.reshape(x, (num_experts, num_groups, capacity, dim))
        x = ops.transpose(x, (1, 0, 2, 3))
        x = with_layout(x, f"{self.path}/slots/output")
        return with_layout(x, f"{self.path}/slots/returned")

    def _check(self, inputs, group_sizes):
        shape, number = tuple(inputs.shape), self.num_experts
        expected = (None, number, None, None)
        if group_sizes is not None:
            expected = (None,) * (1 + len(group_sizes.shape))
        if not _checks.fits_shape(shape, expected):
            raise ValueError(
                f"Expected inputs (groups, {number}, capacity, dim), or (rows, dim) of "
                f"group_sizes; received: inputs.shape={shape}"
            )

    def row_split(self, training: bool | None) -> Any:
        """How rows and experts are split over devices; None where all run all rows."""
        distribution = keras.distribution.distribution()
        if distribution is None or not on_several_devices():
            return None
        if not self.is_plain(training):
            return None
        return grouped.split_of(distribution.get_variable_layout(self.hidden_kernel))

    def is_plain(self, training: bool | None) -> bool:
        """Whether rows take no more than matmuls, biases and the activation."""
        drops = training and self.seed_generator is not None
        # An activation layer's weights would get no gradient from `grouped_mlp`.
        has_weights = isinstance(self.activation, keras.layers.Layer)
        is_int8 = self.quantization_mode is not None
        return not (drops or has_weights or is_int8 or self.lora_enabled)

    def _call_rows(self, rows, group_sizes, training):
        if self.is_plain(training):
            parts = {name: getattr(self, name) for name in self._weight_names}
            if len(rows.shape) == 2:
                options = {"activation": self.activation, **parts}
                return grouped.grouped_mlp(rows, group_sizes, **options)
            split = self.row_split(training)
            return grouped.grouped_mlp_on_devices(
                rows, group_sizes, split, self.activation, parts
            )
        owner = grouped.row_experts(group_sizes, ops.shape(rows)[0])

        def matmul(x, kernels):
            return grouped.grouped_matmul(
                x, ops.convert_to_tensor(kernels), group_sizes
            )

        return self._mlp(
            rows, matmul, lambda weight: ops.take(weight, owner, axis=0), training
        )

    def _mlp(self, x, matmul, by_row, training):
        hidden = self._linear("hidden", x, matmul, by_row)
        if self.gated:
            gate = self._linear("gate", x, matmul, by_row)
            hidden = self.activation(gate) * hidden
        else:
            hidden = self.activation(hidden)
        hidden = self._drop(hidden, training)
        x = self._linear("output", hidden, matmul, by_row)
        return self._drop(x, training)

    def _drop(self, x, training):
        if not training or self.seed_generator is None:
            return x
        return keras.random.dropout(x, self.dropout, seed=self.seed_generator)

    def compute_output_spec(self, inputs, group_sizes=None, training=None):
        self._check(inputs, group_sizes)
        return keras.KerasTensor(inputs.shape, self.compute_dtype)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        _, dim = shape
        sizes = dict.fromkeys(self.linear_names, (dim, self.mlp_dim))
        sizes["output"] = (self.mlp_dim, dim)
        shapes = {}
        for name, (inputs, outputs) in sizes.items():
            shapes[f"{name}_kernel"] = (self.num_experts, inputs, outputs)
            if self.use_bias:
                shapes[f"{name}_bias"] = (self.num_experts, outputs)
        return shapes

    def cost(self, shape: tuple) -> Cost:
        num_rows, dim = shape
        weights = Cost.all_active(self.weight_shapes(shape))
        return Cost(
            weights.parameters,
            weights.parameters // self.num_experts,
            2 * len(self.linear_names) * num_rows * dim * self.mlp_dim,
        )

    def _add(self, name, shape, initializer, **options):
        weight = self.add_weight(
            name=name, shape=shape, initializer=initializer, **options
        )
        setattr(self, name, weight)

    def _linear(
        self, name: str, x: Tensor, matmul: Callable, by_row: Callable
    ) -> Tensor:
        """Applies one linear map of every expert."""
        kernel = getattr(self, f"{name}_kernel")
        if self.quantization_mode is None:
            outputs = matmul(x, kernel)
        else:
            # int8 values are exact in every float type.
            outputs = matmul(x, ops.cast(kernel, x.dtype))
            scale = by_row(getattr(self, f"{name}_scale"))
            outputs = ops.cast(ops.divide(outputs, scale), x.dtype)
        if self.lora_enabled:
            a, b = self._lora_pair(name)
            change = matmul(matmul(x, ops.cast(a, x.dtype)), ops.cast(b, x.dtype))
            outputs = outputs + self._lora_scaling * change
        if self.use_bias:
            outputs = outputs + by_row(getattr(self, f"{name}_bias"))
        return outputs

    def _kernel_shapes(self):
        shapes = self.weight_shapes((None, self._dim))
        return {name: shapes[name] for name in shapes if name.endswith("_kernel")}

    # Low-rank adaptation

    def enable_lora(
        self,
        rank: int,
        lora_alpha: float | None = None,
        a_initializer: Initializer = "he_uniform",
        b_initializer: Initializer = "zeros",
    ) -> None:
        """Freezes all weights and adds a low-rank update to each kernel."""
        a_initializer = PerExpert(a_initializer)
        rank = _checks.check_integer("rank", rank)
        if not self.built or self.lora_enabled:
            expected = "a built layer, on which enable_lora was not called before"
            raise _checks.unfit(
                expected, built=self.built, lora_enabled=self.lora_enabled
            )
        # float32, as in Keras: half precision would lose small updates.
        with unlocked(self):
            for kernel, (num_experts, inputs, outputs) in self._kernel_shapes().items():
                name = kernel.removesuffix("_kernel")
                a, b = (num_experts, inputs, rank), (num_experts, rank, outputs)
                self._add(f"{name}_lora_a", a, a_initializer, dtype="float32")
                self._add(f"{name}_lora_b", b, b_initializer, dtype="float32")
        for name in self._weight_names:
            getattr(self, name).trainable = False
        self.lora_enabled = True
        self.lora_rank = rank
        self.lora_alpha = lora_alpha

    @property
    def _lora_scaling(self):
        return 1.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank

    def _lora_pair(self, name):
        return getattr(self, f"{name}_lora_a"), getattr(self, f"{name}_lora_b")

    # Quantisation

    def quantize(
        self, mode: str, type_check: bool = True, config: object = None
    ) -> None:
        """Stores the kernels as int8, with a float32 scale per output channel."""
        _check_mode(mode)
        quantizer = getattr(config, "weight_quantizer", None)
        if quantizer is None:
            quantizer = keras.quantizers.AbsMaxQuantizer(axis=0)
        values = {}
        for name in self.linear_names:
            kernel = getattr(self, f"{name}_kernel")
            kernel = ops.convert_to_numpy(ops.cast(kernel, "float32"))
            values.update(_int8(name, kernel, quantizer))
            delattr(self, f"{name}_kernel")
        self._add_int8_kernels()
        for name, value in values.items():
            getattr(self, name).assign(value)
        policy = self.dtype_policy
        if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
            policy = policy[self.path]
        if policy.quantization_mode is None:
            self.dtype_policy = keras.dtype_policies.get(f"{mode}_from_{policy.name}")

    def _add_int8_kernels(self):
        frozen = {"autocast": False, "trainable": False}
        for kernel, shape in self._kernel_shapes().items():
            scale = kernel.replace("_kernel", "_scale")
            self._add(kernel, shape, "zeros", dtype="int8", **frozen)
            self._add(scale, (shape[0], shape[2]), "ones", dtype="float32", **frozen)
        self._is_quantized = True

    def quantized_call(self, *args, **kwargs):
        return self.call(*args, **kwargs)

    # Saving

    @property
    def _weight_names(self):
        """Names of the weights, in the order in which they are saved."""
        parts = ("kernel", "bias") if self.use_bias else ("kernel",)
        return [f"{name}_{part}" for name in self.linear_names for part in parts]

    def _saved_weights(self):
        scales = [f"{name}_scale" for name in self.linear_names]
        return self._weight_names + (scales if self.quantization_mode else [])

    def save_own_variables(self, store):
        values = {name: getattr(self, name) for name in self._saved_weights()}
        if self.lora_enabled:
            for name in self.linear_names:
                values.update(self._merged(name))
        for index, value in enumerate(values.values()):
            store[str(index)] = value

    def load_own_variables(self, store):
        names = self._saved_weights()
        if len(store.keys()) != len(names):
            raise ValueError(
                f"Expected the weights {names} for quantization_mode="
                f"{self.quantization_mode!r}; received: {len(store.keys())} weights"
            )
        for index, name in enumerate(names):
            assign_stored(getattr(self, name), store, str(index))
        if self.lora_enabled:
            # The low-rank updates are already merged into the stored kernels.
            for name in self.linear_names:
                _, b = self._lora_pair(name)
                b.assign(ops.zeros(b.shape))

    def _merged(self, name):
        """The kernel with its low-rank update merged, as it is saved."""
        kernel = getattr(self, f"{name}_kernel")
        value = ops.convert_to_numpy(ops.cast(kernel, "float32"))
        if self.quantization_mode is not None:
            scale = ops.convert_to_numpy(getattr(self, f"{name}_scale"))
            value = value / scale[:, None]
        a, b = (ops.convert_to_numpy(part) for part in self._lora_pair(name))
        value = value + self._lora_scaling * np.matmul(a, b)
        if self.quantization_mode is not None:
            return _int8(name, value, keras.quantizers.AbsMaxQuantizer(axis=0))
        return {f"{name}_kernel": ops.cast(value, kernel.dtype)}


def assign_stored(variable: keras.Variable, store: Mapping[str, Any], key: str) -> None:
    """Assigns a stored array to a weight with as few copies as possible."""
    dataset = stored_dataset(store, key)
    if dataset is None or not _is_like(dataset, variable):
        variable.assign(store[key])
        return
    memory = host_memory.memory_of(variable)
    if memory is not None:
        dataset.read_direct(memory)
        return
    values = host_memory.zeros(dataset.shape, dataset.dtype)
    dataset.read_direct(values)
    variable.assign(host_memory.to_tensor(values))


def _is_like(dataset, variable):
    """Whether the stored bytes can be read straight into the weight."""
    return (
        dataset.size > 0
        and tuple(dataset.shape) == tuple(variable.shape)
        and dataset.dtype.isnative
        and dataset.dtype.name == variable.dtype
        and keras.distribution.distribution() is None
    )


def _check_mode(mode):
    if mode != "int8":
        # With this exception `Model.quantize` only warns and skips the layer.
        raise NotImplementedError(
            f"Expected mode='int8' for Experts; received: mode={mode!r}"
        )


def _int8(name, kernel, quantizer):
    """Quantises a float32 kernel (E, X, Y) to int8 and scales (E, Y)."""
    values, scales = [], []
    for matrix in kernel:
        value, scale = quantizer(matrix, to_numpy=True)
        values.append(ops.convert_to_numpy(value))
        # A scale may be one for the whole matrix.
        scales.append(np.broadcast_to(scale, (1, matrix.shape[1]))[0])
    return {f"{name}_kernel": np.stack(values), f"{name}_scale": np.stack(scales)}


@keras.saving.register_keras_serializable("keras_moe")
class ZeroComputationExperts(Layer):
    """Weighted sum of zero, copy and constant experts, computed in place.

    A zero expert returns 0, a copy expert the token x, and a constant expert `a_1 x +
    a_2 v` with a trained vector v and `[a_1, a_2] = softmax(W_c x)`. Their sum is one
    factor of x and one of each v, so no slots or buffers are needed.

    Args:
        zero_experts: number of zero experts.
        copy_experts: number of copy experts.
        constant_experts: J, number of constant experts.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        weights: float32 (B, N, Z), in the order zero, copy, constant.

    Reference: *MoE++*, equations 3 to 5.

    Example:

    >>> from keras_moe.layers import ZeroComputationExperts
    >>> experts = ZeroComputationExperts(zero_experts=1, copy_experts=1)
    >>> weights = np.array([[[0.0, 0.5], [1.0, 0.0]]], "float32")
    >>> np.array(experts(np.ones((1, 2, 1), "float32"), weights)).ravel().tolist()
    [0.5, 0.0]
    """

    def __init__(
        self,
        zero_experts: int = 0,
        copy_experts: int = 0,
        constant_experts: int = 0,
        **kwargs,
    ):
        # The weights stay float32, like all routing.
        super().__init__(autocast=False, **kwargs)
        types = expert_types(1, zero_experts, copy_experts, constant_experts)
        _, self.zero_experts, self.copy_experts, self.constant_experts = types

    @property
    def num_experts(self) -> int:
        """Z."""
        return self.zero_experts + self.copy_experts + self.constant_experts

    def build(self, tokens_shape, weights_shape=None):
        shapes = self.weight_shapes(tokens_shape[-2:])
        if shapes:
            self.kernel = self.add_weight(
                name="kernel",
                shape=shapes["kernel"],
                initializer=PerExpert("lecun_normal"),
            )
            self.vector = self.add_weight(
                name="vector",
                shape=shapes["vector"],
                # As in the released code.
                initializer=keras.initializers.RandomNormal(stddev=1.0),
            )

    def call(self, tokens: Tensor, weights: Tensor) -> Tensor:
        if weights.shape[-1] != self.num_experts:
            expected = f"weights of num_experts={self.num_experts}"
            raise _checks.unfit(expected, f"weights.shape={tuple(weights.shape)}")
        tokens = ops.cast(tokens, self.compute_dtype)
        first = self.zero_experts
        copied = weights[..., first : first + self.copy_experts]
        token_weight = ops.sum(copied, axis=-1, keepdims=True)
        if not self.constant_experts:
            return ops.cast(token_weight, self.compute_dtype) * tokens
        weights = weights[..., first + self.copy_experts :]
        # softmax([p, q]) = [sigmoid(p - q), 1 - sigmoid(p - q)]: one column, not two.
        # The difference is taken in full precision, since the common part cancels.
        kernel = ops.transpose(self.kernel[..., 0] - self.kernel[..., 1])
        kernel = ops.cast(kernel, self.compute_dtype)
        kept = ops.sigmoid(ops.cast(ops.matmul(tokens, kernel), "float32"))
        token_weight = token_weight + ops.sum(weights * kept, axis=-1, keepdims=True)
        vector_weights = ops.cast(weights * (1.0 - kept), self.compute_dtype)
        vector = ops.cast(self.vector, self.compute_dtype)
        token_weight = ops.cast(token_weight, self.compute_dtype)
        return token_weight * tokens + ops.matmul(vector_weights, vector)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        _, dim = shape
        if not self.constant_experts:
            return {}
        return {
            "kernel": (self.constant_experts, dim, 2),
            "vector": (self.constant_experts, dim),
        }

    def cost(self, shape: tuple) -> Cost:
        num_assignments, dim = shape
        share = self.constant_experts / self.num_experts
        weights = Cost.all_active(self.weight_shapes(shape))
        return Cost(
            weights.parameters,
            round(weights.parameters / self.num_experts),
            round(6 * num_assignments * dim * share),
        )
