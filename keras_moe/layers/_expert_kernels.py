"""Per-expert kernels: initialisation, LoRA, int8 quantisation and saving.

Axes: E experts, D hidden, H mlp, X inputs and Y outputs of a kernel, R rank.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe._backends import host_memory
from keras_moe._checks import check_integer
from keras_moe._compat import stored_dataset, unlocked
from keras_moe.layers._layer import Layer
from keras_moe.ops._initializers import PerExpert


def assign_stored(variable: keras.Variable, store: Mapping[str, Any], key: str) -> None:
    """Assigns a stored array to a weight with as few copies as possible."""
    dataset = stored_dataset(store, key)
    if not _is_like(dataset, variable):
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
        dataset is not None
        and dataset.size > 0
        and tuple(dataset.shape) == tuple(variable.shape)
        and dataset.dtype.isnative
        and dataset.dtype.name == variable.dtype
        and keras.distribution.distribution() is None
    )


class ExpertKernels(Layer):
    """Base class of layers with a separate linear map per expert.

    Subclasses define `linear_names`, `use_bias`, `lora_rank` and `weight_shapes`. The
    map "hidden" has the weights `hidden_kernel` (E, X, Y) and `hidden_bias` (E, Y).

    LoRA and quantisation live here and not in sublayers, because `Model.quantize` skips
    layers that contain layers.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.lora_enabled = False

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Names of the linear maps, in the order in which they are saved."""
        raise NotImplementedError

    def add_kernels(self, dim: int, kernel_initializer: Any, bias_initializer: Any):
        """Adds kernels and biases, and LoRA weights if `lora_rank` is set."""
        self._dim = dim
        if self.quantization_mode is not None:
            _check_mode(self.quantization_mode)
            self._add_int8_kernels()
        else:
            for name, shape in self._kernel_shapes().items():
                self._add(name, shape, kernel_initializer)
        for name, shape in self.weight_shapes((None, dim)).items():
            if name.endswith("_bias"):
                self._add(name, shape, bias_initializer)
        # `enable_lora` requires a built layer.
        self.built = True
        if self.lora_rank is not None:
            self.enable_lora(self.lora_rank, self.lora_alpha)

    def _add(self, name, shape, initializer, **options):
        weight = self.add_weight(
            name=name, shape=shape, initializer=initializer, **options
        )
        setattr(self, name, weight)

    def linear(self, name: str, x: Any, matmul: Callable, by_row: Callable) -> Any:
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
        a_initializer: Any = "he_uniform",
        b_initializer: Any = "zeros",
    ) -> None:
        """Freezes all weights and adds a low-rank update to each kernel."""
        a_initializer = PerExpert(a_initializer)
        rank = check_integer("rank", rank)
        if not self.built or self.lora_enabled:
            raise ValueError(
                "Expected a built layer, on which enable_lora was not called before; "
                f"received: built={self.built}, lora_enabled={self.lora_enabled}"
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

    def quantize(self, mode: str, type_check: bool = True, config: Any = None) -> None:
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
                f"Expected the {len(names)} weights {', '.join(names)} of "
                f"{type(self).__name__} with "
                f"quantization_mode={self.quantization_mode!r}; received: "
                f"{len(store.keys())} weights"
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
