"""Layers and models without a capacity, over all that they are compared with.

    KERAS_BACKEND=jax python tools/benchmark/dropless.py

A dropless layer runs beside the layer whose capacity is that of V-MoE, and beside its
bare experts on as many rows; MoE++'s layer beside one of the same FFN experts alone,
at inference and in training, where both have a capacity; V-MoE-S/32 on one image
beside its dense twin, whose matmuls of activated weights are the same. The last table
is the time in which the models compile.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gradients import forward_backward
from runner import Report, run

from keras_moe import routers
from keras_moe.layers import Experts, MoE, MoEConfig
from keras_moe.models import VARIANTS, ViTBackbone
from keras_moe.ops import expert_types
from tools.benchmark import execution


def _timed(layers, training):
    """Functions that run each layer forward, or forward and backward."""
    generator = np.random.default_rng(0)

    def normal(shape):
        return generator.normal(size=shape).astype("float32")

    candidates = {}
    for name, (layer, shape) in layers.items():
        layer.build(shape)
        inputs = normal(shape)
        if training:
            candidates[name] = forward_backward(layer, inputs, normal(shape))
        else:
            candidates[name] = execution.forward(layer, inputs, training=False)
    return candidates


def layers(
    num_tokens: int,
    dim: int,
    mlp_dim: int,
    num_experts: int,
    selected: int = 2,
    training: bool = False,
) -> dict[str, Callable[[], Any]]:
    """A dropless layer, the layer with a capacity of 1.05, and the bare experts."""
    tokens = (1, num_tokens, dim)

    def layer(**options):
        router = routers.TokenChoiceRouter(num_experts, selected, seed=0, **options)
        return MoE(router, Experts(num_experts, mlp_dim)), tokens

    capacity = num_tokens * selected // num_experts
    limited = {"capacity_factor": 1.05, "eval_capacity_factor": 1.05}
    return _timed(
        {
            "dropless": layer(dropless=True),
            "capacity": layer(**limited, evaluation="official"),
            "experts": (
                Experts(num_experts, mlp_dim),
                (1, num_experts, capacity, dim),
            ),
        },
        training,
    )


def moe_plus_plus(
    num_tokens: int,
    dim: int,
    mlp_dim: int,
    num_experts: int,
    selected: int = 2,
    training: bool = False,
    tau: float = 0.75,
) -> dict[str, Callable[[], Any]]:
    """MoE++ with one zero, one copy and two constant experts, and FFN experts alone.

    At inference the router's tokens decide how many rows FFN experts have: random ones
    choose every expert equally often.
    """
    layers = {}
    # A vision transformer's MoE++ has no noise, and queues in the tokens' order.
    options = {"num_selected_experts": selected, "capacity_factor": 1.1, "seed": 0}
    options |= {"noise_std": 0.0, "priority": "first_come"}
    for name, counts, more in (
        ("MoE++", (1, 1, 2), {"tau": tau}),
        ("vanilla", (0, 0, 0), {}),
    ):
        router = routers.get(
            "softmax_token_choice",
            expert_types(num_experts, *counts),
            **options,
            **more,
        )
        moe = MoE(router, Experts(num_experts, mlp_dim))
        layers[name] = (moe, (1, num_tokens, dim))
    return _timed(layers, training)


def vision_transformers(
    images: int = 1, num_experts: int = 8, selected: int = 1
) -> dict[str, Callable[[], Any]]:
    """V-MoE-S/32 and a dense model with as many matmuls of a token, at inference.

    With more than one expert for each token the MLPs of the dense model are wider, all
    by the same factor.
    """
    sizes = VARIANTS["vit/S"].config() | {"patch_size": 32}
    moe = MoEConfig(
        moe_layers="last_2",
        num_experts=num_experts,
        router={"name": "softmax_token_choice", "num_selected_experts": selected},
    )
    blocks = sizes["num_layers"]
    width = sizes["mlp_dim"] * (blocks + 2 * (selected - 1)) // blocks
    pixels = np.random.default_rng(0).normal(size=(images, 224, 224, 3))
    return {
        name: execution.forward(
            ViTBackbone(**sizes | options), pixels.astype("float32"), training=False
        )
        for name, options in {
            "V-MoE": {"moe": moe},
            "dense": {"mlp_dim": width},
        }.items()
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=3152)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--mlp-dim", type=int, default=1536)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--selected", type=int, default=2)
    parser.add_argument("--images", type=int, nargs="+", default=[1, 16])
    parser.add_argument(
        "--tables", nargs="+", choices=TABLES, default=list(TABLES), help="all"
    )


def measure(args: argparse.Namespace, report: Report) -> None:
    sizes = {
        "num_tokens": args.tokens,
        "dim": args.dim,
        "mlp_dim": args.mlp_dim,
        "num_experts": args.experts,
        "selected": args.selected,
    }
    title = ", ".join(f"{name}={value}" for name, value in sizes.items())
    for table, (make, baseline) in TABLES.items():
        if table not in args.tables:
            continue
        if make is vision_transformers:
            for images in args.images:
                candidates = make(images, args.experts)
                _compile(report, images, candidates)
                report.compare(f"{table}, images={images}", candidates, baseline)
            continue
        for training in (False, True):
            mode = "training" if training else "inference"
            report.compare(
                f"{table}, {mode}: {title}",
                make(**sizes, training=training),
                baseline,
            )


def _compile(report, images, candidates):
    """Adds a table of the seconds of each model's first run."""
    rows = []
    for name, run_once in candidates.items():
        start = time.perf_counter()
        execution.wait(run_once())
        rows.append({"model": name, "first run s": time.perf_counter() - start})
    report.table(f"compilation, images={images}", rows, {"first run s": ".1f"})


# Tables by name: the function that makes their candidates, and the baseline.
TABLES = {
    "dropless": (layers, "capacity"),
    "moe++": (moe_plus_plus, "vanilla"),
    "vit": (vision_transformers, "dense"),
}

if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
