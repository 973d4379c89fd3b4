"""Peak memory of an MoE layer's routing, beyond its tokens and expert buffers.

    python tools/benchmark/routing_memory.py

On JAX, from the compiler's own account of the compiled forward and backward pass. The
experts are the identity, so that routing, dispatch and combine are left.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import argparse

import jax
import keras
import numpy as np
from runner import Report, run

from keras_moe.layers import MoE
from keras_moe.routers import TokenChoiceRouter

MIB = 2**20


class Identity(keras.layers.Layer):
    """Experts that return their inputs."""

    def __init__(self, num_experts: int):
        super().__init__()
        self.num_experts = num_experts

    def build(self, shape):
        pass

    def call(self, inputs, group_sizes=None, training=None):
        return inputs


def temporary_bytes(dispatcher: str, args: argparse.Namespace) -> tuple[int, int]:
    """The compiled step's temporary memory, and the size of one expert buffer."""
    dropless = dispatcher == "dropless"
    moe = MoE(
        TokenChoiceRouter(
            args.experts, args.selected, dropless=dropless, priority="max_gate", seed=0
        ),
        Identity(args.experts),
        auxiliary_losses={"importance": 0.005, "load": 0.005},
        dispatcher="index" if dropless else dispatcher,
    )
    shape = (1, args.tokens, args.dim)
    moe.build(shape)

    def loss(trainable, state, tokens, cotangent):
        (outputs, _), state, losses = moe.stateless_call(
            trainable, state, tokens, training=True, return_losses=True
        )
        return (outputs * cotangent).sum() + sum(losses), (outputs, state)

    compiled = (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))
        .lower(
            [v.value for v in moe.trainable_variables],
            [v.value for v in moe.non_trainable_variables],
            *[jax.ShapeDtypeStruct(shape, np.float32)] * 2,
        )
        .compile()
    )
    num_slots = args.tokens * args.selected  # rows, if there is no capacity
    if not dropless:
        num_slots = args.experts * moe.router.group_capacity(args.tokens, True)
    buffer = num_slots * args.dim * 4
    return compiled.memory_analysis().temp_size_in_bytes, buffer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=12544)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--selected", type=int, default=2)


def measure(args: argparse.Namespace, report: Report) -> None:
    tokens = args.tokens * args.dim * 4
    rows = []
    for dispatcher in ("index", "einsum", "dropless"):
        temporary, buffer = temporary_bytes(dispatcher, args)
        # Any implementation holds at once in the backward pass: the experts' inputs or
        # outputs, their gradient, and one copy of the tokens.
        routing = temporary - 2 * buffer - tokens
        rows.append(
            {
                "dispatcher": dispatcher,
                "temporary MiB": temporary / MIB,
                "two buffers MiB": 2 * buffer / MIB,
                "tokens MiB": tokens / MIB,
                "routing MiB": routing / MIB,
            }
        )
    formats = dict.fromkeys(rows[0], ".1f")
    report.table(
        f"{args.tokens} tokens, D={args.dim}, E={args.experts}, K={args.selected}, "
        "forward and backward",
        rows,
        {**formats, "dispatcher": ""},
    )


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=0)
