"""A Soft MoE layer's forward and backward pass over that of its bare einsums.

    KERAS_BACKEND=jax python tools/benchmark/soft_layer.py

`einsums` are dispatch, experts and combine with given weights; `einsums and logits`
adds the matmul of tokens and slots from which the weights come.
"""

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from gradients import forward_backward
from keras import ops
from runner import Report, run

from keras_moe.layers import Experts, MoE
from keras_moe.ops import SoftPlan
from keras_moe.routers import SoftRouter


class Einsums(keras.layers.Layer):
    """Dispatch, experts and combine with weights that are parameters."""

    def __init__(self, num_experts: int, num_slots: int, mlp_dim: int, logits: bool):
        super().__init__()
        self.num_slots = num_slots
        self.logits = logits
        self.experts = Experts(num_experts, mlp_dim)

    def build(self, shape):
        num_images, num_tokens, dim = shape
        slots = (self.experts.num_experts, self.num_slots)
        self.weights_in, self.weights_out = (
            self.add_weight(shape=(num_images, num_tokens, *slots)) for _ in range(2)
        )
        if self.logits:
            self.slots = self.add_weight(shape=(dim, slots[0] * slots[1]))
        self.experts.build((num_images, *slots, dim))

    def call(self, tokens, training=None):
        into = ops.convert_to_tensor(self.weights_in)
        if self.logits:
            logits = ops.matmul(tokens, self.slots)
            into = into + ops.reshape(logits, into.shape)
        plan = SoftPlan(into, ops.convert_to_tensor(self.weights_out))
        return plan.combine(self.experts(plan.dispatch(tokens)))


def layers(
    images: int, num_tokens: int, num_experts: int, dim: int = 384, mlp_dim: int = 1536
) -> dict[str, Callable[[], Any]]:
    """Forward and backward passes of Soft MoE's layer and of its bare einsums.

    Args:
        images: number of images.
        num_tokens: tokens of an image, for which there are about as many slots.
        num_experts: E.
        dim: D.
        mlp_dim: H.
    """
    generator = np.random.default_rng(0)
    num_slots = max(round(num_tokens / num_experts), 1)
    shape = (images, num_tokens, dim)
    tokens, cotangent = generator.normal(size=(2, *shape)).astype("float32")
    timed = {}
    for name, layer in {
        "Soft MoE": MoE(
            SoftRouter(num_experts, num_slots), Experts(num_experts, mlp_dim)
        ),
        "einsums and logits": Einsums(num_experts, num_slots, mlp_dim, True),
        "einsums": Einsums(num_experts, num_slots, mlp_dim, False),
    }.items():
        layer.build(shape)
        timed[name] = forward_backward(layer, tokens, cotangent)
    return timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[49, 196])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--mlp-dim", type=int, default=1536)


def measure(args: argparse.Namespace, report: Report) -> None:
    for num_tokens in args.tokens:
        sizes = (args.images, num_tokens, args.experts, args.dim, args.mlp_dim)
        report.compare(
            f"{args.images} x {num_tokens} tokens, D={args.dim}, H={args.mlp_dim}, "
            f"E={args.experts}",
            layers(*sizes),
            "einsums",
        )


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=15)
