"""An MoE layer's forward and backward pass over that of its bare expert matmuls.

    KERAS_BACKEND=jax python tools/benchmark/moe_layer.py

The whole layer counts: routing, dispatch, experts, combine and auxiliary losses.
`matmuls` are the experts' two batched matmuls alone; `experts` adds their biases
and activation.
"""

import argparse

import keras
import numpy as np
from gradients import forward_backward
from keras import ops
from timing import interleaved, print_ratios

from keras_moe.layers import Experts, MoE
from keras_moe.routers import TokenChoiceRouter


class Matmuls(keras.layers.Layer):
    """The two batched matmuls of `Experts`, and nothing else."""

    def __init__(self, mlp_dim: int):
        super().__init__()
        self.mlp_dim = mlp_dim

    def build(self, shape):
        _, num_experts, _, dim = shape
        self.hidden = self.add_weight(shape=(num_experts, dim, self.mlp_dim))
        self.out = self.add_weight(shape=(num_experts, self.mlp_dim, dim))

    def call(self, x, training=None):
        return ops.matmul(ops.matmul(x[0], self.hidden), self.out)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=3152)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--mlp-dim", type=int, default=1536)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--selected", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--skip-einsum", action="store_true")
    args = parser.parse_args()

    generator = np.random.default_rng(0)

    def normal(*shape):
        return generator.normal(size=shape).astype("float32")

    tokens = normal(1, args.tokens, args.dim)
    cotangent = normal(1, args.tokens, args.dim)
    for selected in args.selected:
        candidates = {}
        for dispatcher in ("index",) if args.skip_einsum else ("index", "einsum"):
            moe = MoE(
                TokenChoiceRouter(args.experts, selected, priority="max_gate", seed=0),
                Experts(args.experts, args.mlp_dim),
                auxiliary_losses={"importance": 0.005, "load": 0.005},
                dispatcher=dispatcher,
            )
            moe.build(tokens.shape)
            candidates[f"MoE, {dispatcher}"] = forward_backward(moe, tokens, cotangent)
        capacity = moe.router.group_capacity(args.tokens, training=True)
        slots = (1, args.experts, capacity, args.dim)
        inputs, slot_cotangent = normal(*slots), normal(*slots)
        for name, layer in (
            ("experts", Experts(args.experts, args.mlp_dim)),
            ("matmuls", Matmuls(args.mlp_dim)),
        ):
            layer.build(slots)
            candidates[name] = forward_backward(layer, inputs, slot_cotangent)
        print_ratios(
            f"{args.tokens} tokens, D={args.dim}, H={args.mlp_dim}, E={args.experts}, "
            f"K={selected}, C={capacity}",
            interleaved(candidates, args.rounds),
            "matmuls",
        )


if __name__ == "__main__":
    main()
