"""Solvers of sparsity-constrained transport: time, objective and marginals.

    KERAS_BACKEND=jax python tools/benchmark/sparse_transport.py

The objective is the semi-dual's, to be minimised. Errors are of the marginals that
the projection does not meet by construction, relative to what they should be.
"""

import argparse

import keras
import numpy as np
from keras import ops
from runner import Report, run

from keras_moe.ops.sparse_transport import (
    ITERATIONS,
    SIDES,
    SOLVERS,
    potentials,
    project,
    sparse_transport,
)


def compiled(function):
    """The function as a training loop would run it."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    return function


def quality(utility, side, bound, solver):
    """The objective, and the mean and largest error of the free marginals."""
    _, tokens, experts = utility.shape
    mass = ops.ones((1, tokens, 1))
    share = ops.full((1, 1, 1), tokens / experts)

    def run(utility):
        values, own, others = utility, mass, share
        if side == "expert":
            values = ops.swapaxes(utility, 1, 2)
            own, others = share, ops.swapaxes(mass, 1, 2)
        steps = ITERATIONS[solver]
        problem = own, others, side, bound
        duals, _ = potentials(values, *problem, solver, steps)
        # The semi-dual, which solvers minimise: a bound on the worth of the best plan.
        best = project(values + duals, values > -1, own, bound)
        worth = ops.sum(best * (values + duals - 0.5 * best), axis=(1, 2))
        worth = worth - ops.sum(others * duals, axis=(1, 2))
        plan = sparse_transport(utility, side, bound, solver)
        if side == "expert":
            return worth[0], ops.abs(plan.row_marginals - 1)
        return worth[0], ops.abs(plan.column_marginals * (experts / tokens) - 1)

    worth, error = map(ops.convert_to_numpy, compiled(run)(utility))
    return float(worth), float(error.mean()), float(error.max())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[400, 3136, 12544])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--side", default="expert", choices=SIDES)
    parser.add_argument("--std", type=float, nargs="+", default=[0.3, 1.0, 3.0])


def measure(args: argparse.Namespace, report: Report) -> None:
    generator = np.random.default_rng(0)
    for tokens in args.tokens:
        for experts in args.experts:
            logits = generator.normal(size=(1, tokens, experts)).astype("float32")
            for factor in (1, 2):
                bound = factor
                if args.side == "expert":
                    bound = -(-factor * tokens // experts)
                title = f"{args.side} side, S={tokens}, E={experts}, bound {bound}"
                compare(title, logits, bound, args, report)


def compare(title, logits, bound, args, report: Report) -> None:
    candidates, rows = {}, []
    for solver in SOLVERS:

        def run(utility, solver=solver):
            return sparse_transport(utility, args.side, bound, solver).plan

        run = compiled(run)
        for std in args.std:
            utility = ops.softmax(ops.convert_to_tensor(std * logits), axis=-1)
            if std == 1.0 or len(args.std) == 1:
                candidates[solver] = lambda run=run, utility=utility: run(utility)
            worth, mean, largest = quality(utility, args.side, bound, solver)
            rows.append(
                {
                    "logits' std": std,
                    "solver": solver,
                    "objective": worth,
                    "mean error": mean,
                    "max error": largest,
                }
            )
    report.compare(title, candidates, "adam")
    formats = {"objective": ".3f", "mean error": ".4f", "max error": ".2f"}
    report.table(title, rows, formats)


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
