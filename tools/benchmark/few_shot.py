"""Few-shot ridge regression over big_vision's algorithm, for one l2 and for thirty.

    python tools/benchmark/few_shot.py
    python tools/benchmark/few_shot.py --examples 5000 --rounds 3

The peer is big_vision's evaluator written anew: all in float32 under JAX's jit on the
CPU, one decomposition, and weights and scores for each l2. Both are given the same
features, and the accuracies of the two are printed.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from runner import Report, run

from keras_moe.evaluation import few_shot_accuracies
from keras_moe.evaluation.ridge_regression import L2S

PEER = "big_vision's algorithm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--tests", type=int, default=5_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--numbers", type=int, nargs="+", default=[1, len(L2S)])


def measure(args: argparse.Namespace, report: Report) -> None:
    train, test = features(args)
    size = f"{args.examples} x {args.dim}, {args.classes} classes, {args.tests} tests"
    rows = []
    for number in args.numbers:
        # One is in the middle of the grid.
        l2s = L2S if number == len(L2S) else L2S[10 : 10 + number]
        candidates = {
            "few_shot_accuracies": lambda l2s=l2s: few_shot_accuracies(
                *train, *test, args.classes, l2s
            ),
            PEER: lambda l2s=l2s: peer(*train, *test, args.classes, l2s),
        }
        report.compare(f"{size}, {number} l2", candidates, PEER)
        accuracies = np.array([function() for function in candidates.values()])
        rows.append(
            {
                "l2": str(number),
                "best accuracy": accuracies[0].max(),
                "largest difference": np.abs(accuracies[0] - accuracies[1]).max(),
            }
        )
    formats = {"best accuracy": ".4f", "largest difference": ".4f"}
    report.table("accuracies, ours in float64", rows, formats)


def features(args: argparse.Namespace) -> tuple:
    """Training and test sets around one centre for each class, in float32."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(args.classes, args.dim))

    def drawn(count):
        labels = np.arange(count) % args.classes
        noise = generator.normal(size=(count, args.dim))
        return (centres[labels] + 3 * noise).astype("float32"), labels

    return drawn(args.examples), drawn(args.tests)


def peer(x, y, x_test, y_test, num_classes: int, l2s) -> np.ndarray:
    """The accuracies (L,) as big_vision's evaluator computes them."""
    fit, accuracy = _compiled(num_classes)
    cache = fit(x, y)
    return np.array([accuracy(cache, x_test, y_test, l2) for l2 in l2s])


_functions: dict[int, tuple[Callable, Callable]] = {}


def _compiled(num_classes: int) -> tuple[Callable, Callable]:
    if num_classes in _functions:
        return _functions[num_classes]

    def with_bias(x, mean, std):
        return jnp.pad((x - mean) / std, ((0, 0), (0, 1)), constant_values=100.0)

    @jax.jit
    def fit(x, y):
        mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
        x = with_bias(x, mean, std)
        targets = 2 * jax.nn.one_hot(y, num_classes) - 1
        if x.shape[0] >= x.shape[1]:
            eigs, vectors = jnp.linalg.eigh(x.T @ x)
            left, right = vectors, vectors.T @ (x.T @ targets)
        else:
            eigs, vectors = jnp.linalg.eigh(x @ x.T)
            left, right = x.T @ vectors, vectors.T @ targets
        return mean, std, left, eigs, right

    @jax.jit
    def accuracy(cache, x, y, l2):
        mean, std, left, eigs, right = cache
        scores = with_bias(x, mean, std) @ ((left / (eigs + l2)) @ right)
        return (scores.argmax(axis=1) == y).mean()

    return _functions.setdefault(num_classes, (fit, accuracy))


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=3)
