"""Routers alone, forward and backward, over softmax token choice.

    KERAS_BACKEND=jax python tools/benchmark/router.py

The work is a router's whole plan (its tables and its weights) and the gradients of the
tokens and of the router's kernel; experts, dispatch and combine are not in it. Routers
by images take as many tokens, one group for each image.
"""

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from gradients import forward_backward
from keras import ops
from runner import Report, run

from keras_moe import routers

BASELINE = "softmax_token_choice"
PEERS = [name for name in routers.ROUTERS if name != BASELINE]


class Planned(keras.layers.Layer):
    """A router whose output is its plan as one vector, so that no field is dropped."""

    def __init__(self, router: routers.Router, num_images: int):
        super().__init__()
        self.router = router
        self.num_groups = num_images if router.groups_per_example(True) else 1

    def build(self, shape):
        self.router.build((self.num_groups, shape[0] // self.num_groups, shape[1]))

    def call(self, tokens, training=None):
        groups = ops.reshape(tokens, (self.num_groups, -1, tokens.shape[-1]))
        plan, _ = self.router(groups, training=training)
        fields = [ops.cast(field, "float32") for field in plan]
        return ops.concatenate([ops.reshape(field, (-1,)) for field in fields])


def routers_alone(
    names: list[str],
    images: int = 16,
    tokens: int = 196,
    experts: int = 32,
    dim: int = 384,
) -> dict[str, Callable[[], Any]]:
    """The forward and backward passes of routers, softmax token choice first.

    Args:
        names: names of routers.
        images: number of images.
        tokens: tokens of an image.
        experts: E.
        dim: D.
    """
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(images * tokens, dim)).astype("float32")
    candidates = {}
    for name in (BASELINE, *names):
        router = routers.get(name, experts, capacity_factor=1.05, seed=0)
        layer = Planned(router, images)
        layer.build(inputs.shape)
        shape = layer(inputs, training=True).shape
        cotangent = generator.normal(size=shape).astype("float32")
        candidates[name] = forward_backward(layer, inputs, cotangent)
    return candidates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=196, help="of one image")
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--routers", nargs="+", choices=PEERS, default=PEERS)


def measure(args: argparse.Namespace, report: Report) -> None:
    for experts in args.experts:
        candidates = routers_alone(
            args.routers, args.images, args.tokens, experts, args.dim
        )
        title = f"{args.images} x {args.tokens} tokens, D={args.dim}, E={experts}"
        report.compare(title, candidates, BASELINE)


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
