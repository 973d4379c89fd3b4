"""Memory of a training step with and without `rematerialize`.

    python tools/benchmark/rematerialization.py

On JAX, what the forward pass keeps for the backward pass besides the weights, as
JAX's differentiation tells without computing anything. With `--compile`, also the
temporary memory and the operations of the compiled step, by the compiler's own account.
XLA orders a CPU's operations without regard for memory, and the first of the two may
not fall there: compile on an accelerator.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import argparse

import jax
import numpy as np
from runner import Report, run

from keras_moe.models import ViTBackbone

MIB = 2**20
MODELS = {
    "ViT": {"moe_layers": None},
    "V-MoE": {"moe_layers": "every_2"},
    "V-MoE, dropless": {"moe_layers": "every_2", "dropless": True},
    "Soft MoE": {"moe_layers": "last_2", "router": "soft"},
}


def memory_of(
    rematerialize: bool, kwargs: dict, args: argparse.Namespace
) -> tuple[float, float, float]:
    """Bytes kept, and the compiled step's bytes and operations or NaNs."""
    backbone = ViTBackbone.from_config(
        {
            "image_shape": (args.size, args.size, 3),
            "patch_size": 16,
            "hidden_dim": args.dim,
            "num_layers": args.layers,
            "num_heads": args.dim // 64,
            "mlp_dim": 4 * args.dim,
            "num_experts": args.experts,
            "rematerialize": rematerialize,
            "seed": 0,
            **kwargs,
        }
    )

    def loss(trainable, state, images):
        outputs, state, losses = backbone.stateless_call(
            trainable, state, images, training=True, return_losses=True
        )
        return (outputs * outputs).mean() + sum(losses), state

    shape = (args.batch_size, args.size, args.size, 3)
    inputs = (
        [v.value for v in backbone.trainable_variables],
        [v.value for v in backbone.non_trainable_variables],
        jax.ShapeDtypeStruct(shape, np.float32),
    )
    # The function that `vjp` returns carries what it needs as the leaves of a tree.
    kept = jax.eval_shape(
        lambda weights, *rest: jax.vjp(
            lambda weights: loss(weights, *rest), weights, has_aux=True
        )[1],
        *inputs,
    )
    kept = num_bytes(kept) - num_bytes(inputs[0])
    if not args.compile:
        return kept, np.nan, np.nan
    compiled = jax.jit(jax.grad(loss, has_aux=True)).lower(*inputs).compile()
    operations = compiled.cost_analysis().get("flops", np.nan)
    return kept, compiled.memory_analysis().temp_size_in_bytes, operations


def num_bytes(tree) -> int:
    """The size of all arrays in a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--compile", action="store_true")


def measure(args: argparse.Namespace, report: Report) -> None:
    rows = []
    for name, kwargs in MODELS.items():
        plain, again = (memory_of(x, kwargs, args) for x in (False, True))
        row = {
            "model": name,
            "kept MiB": plain[0] / MIB,
            "rematerialized MiB": again[0] / MIB,
            "ratio": again[0] / plain[0],
        }
        if args.compile:
            row |= {
                "compiled MiB": plain[1] / MIB,
                "compiled, rematerialized MiB": again[1] / MIB,
                "operations, ratio": again[2] / plain[2],
            }
        rows.append(row)
    formats = {name: ".2f" if "ratio" in name else ".0f" for name in rows[0]}
    report.table(
        f"{args.batch_size} images of {args.size} px, patch 16, D={args.dim}, "
        f"{args.layers} blocks, E={args.experts}, forward and backward",
        rows,
        {**formats, "model": ""},
    )


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=0)
