"""E expert MLPs, each of whose layers is one batched matmul.

Axes: G groups, E experts, C capacity, R rows, D hidden, H mlp.
"""

from typing import Any

import keras
from keras import ops

from keras_moe._checks import (
    check_bool,
    check_dropout,
    check_integer,
    check_seed,
    fits_shape,
)
from keras_moe.layers import activations
from keras_moe.layers._expert_kernels import ExpertKernels
from keras_moe.ops._initializers import PerExpert
from keras_moe.ops.cost import Cost
from keras_moe.ops.grouped import grouped_matmul, grouped_mlp, row_experts


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


@keras.saving.register_keras_serializable("keras_moe")
class Experts(ExpertKernels):
    """E expert MLPs with separate weights.

    `enable_lora` adds a low-rank update to each expert's kernels. `quantize("int8")`
    stores kernels as int8 with a scale per expert and output channel.

    Args:
        num_experts: E.
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
        inputs: slots (G, E, C, D), or rows (R, D) sorted by expert.
        group_sizes: int32 (E,), rows per expert, the rest is padding; None for slots.
        training: whether dropout applies.

    Output shape: Same as `inputs`.

    Reference: *Routers in Vision Mixture of Experts*, equation 1; *GLU Variants Improve
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
        self.activation = activations.get(activation)
        self.num_experts = check_integer("num_experts", num_experts)
        self.mlp_dim = check_integer("mlp_dim", mlp_dim)
        self.dropout = check_dropout("dropout", dropout)
        self.shared_initialization = check_bool(
            "shared_initialization", shared_initialization
        )
        self.gated = check_bool("gated", gated)
        self.use_bias = check_bool("use_bias", use_bias)
        self.seed = check_seed("seed", seed)
        self.lora_rank = check_integer("lora_rank", lora_rank, optional=True)
        self.lora_alpha = lora_alpha
        # Not a Dropout layer: `Model.quantize` skips layers that contain layers.
        self.seed_generator = None
        if dropout > 0:
            self.seed_generator = keras.random.SeedGenerator(seed)

    def build(self, input_shape):
        small = keras.initializers.RandomNormal(stddev=1e-6)
        self.add_kernels(
            input_shape[-1],
            PerExpert("glorot_uniform", self.shared_initialization),
            PerExpert(small, self.shared_initialization),
        )

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Names of each expert's linear maps."""
        return ("hidden", "output", "gate") if self.gated else ("hidden", "output")

    def call(
        self, inputs: Any, group_sizes: Any = None, training: bool | None = None
    ) -> Any:
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
        expected = (None, number, None, None) if group_sizes is None else (None, None)
        if not fits_shape(shape, expected):
            raise ValueError(
                f"Expected inputs (groups, {number}, capacity, dim), or (rows, dim) of "
                f"group_sizes; received: inputs.shape={shape}"
            )

    def _call_rows(self, rows, group_sizes, training):
        drops = training and self.seed_generator is not None
        # An activation layer's weights would get no gradient from `grouped_mlp`.
        has_weights = isinstance(self.activation, keras.layers.Layer)
        is_int8 = self.quantization_mode is not None
        if not (drops or has_weights or is_int8 or self.lora_enabled):
            parts = {
                f"{name}_{part}": getattr(self, f"{name}_{part}")
                for name in self.linear_names
                for part in ("kernel", "bias")[: 1 + self.use_bias]
            }
            return grouped_mlp(rows, group_sizes, activation=self.activation, **parts)
        owner = row_experts(group_sizes, ops.shape(rows)[0])

        def matmul(x, kernels):
            return grouped_matmul(x, ops.convert_to_tensor(kernels), group_sizes)

        return self._mlp(
            rows, matmul, lambda weight: ops.take(weight, owner, axis=0), training
        )

    def _mlp(self, x, matmul, by_row, training):
        hidden = self.linear("hidden", x, matmul, by_row)
        if self.gated:
            gate = self.linear("gate", x, matmul, by_row)
            hidden = self.activation(gate) * hidden
        else:
            hidden = self.activation(hidden)
        hidden = self._drop(hidden, training)
        x = self.linear("output", hidden, matmul, by_row)
        return self._drop(x, training)

    def _drop(self, x, training):
        if not training or self.seed_generator is None:
            return x
        return keras.random.dropout(x, self.dropout, seed=self.seed_generator)

    def compute_output_spec(self, inputs, group_sizes=None, training=None):
        self._check(inputs, group_sizes)
        return keras.KerasTensor(inputs.shape, self.compute_dtype)

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        _, dim = shape
        sizes = dict.fromkeys(self.linear_names, (dim, self.mlp_dim))
        sizes["output"] = (self.mlp_dim, dim)
        shapes = {}
        for name, (inputs, outputs) in sizes.items():
            shapes[f"{name}_kernel"] = (self.num_experts, inputs, outputs)
            if self.use_bias:
                shapes[f"{name}_bias"] = (self.num_experts, outputs)
        return shapes

    def cost(self, shape: tuple[int, int]) -> Cost:
        num_rows, dim = shape
        weights = Cost.all_active(self.weight_shapes(shape))
        return Cost(
            weights.parameters,
            weights.parameters // self.num_experts,
            2 * len(self.linear_names) * num_rows * dim * self.mlp_dim,
        )
