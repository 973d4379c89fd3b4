"""An MoE++ layer's forward pass over that of its vanilla twin, by tau.

    KERAS_BACKEND=jax python tools/benchmark/moepp_layer.py

Both have the same feed-forward experts, gamma and K; the router's kernel is random, so
that the load is balanced over experts. `limited` is the form of training, with the
capacities of equation 8 of *MoE++*; `every token` serves all, as inference does, with
logits shifted by kind so that equation 8's shares are what tokens choose.
`without zero-computation` is the same layer, whose zero-computation experts do nothing:
what they cost is the difference.
"""

import argparse

from moepp_layers import WITHOUT, add_arguments, measure
from timing import print_ratios

from keras_moe.ops import ExpertKinds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--tau", type=float, nargs="+", default=[0.75, 0.25])
    args = parser.parse_args()
    kinds = ExpertKinds(*args.kinds)
    for form, seconds in measure(kinds, args.tau, args).items():
        print_ratios(
            f"MoE++ {kinds}, {args.tokens} tokens, D={args.dim}, H={args.mlp_dim}, "
            f"K={args.selected}, {form}",
            seconds,
            "vanilla",
        )
        for tau in args.tau:
            ours, bare = (
                seconds[f"tau={tau:g}{what}"] for what in ("", f", {WITHOUT}")
            )
            weight = tau * kinds.ffn
            share = weight / (weight + kinds.zero_computation)
            print(
                f"tau={tau:g}: {seconds['vanilla'] / ours:.2f}x as fast as vanilla "
                f"(by FLOPs {1 / share:.2f}x); zero-computation experts "
                f"{ours / bare - 1:+.1%} of the layer"
            )


if __name__ == "__main__":
    main()
