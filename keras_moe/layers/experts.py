"""The experts: E two-layer MLPs, each one batched matmul.

Axes: G groups, E experts, C capacity, R rows, D hidden, H mlp.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.layers import activations
from keras_moe.layers.initializers import PerExpert
from keras_moe.layers.mlp import check_dropout
from keras_moe.ops.checks import check_integer
from keras_moe.ops.grouped_matmul import grouped_matmul


@keras.saving.register_keras_serializable("keras_moe")
class Experts(keras.layers.Layer):
    """E MLPs side by side, each with its own slots or rows.

    With slots, every expert has as many, and each of the two layers is one batched
    matmul. With rows, sorted by expert, each expert has as many as `group_sizes` says,
    and each layer is one grouped matmul.

    Args:
        num_experts: E.
        mlp_dim: H.
        activation: `"gelu_tanh"` (the JAX models'), or any that Keras knows.
        dropout: after each of the two layers (V-MoE's expert dropout).
        shared_initialization: start all experts from the same values, as V-MoE does.
        seed: of the dropout.
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
        *Routers in Vision Mixture of Experts*, equation 1.

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
        seed: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_experts = check_integer("num_experts", num_experts)
        self.mlp_dim = check_integer("mlp_dim", mlp_dim)
        self.activation = activations.get(activation)
        self.dropout = check_dropout("dropout", dropout)
        self.shared_initialization = shared_initialization
        self.seed = seed
        self.dropout_layer = keras.layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy, name="dropout"
        )

    def build(self, input_shape):
        has_rows = len(input_shape) == 2
        has_slots = len(input_shape) == 4 and input_shape[1] == self.num_experts
        if not has_rows and not has_slots:
            raise ValueError(
                f"Expected inputs (groups, num_experts={self.num_experts}, capacity, "
                f"dim) or (rows, dim); received: shape={tuple(input_shape)}"
            )
        dim = input_shape[-1]
        kernel = PerExpert("glorot_uniform", self.shared_initialization)
        bias = PerExpert(
            keras.initializers.RandomNormal(stddev=1e-6), self.shared_initialization
        )
        sizes = (self.num_experts, dim, self.mlp_dim)
        self.hidden_kernel = self.add_weight(
            name="hidden_kernel", shape=sizes, initializer=kernel
        )
        self.hidden_bias = self.add_weight(
            name="hidden_bias", shape=(self.num_experts, self.mlp_dim), initializer=bias
        )
        self.output_kernel = self.add_weight(
            name="output_kernel",
            shape=(self.num_experts, self.mlp_dim, dim),
            initializer=kernel,
        )
        self.output_bias = self.add_weight(
            name="output_bias", shape=(self.num_experts, dim), initializer=bias
        )

    def call(
        self, inputs: Any, group_sizes: Any = None, training: bool | None = None
    ) -> Any:
        if group_sizes is not None:
            return self._call_rows(inputs, group_sizes, training)
        num_groups, num_experts, capacity, dim = ops.shape(inputs)
        # One matmul per layer and expert over the slots of all groups.
        x = ops.transpose(inputs, (1, 0, 2, 3))
        x = ops.reshape(x, (num_experts, num_groups * capacity, dim))
        x = ops.matmul(x, self.hidden_kernel) + self.hidden_bias[:, None]
        x = self.dropout_layer(self.activation(x), training=training)
        x = ops.matmul(x, self.output_kernel) + self.output_bias[:, None]
        x = self.dropout_layer(x, training=training)
        x = ops.reshape(x, (num_experts, num_groups, capacity, dim))
        return ops.transpose(x, (1, 0, 2, 3))

    def _call_rows(self, rows, group_sizes, training):
        ends = ops.cumsum(group_sizes)
        place = ops.arange(ops.shape(rows)[0], dtype="int32")
        owner = ops.searchsorted(ends, place, side="right")
        owner = ops.minimum(owner, self.num_experts - 1)
        x = grouped_matmul(rows, ops.convert_to_tensor(self.hidden_kernel), group_sizes)
        x = x + ops.take(self.hidden_bias, owner, axis=0)
        x = self.dropout_layer(self.activation(x), training=training)
        x = grouped_matmul(x, ops.convert_to_tensor(self.output_kernel), group_sizes)
        x = x + ops.take(self.output_bias, owner, axis=0)
        return self.dropout_layer(x, training=training)

    def compute_output_spec(self, inputs, group_sizes=None, training=None):
        return keras.KerasTensor(inputs.shape, self.compute_dtype)

    def parameters(self, dim: int) -> int:
        """The number of parameters of all experts for tokens of size `dim`."""
        return self.num_experts * self.expert_parameters(dim)

    def expert_parameters(self, dim: int) -> int:
        """The number of parameters of one expert."""
        return 2 * dim * self.mlp_dim + self.mlp_dim + dim

    def flops(self, num_tokens: int, dim: int) -> int:
        """Floating-point operations of `num_tokens` slots (2 per multiply-add)."""
        return 4 * num_tokens * dim * self.mlp_dim

    def get_config(self):
        config = super().get_config()
        config.update(
            num_experts=self.num_experts,
            mlp_dim=self.mlp_dim,
            activation=activations.serialize(self.activation),
            dropout=self.dropout,
            shared_initialization=self.shared_initialization,
            seed=self.seed,
        )
        return config
