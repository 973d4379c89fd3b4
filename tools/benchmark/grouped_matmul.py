"""Two grouped matmuls' forward and backward pass over that of batched matmuls.

    KERAS_BACKEND=jax python tools/benchmark/grouped_matmul.py

Every expert is two kernels with a GELU between them, as in a vision transformer.
`batched` gives each expert exactly its share of the rows, which is the least that a
layer without spare capacity could cost; `balanced` draws an expert for each row;
`skewed` sends one expert four times its share.
"""

import argparse

import keras
import numpy as np
from gradients import forward_backward
from keras import ops
from runner import Report, run

from keras_moe.ops.grouped import grouped_matmul


class Chain(keras.layers.Layer):
    """Two kernels per expert, on rows in groups, or in equal batches without sizes."""

    def __init__(self, num_experts: int, mlp_dim: int, group_sizes=None):
        super().__init__()
        self.num_experts = num_experts
        self.mlp_dim = mlp_dim
        self.group_sizes = group_sizes

    def build(self, shape):
        kernel = (self.num_experts, shape[-1], self.mlp_dim)
        self.hidden = self.add_weight(shape=kernel)
        self.out = self.add_weight(shape=(kernel[0], kernel[2], kernel[1]))
        if self.group_sizes is not None:
            # A variable, for a constant would let a compiler know the sizes.
            self.sizes = self.add_weight(
                shape=(self.num_experts,), dtype="int32", trainable=False
            )
            self.sizes.assign(self.group_sizes)

    def _multiply(self, x, kernels):
        if self.group_sizes is not None:
            return grouped_matmul(x, kernels, self.sizes)
        num_rows, dim = x.shape
        batches = (self.num_experts, num_rows // self.num_experts, dim)
        return ops.reshape(ops.matmul(ops.reshape(x, batches), kernels), (num_rows, -1))

    def call(self, x, training=None):
        return self._multiply(ops.gelu(self._multiply(x, self.hidden)), self.out)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[3152, 12544])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--mlp-dim", type=int, default=1536)


def measure(args: argparse.Namespace, report: Report) -> None:
    generator = np.random.default_rng(0)
    for num_rows, num_experts in zip(args.rows, args.experts, strict=True):
        inputs, cotangent = generator.normal(size=(2, num_rows, args.dim)).astype(
            "float32"
        )
        shares = np.full(num_experts, 1 / num_experts)
        skewed = np.full(num_experts, (1 - 4 / num_experts) / (num_experts - 1))
        skewed[num_experts // 3] = 4 / num_experts
        candidates = {}
        for name, sizes in {
            "batched": None,
            "balanced": generator.multinomial(num_rows, shares),
            "skewed": generator.multinomial(num_rows, skewed),
        }.items():
            layer = Chain(num_experts, args.mlp_dim, sizes)
            layer.build(inputs.shape)
            candidates[name] = forward_backward(layer, inputs, cotangent)
        report.compare(
            f"{num_rows} rows, D={args.dim}, H={args.mlp_dim}, E={num_experts}",
            candidates,
            "batched",
        )


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=15)
