"""An MoE layer's forward and backward pass, by router, over that of its bare experts.

    KERAS_BACKEND=jax python tools/benchmark/moe_layer.py

The whole layer counts: routing, dispatch, experts, combine and auxiliary losses.
`experts` are the experts alone on as many slots; `matmuls` are their two batched
matmuls without bias and activation. On a GPU, at ViT-L's sizes:

    KERAS_BACKEND=jax python tools/benchmark/moe_layer.py --tokens 65536 --dim 1024 \\
        --mlp-dim 4096 --experts 32 --dtype mixed_bfloat16
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from gradients import forward_backward
from keras import ops
from runner import Report, run

from keras_moe import routers
from keras_moe.layers import Experts, MoE
from keras_moe.ops import expert_capacity


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


def moe_layers(names, also, num_experts, selected, mlp_dim, factor) -> dict:
    """MoE layers by name; all but dropless have the same number of slots."""
    losses = {"importance": 0.005, "load": 0.005}
    candidates = {}
    for name in names:
        cls, _ = routers.ROUTERS[name]
        if cls is routers.TokenChoiceRouter:
            options = {"num_selected_experts": selected, "capacity_factor": factor}
            options["priority"] = "max_gate"
        else:
            options = {"capacity_factor": factor * selected}
        candidates[name] = (
            routers.get(name, num_experts, seed=0, **options),
            losses if name == "softmax_token_choice" else None,
            "index",
        )
    if "dropless" in also:
        router = routers.TokenChoiceRouter(num_experts, selected, dropless=True, seed=0)
        candidates["dropless"] = (router, losses, "index")
    if "einsum" in also:
        router = routers.TokenChoiceRouter(
            num_experts, selected, capacity_factor=factor, priority="max_gate", seed=0
        )
        candidates["einsum dispatch"] = (router, losses, "einsum")
    return {
        name: MoE(
            router,
            Experts(num_experts, mlp_dim),
            auxiliary_losses=losses,
            dispatcher=dispatcher,
        )
        for name, (router, losses, dispatcher) in candidates.items()
    }


def layers(
    names: list[str],
    also: list[str],
    num_tokens: int,
    num_experts: int,
    selected: int,
    dim: int = 384,
    mlp_dim: int = 1536,
    factor: float = 1.05,
) -> dict[str, Callable[[], Any]]:
    """Forward and backward passes of MoE layers, of their experts and their matmuls.

    Args:
        names: names of the layers' routers.
        also: names among `"dropless"` and `"einsum"`.
        num_tokens: tokens, in one group.
        num_experts: E.
        selected: K.
        dim: D.
        mlp_dim: H.
        factor: c of the capacity C = S K c / E.
    """
    generator = np.random.default_rng(0)

    def normal(*shape):
        return generator.normal(size=shape).astype("float32")

    tokens, cotangent = normal(1, num_tokens, dim), normal(1, num_tokens, dim)
    timed = {}
    made = moe_layers(names, also, num_experts, selected, mlp_dim, factor)
    for name, layer in made.items():
        layer.build(tokens.shape)
        timed[name] = forward_backward(layer, tokens, cotangent)
    capacity = expert_capacity(num_tokens, num_experts, factor, selected)
    slots = (1, num_experts, capacity, dim)
    inputs, slot_cotangent = normal(*slots), normal(*slots)
    for name, layer in (
        ("experts", Experts(num_experts, mlp_dim)),
        ("matmuls", Matmuls(mlp_dim)),
    ):
        layer.build(slots)
        timed[name] = forward_backward(layer, inputs, slot_cotangent)
    return timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[3152, 12544])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--selected", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--mlp-dim", type=int, default=1536)
    parser.add_argument("--capacity-factor", type=float, default=1.05)
    sparse = [name for name in routers.ROUTERS if name != "soft"]
    parser.add_argument("--routers", nargs="+", choices=sparse, default=sparse)
    parser.add_argument(
        "--also", nargs="*", choices=("dropless", "einsum"), default=["dropless"]
    )
    parser.add_argument("--dtype", default="float32", help="such as mixed_bfloat16")


def measure(args: argparse.Namespace, report: Report) -> None:
    keras.config.set_dtype_policy(args.dtype)

    sizes = itertools.product(args.tokens, args.experts, args.selected)
    for num_tokens, num_experts, selected in sizes:
        timed = layers(
            args.routers,
            args.also,
            num_tokens,
            num_experts,
            selected,
            args.dim,
            args.mlp_dim,
            args.capacity_factor,
        )
        capacity = expert_capacity(
            num_tokens, num_experts, args.capacity_factor, selected
        )
        # A backward pass has twice the matmuls of a forward pass.
        flops = 3 * 4 * num_tokens * selected * args.dim * args.mlp_dim
        report.compare(
            f"{num_tokens} tokens, D={args.dim}, H={args.mlp_dim}, E={num_experts}, "
            f"K={selected}, C={capacity}",
            timed,
            "experts",
            TFLOP=flops / 1e12,
        )


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
