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

from keras_moe.evaluation.few_shot import L2S, few_shot_accuracies

PEER = "big_vision's algorithm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--tests", type=int, default=5_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--numbers", type=int, nargs="+", default=[1, len(L2S)])


def measure(args: argparse.Namespace, report: Report) -> None:
    sizes = (args.examples, args.tests, args.dim, args.classes)
    size = f"{args.examples} x {args.dim}, {args.classes} classes, {args.tests} tests"
    rows = []
    for number in args.numbers:
        functions = fits(number, *sizes)
        report.compare(f"{size}, {number} l2", functions, PEER)
        accuracies, others = (function() for function in functions.values())
        rows.append(
            {
                "l2": str(number),
                "best accuracy": accuracies.max(),
                "largest difference": np.abs(accuracies - others).max(),
            }
        )
    formats = {"best accuracy": ".4f", "largest difference": ".4f"}
    report.table("accuracies, ours those of float64", rows, formats)


def fits(
    number: int,
    examples: int = 10_000,
    tests: int = 5_000,
    dim: int = 768,
    classes: int = 1_000,
) -> dict[str, Callable[[], np.ndarray]]:
    """Functions by name that return the accuracy for each l2.

    Args:
        number: number of values of l2, at most those of the usual grid.
        examples: number of training examples.
        tests: number of test examples.
        dim: number of features.
        classes: number of classes.
    """
    # A few are those from the middle of the grid on.
    l2s = L2S if number > len(L2S) - 10 else L2S[10 : 10 + number]
    train, test = features(examples, tests, dim, classes)
    return {
        "few_shot_accuracies": lambda: few_shot_accuracies(*train, *test, classes, l2s),
        PEER: lambda: peer(*train, *test, classes, l2s),
    }


def features(examples: int, tests: int, dim: int, classes: int) -> tuple:
    """Training and test sets around one centre for each class, in float32."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(classes, dim))

    def drawn(count):
        labels = np.arange(count) % classes
        noise = generator.normal(size=(count, dim))
        return (centres[labels] + 3 * noise).astype("float32"), labels

    return drawn(examples), drawn(tests)


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
