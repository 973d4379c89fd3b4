"""Layers of MoE++ and their vanilla twin, with balanced loads, and their times."""

import argparse

import keras
import numpy as np
from gradients import forward
from timing import interleaved

from keras_moe.layers import Experts, MoE
from keras_moe.ops import ExpertKinds
from keras_moe.routers import of_kinds

# Whether the layer trains.
FORMS = {"limited": True, "every token": False}
WITHOUT = "without zero-computation"


def layer_for(kinds: ExpertKinds, tau: float, shape: tuple, args) -> MoE:
    """A built MoE layer of these experts."""
    options = {} if not kinds.zero_computation else {"tau": tau}
    router = of_kinds(
        "softmax_token_choice",
        kinds,
        num_selected_experts=args.selected,
        capacity_factor=args.gamma,
        noise_std=0.0,
        **options,
    )
    experts = Experts(
        kinds.ffn, args.mlp_dim, gated=args.gated, use_bias=not args.gated
    )
    moe = MoE(router, experts)
    moe.build(shape)
    return moe


def shift_by_kind(moe: MoE, tau: float) -> None:
    """Lowers the FFN experts' logits until they get equation 8's share.

    The tokens' last feature is 1, so that its row of the kernel is a bias.
    """
    kinds = moe.router.kinds
    kernel = np.array(moe.router.kernel)
    kernel[-1] = 0.0
    if kinds.zero_computation:
        # Of random logits the largest K of E; found by bisection on other tokens.
        generator = np.random.default_rng(1)
        logits = generator.normal(size=(8192, kinds.total)) * np.linalg.norm(
            kernel, axis=0
        )
        wanted = tau * kinds.ffn / (tau * kinds.ffn + kinds.zero_computation)
        low, high = -20.0, 20.0
        for _ in range(40):
            shift = (low + high) / 2
            moved = logits + np.where(np.arange(kinds.total) < kinds.ffn, shift, 0)
            chosen = np.argsort(-moved, axis=-1)[:, : moe.router.num_selected_experts]
            low, high = (
                (shift, high) if (chosen < kinds.ffn).mean() < wanted else (low, shift)
            )
        kernel[-1, : kinds.ffn] = shift
    moe.router.kernel.assign(kernel)


def measure(
    kinds: ExpertKinds, taus: list[float], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Median seconds of the forward pass, by form and by layer."""
    tokens = np.random.default_rng(0).normal(size=(1, args.tokens, args.dim))
    tokens = tokens.astype("float32")
    tokens[..., -1] = 1.0
    layers = {
        "vanilla": (layer_for(ExpertKinds(kinds.ffn), 1.0, tokens.shape, args), 1)
    }
    for tau in taus:
        layers[f"tau={tau:g}"] = (layer_for(kinds, tau, tokens.shape, args), tau)
        bare = layer_for(kinds, tau, tokens.shape, args)
        # They contribute nothing, and cost nothing.
        bare.zero_computation_experts.call = lambda tokens, weights: (
            keras.ops.zeros_like(tokens)
        )
        layers[f"tau={tau:g}, {WITHOUT}"] = (bare, tau)
    for moe, tau in layers.values():
        shift_by_kind(moe, tau)
    return {
        form: interleaved(
            {
                name: forward(moe, tokens, training=training)
                for name, (moe, _) in layers.items()
            },
            args.rounds,
        )
        for form, training in FORMS.items()
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sizes of the layer."""
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--mlp-dim", type=int, default=2048)
    parser.add_argument(
        "--kinds",
        type=int,
        nargs=4,
        default=[8, 1, 1, 2],
        metavar=("FFN", "ZERO", "COPY", "CONSTANT"),
    )
    parser.add_argument("--selected", type=int, default=2)
    parser.add_argument("--gamma", type=float, default=1.1)
    parser.add_argument("--gated", action="store_true", help="SwiGLU-like experts")
    parser.add_argument("--rounds", type=int, default=9)
