"""Layers of MoE++ and their vanilla twin, with balanced loads, and their times.

Both have the same feed-forward experts, gamma and K; the router's kernel is random, so
that the load is balanced over experts. `limited` is the form of training, with the
capacities of equation 8 of *MoE++*; `every token` serves all, as inference does, with
logits shifted by kind so that equation 8's shares are what tokens choose.
`without zero-computation` is the same layer, whose zero-computation experts do nothing:
their cost is the difference.
"""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np

from keras_moe import routers
from keras_moe.layers import Experts, MoE
from keras_moe.ops import ExpertTypes
from tools.benchmark.execution import forward
from tools.benchmark.timing import interleaved

# Whether the layer trains.
FORMS = {"limited": True, "every token": False}
WITHOUT = "without zero-computation"


class Sizes(NamedTuple):
    """Sizes of a layer.

    Attributes:
        expert_types: number of experts of each kind.
        tokens: number of tokens.
        dim: D, size of a token.
        mlp_dim: H, size of an expert's hidden layer.
        selected: K.
        gamma: capacity factor.
        gated: whether experts are SwiGLU-like.
    """

    expert_types: ExpertTypes
    tokens: int
    dim: int
    mlp_dim: int
    selected: int
    gamma: float
    gated: bool


def layer_for(
    expert_types: ExpertTypes, tau: float, shape: tuple[int, ...], sizes: Sizes
) -> MoE:
    """A built MoE layer of these experts."""
    options = {} if not expert_types.zero_computation else {"tau": tau}
    router = routers.get(
        "softmax_token_choice",
        expert_types,
        num_selected_experts=sizes.selected,
        capacity_factor=sizes.gamma,
        noise_std=0.0,
        **options,
    )
    experts = Experts(
        expert_types.ffn, sizes.mlp_dim, gated=sizes.gated, use_bias=not sizes.gated
    )
    moe = MoE(router, experts)
    moe.build(shape)
    return moe


def shift_by_kind(moe: MoE, tau: float) -> None:
    """Lowers the FFN experts' logits until they get equation 8's share.

    The tokens' last feature is 1, so that its row of the kernel is a bias.
    """
    expert_types = moe.router.expert_types
    kernel = np.array(moe.router.kernel)
    kernel[-1] = 0.0
    if expert_types.zero_computation:
        # The K largest of E random logits, by bisection on other tokens.
        generator = np.random.default_rng(1)
        logits = generator.normal(size=(8192, expert_types.total)) * np.linalg.norm(
            kernel, axis=0
        )
        wanted = (
            tau
            * expert_types.ffn
            / (tau * expert_types.ffn + expert_types.zero_computation)
        )
        low, high = -20.0, 20.0
        for _ in range(40):
            shift = (low + high) / 2
            moved = logits + np.where(
                np.arange(expert_types.total) < expert_types.ffn, shift, 0
            )
            chosen = np.argsort(-moved, axis=-1)[:, : moe.router.num_selected_experts]
            low, high = (
                (shift, high)
                if (chosen < expert_types.ffn).mean() < wanted
                else (low, shift)
            )
        kernel[-1, : expert_types.ffn] = shift
    moe.router.kernel.assign(kernel)


def measure(
    sizes: Sizes, taus: Sequence[float], rounds: int
) -> dict[str, dict[str, float]]:
    """Median seconds of the forward pass, by form and by layer."""
    expert_types = sizes.expert_types
    tokens = np.random.default_rng(0).normal(size=(1, sizes.tokens, sizes.dim))
    tokens = tokens.astype("float32")
    tokens[..., -1] = 1.0
    layers = {
        "vanilla": (
            layer_for(ExpertTypes(expert_types.ffn), 1.0, tokens.shape, sizes),
            1,
        )
    }
    for tau in taus:
        layers[f"tau={tau:g}"] = (
            layer_for(expert_types, tau, tokens.shape, sizes),
            tau,
        )
        bare = layer_for(expert_types, tau, tokens.shape, sizes)
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
            rounds,
        )
        for form, training in FORMS.items()
    }
