"""The experts: E MLPs, whose layers are one batched matmul each.

Axes: G groups, E experts, C capacity, R rows, D hidden, H mlp.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe.checks import check_bool, check_dropout, check_integer, check_seed
from keras_moe.layers import activations
from keras_moe.layers.activation_layout import with_layout
from keras_moe.layers.initializers import PerExpert
from keras_moe.ops.grouped_matmul import grouped_matmul


@keras.saving.register_keras_serializable("keras_moe")
class Experts(keras.layers.Layer):
    """E MLPs side by side, each with its own slots or rows.

    With slots, every expert has as many, and each of the two layers is one batched
    matmul. With rows, sorted by expert, each expert has as many as `group_sizes` says,
    and each layer is one grouped matmul.

    `enable_lora` adds a low-rank pair to each expert's kernels. `quantize("int8")`
    stores the kernels as int8 with a scale per expert and output channel, and leaves
    the tokens as they are: with few tokens per expert, it is the weights' memory
    traffic that costs.

    Args:
        num_experts: E.
        mlp_dim: H.
        activation: `"gelu_tanh"` (the JAX models'), or any that Keras knows.
        dropout: after each of the two layers (V-MoE's expert dropout).
        shared_initialization: start all experts from the same values, as V-MoE does.
        gated: multiply the activation of a second hidden layer into the first, as
            SwiGLU does with `activation="silu"`: `output(activation(gate(x)) *
            hidden(x))`.
        use_bias: give the layers biases; SwiGLU experts mostly have none.
        seed: of the dropout.
        lora_rank: None, or the rank for `enable_lora` at build time.
        lora_alpha: see `enable_lora`.
        **kwargs: see `keras.layers.Layer`.

    Call arguments:
        inputs: (G, E, C, D); or (R, D), sorted by expert.
        group_sizes: None; or int32 (E,), each expert's number of rows. Rows beyond
            their sum belong to nobody.
        training: whether dropout applies.

    Output shape:
        That of the inputs.

    Raises:
        ValueError: if an argument is out of range, or the input has another number
            of experts.

    Reference:
        *Routers in Vision Mixture of Experts*, equation 1; *GLU Variants Improve
        Transformer*, for gated experts.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import Experts
    >>> experts = Experts(num_experts=4, mlp_dim=16)
    >>> tuple(experts(np.ones((1, 4, 3, 8), "float32")).shape)
    (1, 4, 3, 8)
    """

    def __init__(
        self,
        num_experts: int,
        mlp_dim: int,
        activation: Any = "gelu_tanh",
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
        self.num_experts = check_integer("num_experts", num_experts)
        self.mlp_dim = check_integer("mlp_dim", mlp_dim)
        self.activation = activations.get(activation)
        self.dropout = check_dropout("dropout", dropout)
        self.shared_initialization = check_bool(
            "shared_initialization", shared_initialization
        )
        self.gated = check_bool("gated", gated)
        self.use_bias = check_bool("use_bias", use_bias)
        self.seed = check_seed("seed", seed)
        if lora_rank is not None:
            lora_rank = check_integer("lora_rank", lora_rank)
        self.lora_rank = lora_rank
        self.lora_alpha = lora_alpha
        self.lora_enabled = False
        # No layers inside: `Model.quantize` passes by those that have some.
        self.seed_generator = None
        if dropout > 0:
            self.seed_generator = keras.random.SeedGenerator(seed)

    def build(self, input_shape):
        has_rows = len(input_shape) == 2
        has_slots = len(input_shape) == 4 and input_shape[1] == self.num_experts
        if not has_rows and not has_slots:
            raise ValueError(
                f"Expected inputs (groups, num_experts={self.num_experts}, capacity, "
                f"dim) or (rows, dim); received: shape={tuple(input_shape)}"
            )
        dim = input_shape[-1]
        if self.quantization_mode is not None:
            self._check_mode(self.quantization_mode)
            self._add_int8_kernels(dim)
        else:
            kernel = PerExpert("glorot_uniform", self.shared_initialization)
            for name, shape in self._kernel_shapes(dim).items():
                kernel_weight = self.add_weight(
                    name=name, shape=shape, initializer=kernel
                )
                setattr(self, name, kernel_weight)
        bias = PerExpert(
            keras.initializers.RandomNormal(stddev=1e-6), self.shared_initialization
        )
        if self.use_bias:
            for layer in self._layer_names:
                name, size = f"{layer}_bias", dim if layer == "output" else self.mlp_dim
                bias_weight = self.add_weight(
                    name=name, shape=(self.num_experts, size), initializer=bias
                )
                setattr(self, name, bias_weight)
        self._dim = dim
        # `enable_lora` is for built layers.
        self.built = True
        if self.lora_rank is not None:
            self.enable_lora(self.lora_rank, self.lora_alpha)

    @property
    def _layer_names(self):
        return ("hidden", "output", "gate") if self.gated else ("hidden", "output")

    @property
    def _weight_names(self):
        """The weights in the order in which they are saved."""
        parts = ("kernel", "bias") if self.use_bias else ("kernel",)
        return [f"{layer}_{part}" for layer in self._layer_names for part in parts]

    def _kernel_shapes(self, dim):
        inner = (self.num_experts, dim, self.mlp_dim)
        shapes = {"hidden": inner, "output": (self.num_experts, self.mlp_dim, dim)}
        shapes["gate"] = inner
        return {f"{layer}_kernel": shapes[layer] for layer in self._layer_names}

    def call(
        self, inputs: Any, group_sizes: Any = None, training: bool | None = None
    ) -> Any:
        if group_sizes is not None:
            return self._call_rows(inputs, group_sizes, training)
        num_groups, num_experts, capacity, dim = ops.shape(inputs)
        # From the tokens' devices to the experts'. Both ends are fixed, here and below,
        # or tokens or kernels would be gathered, forward or for the gradient.
        x = with_layout(inputs, f"{self.path}/slots/dispatched")
        x = with_layout(x, f"{self.path}/slots/input")
        # One matmul per layer and expert over the slots of all groups.
        x = ops.transpose(x, (1, 0, 2, 3))
        x = ops.reshape(x, (num_experts, num_groups * capacity, dim))
        x = self._mlp(
            x, ops.matmul, lambda weight: ops.expand_dims(weight, 1), training
        )
        x = ops.reshape(x, (num_experts, num_groups, capacity, dim))
        x = ops.transpose(x, (1, 0, 2, 3))
        x = with_layout(x, f"{self.path}/slots/output")
        return with_layout(x, f"{self.path}/slots/returned")

    def _call_rows(self, rows, group_sizes, training):
        ends = ops.cumsum(group_sizes)
        place = ops.arange(ops.shape(rows)[0], dtype="int32")
        owner = ops.searchsorted(ends, place, side="right")
        owner = ops.minimum(owner, self.num_experts - 1)

        def times(x, kernels):
            return grouped_matmul(x, ops.convert_to_tensor(kernels), group_sizes)

        return self._mlp(
            rows, times, lambda weight: ops.take(weight, owner, axis=0), training
        )

    def _mlp(self, x, times, of_expert, training):
        """The layers on x, sorted by expert.

        Args:
            x: (E, G C, D) or (R, D).
            times: multiplies x by each expert's kernel.
            of_expert: (E, X) to the shape of x, each expert's where its rows are.
            training: whether dropout applies.
        """
        hidden = self._linear("hidden", x, times, of_expert)
        if self.gated:
            gate = self._linear("gate", x, times, of_expert)
            hidden = self.activation(gate) * hidden
        else:
            hidden = self.activation(hidden)
        hidden = self._drop(hidden, training)
        x = self._linear("output", hidden, times, of_expert)
        return self._drop(x, training)

    def _linear(self, layer, x, times, of_expert):
        kernel = getattr(self, f"{layer}_kernel")
        if self.quantization_mode is None:
            outputs = times(x, kernel)
        else:
            # Whole numbers up to 127 are exact in every float type.
            outputs = times(x, ops.cast(kernel, x.dtype))
            scale = of_expert(getattr(self, f"{layer}_scale"))
            outputs = ops.cast(ops.divide(outputs, scale), x.dtype)
        if self.lora_enabled:
            a, b = self._lora_pair(layer)
            change = times(times(x, ops.cast(a, x.dtype)), ops.cast(b, x.dtype))
            outputs = outputs + self._lora_scaling * change
        if self.use_bias:
            outputs = outputs + of_expert(getattr(self, f"{layer}_bias"))
        return outputs

    def _drop(self, x, training):
        if not training or self.seed_generator is None:
            return x
        return keras.random.dropout(x, self.dropout, seed=self.seed_generator)

    # Low-rank adaptation

    def enable_lora(
        self,
        rank: int,
        lora_alpha: float | None = None,
        a_initializer: Any = "he_uniform",
        b_initializer: Any = "zeros",
    ) -> None:
        """Freezes all weights, and adds a low-rank pair to each expert's kernels.

        Each kernel W of an expert becomes W + (lora_alpha / rank) A B with an A and a B
        of its own. `save_weights`, `save` and presets store the sum, so that what is
        loaded has no pairs any more, or, where they are enabled already, pairs that
        change nothing yet.

        Args:
            rank: of A B.
            lora_alpha: None takes `rank`.
            a_initializer: of one expert's A.
            b_initializer: of one expert's B; zeros leave the outputs as they were.

        Raises:
            ValueError: if the layer is not built, or it has its pairs already.
        """
        rank = check_integer("rank", rank)
        if not self.built or self.lora_enabled:
            raise ValueError(
                "Expected a built layer, on which enable_lora was not called before; "
                f"received: built={self.built}, lora_enabled={self.lora_enabled}"
            )
        self._tracker.unlock()
        shapes_of_kernels = self._kernel_shapes(self._dim)
        for name, (num_experts, inputs, outputs) in shapes_of_kernels.items():
            layer = name.removesuffix("_kernel")
            shapes = {
                "a": (num_experts, inputs, rank),
                "b": (num_experts, rank, outputs),
            }
            for part, initializer in (("a", a_initializer), ("b", b_initializer)):
                pair_weight = self.add_weight(
                    name=f"{layer}_lora_{part}",
                    shape=shapes[part],
                    initializer=PerExpert(initializer),
                    # As Keras does: small changes would be lost in half precision.
                    dtype="float32",
                )
                setattr(self, f"{layer}_lora_{part}", pair_weight)
        for name in self._weight_names:
            getattr(self, name).trainable = False
        self._tracker.lock()
        self.lora_enabled = True
        self.lora_rank = rank
        self.lora_alpha = lora_alpha

    @property
    def _lora_scaling(self):
        return 1.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank

    def _lora_pair(self, layer):
        return getattr(self, f"{layer}_lora_a"), getattr(self, f"{layer}_lora_b")

    def expert_slices(self, expert: int) -> list[tuple[Any, tuple]]:
        """Parts of variables whose being zero makes an expert's outputs zero.

        Args:
            expert: the expert.

        Returns:
            A list of a variable and an index into it.
        """
        names = ["output_kernel"]
        names += ["output_bias"] * self.use_bias + ["output_lora_b"] * self.lora_enabled
        return [(getattr(self, name), (expert,)) for name in names]

    # Quantisation

    @staticmethod
    def _check_mode(mode):
        if mode != "int8":
            # `Model.quantize` warns of it and goes on.
            raise NotImplementedError(
                f"Expected mode='int8' for Experts; received: mode={mode!r}"
            )

    def quantize(self, mode: str, type_check: bool = True, config: Any = None) -> None:
        """Stores the kernels as int8, with a float32 scale per output channel.

        Args:
            mode: `"int8"`.
            type_check: for `Model.quantize`.
            config: None, or a `keras.quantizers.Int8QuantizationConfig`, whose
                `weight_quantizer` is applied to each expert's kernel. Tokens are not
                quantised, whatever its `activation_quantizer` is.

        Raises:
            NotImplementedError: if `mode` is another one.
        """
        self._check_mode(mode)
        quantizer = getattr(config, "weight_quantizer", None)
        if quantizer is None:
            quantizer = keras.quantizers.AbsMaxQuantizer(axis=0)
        values = {}
        for layer in self._layer_names:
            kernel = ops.convert_to_numpy(
                ops.cast(getattr(self, f"{layer}_kernel"), "float32")
            )
            values.update(_int8(layer, kernel, quantizer))
            delattr(self, f"{layer}_kernel")
        self._add_int8_kernels(self._dim)
        for name, value in values.items():
            getattr(self, name).assign(value)
        policy = self.dtype_policy
        if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
            policy = policy[self.path]
        if policy.quantization_mode is None:
            self.dtype_policy = keras.dtype_policies.get(f"{mode}_from_{policy.name}")

    def _add_int8_kernels(self, dim):
        for name, (num_experts, inputs, outputs) in self._kernel_shapes(dim).items():
            layer = name.removesuffix("_kernel")
            self._add_frozen(name, (num_experts, inputs, outputs), "zeros", "int8")
            self._add_frozen(
                f"{layer}_scale", (num_experts, outputs), "ones", "float32"
            )
        self._is_quantized = True

    def _add_frozen(self, name, shape, initializer, dtype):
        frozen = self.add_weight(
            name=name,
            shape=shape,
            initializer=initializer,
            dtype=dtype,
            autocast=False,
            trainable=False,
        )
        setattr(self, name, frozen)

    def _int8_call(self, inputs, group_sizes=None, training=None):
        return self.call(inputs, group_sizes, training)

    # Saving

    def save_own_variables(self, store):
        values = {name: getattr(self, name) for name in self._saved_weights()}
        if self.lora_enabled:
            for layer in self._layer_names:
                values.update(self._merged(layer))
        for index, value in enumerate(values.values()):
            store[str(index)] = value

    def load_own_variables(self, store):
        names = self._saved_weights()
        if len(store.keys()) != len(names):
            raise ValueError(
                f"Expected the {len(names)} weights {', '.join(names)} of Experts with "
                f"quantization_mode={self.quantization_mode!r}; received: "
                f"{len(store.keys())} weights"
            )
        for index, name in enumerate(names):
            getattr(self, name).assign(store[str(index)])
        if self.lora_enabled:
            # What is stored has the pairs in it.
            for layer in self._layer_names:
                _, b = self._lora_pair(layer)
                b.assign(ops.zeros(b.shape))

    def _saved_weights(self):
        scales = [f"{layer}_scale" for layer in self._layer_names]
        return self._weight_names + (scales if self.quantization_mode else [])

    def _merged(self, layer):
        """The kernel with its low-rank pairs in it, as it is stored."""
        name = f"{layer}_kernel"
        kernel = getattr(self, name)
        value = ops.convert_to_numpy(ops.cast(kernel, "float32"))
        if self.quantization_mode is not None:
            scale = ops.convert_to_numpy(getattr(self, f"{layer}_scale"))
            value = value / scale[:, None]
        a, b = (ops.convert_to_numpy(part) for part in self._lora_pair(layer))
        value = value + self._lora_scaling * np.matmul(a, b)
        if self.quantization_mode is not None:
            return _int8(layer, value, keras.quantizers.AbsMaxQuantizer(axis=0))
        return {name: ops.cast(value, kernel.dtype)}

    def compute_output_spec(self, inputs, group_sizes=None, training=None):
        return keras.KerasTensor(inputs.shape, self.compute_dtype)

    def parameters(self, dim: int) -> int:
        """The number of parameters of all experts for tokens of size `dim`."""
        return self.num_experts * self.expert_parameters(dim)

    def expert_parameters(self, dim: int) -> int:
        """The number of parameters of one expert."""
        num_layers = len(self._layer_names)
        biases = (num_layers - 1) * self.mlp_dim + dim if self.use_bias else 0
        return num_layers * dim * self.mlp_dim + biases

    def flops(self, num_tokens: int, dim: int) -> int:
        """Floating-point operations of `num_tokens` slots (2 per multiply-add)."""
        return 2 * len(self._layer_names) * num_tokens * dim * self.mlp_dim

    def get_config(self):
        config = super().get_config()
        config.update(
            num_experts=self.num_experts,
            mlp_dim=self.mlp_dim,
            activation=activations.serialize(self.activation),
            dropout=self.dropout,
            shared_initialization=self.shared_initialization,
            gated=self.gated,
            use_bias=self.use_bias,
            seed=self.seed,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
        )
        return config


def _int8(layer, kernel, quantizer):
    """A float32 kernel (E, X, Y) as int8, and its scales (E, Y)."""
    values, scales = [], []
    for matrix in kernel:
        value, scale = quantizer(matrix, to_numpy=True)
        values.append(ops.convert_to_numpy(value))
        # A scale may be one for the whole matrix.
        scales.append(np.broadcast_to(scale, (1, matrix.shape[1]))[0])
    return {f"{layer}_kernel": np.stack(values), f"{layer}_scale": np.stack(scales)}
