"""`keras-moe plan`: the arithmetic of training on many devices."""

import argparse
import contextlib

from rich.console import Console
from rich.table import Table

from keras_moe import distribution
from keras_moe.cli.overrides import FIRST, model_overrides
from keras_moe.cli.result import Result

# Arguments of `distribution.costs`.
OWN = {
    "model_or_preset": FIRST,
    "num_devices": "--devices",
    "batch_size": "--batch-size",
    "chip": "--chip",
    "expert_parallel": "--expert-parallel",
    "model_parallel": "--model-parallel",
    "optimizer": "--optimizer",
    "dtype": "--dtype",
    "utilization": "--utilization",
    "text_tokens": "--text-tokens",
    "num_classes": "--num-classes",
}


def run(args: argparse.Namespace, console: Console) -> Result:
    """Compares layouts, and shows one of them."""
    if args.expert_parallel is not None:
        chosen = costs(args, args.expert_parallel)
        return Result({"costs": as_json(chosen)}, chosen.print)
    compared = layouts(args)
    chosen = compared[max(compared)]

    def show(console: Console) -> None:
        console.print(comparison(args, compared))
        chosen.print(console)

    values = {str(parallel): as_json(each) for parallel, each in compared.items()}
    return Result({"layouts": values, "costs": as_json(chosen)}, show)


def costs(args: argparse.Namespace, expert_parallel: int | str) -> distribution.Costs:
    return distribution.costs(
        args.preset,
        args.devices,
        args.batch_size,
        args.chip,
        expert_parallel,
        args.model_parallel,
        args.optimizer,
        args.dtype,
        args.utilization,
        args.text_tokens,
        args.num_classes,
        **model_overrides(args.set, OWN),
    )


def layouts(args: argparse.Namespace) -> dict[int, distribution.Costs]:
    """The costs for each number of devices over which experts can be split."""
    compared = {1: costs(args, 1)}
    devices = args.devices // args.model_parallel
    for ways in range(2, devices + 1):
        if devices % ways == 0:
            # Numbers that do not divide the experts are refused, and all of a dense
            # model.
            with contextlib.suppress(ValueError):
                compared[ways] = costs(args, ways)
    return compared


def comparison(
    args: argparse.Namespace, compared: dict[int, distribution.Costs]
) -> Table:
    """A row for each layout."""
    table = Table(title=f"{args.preset} on {args.devices} x {args.chip}")
    table.add_column("expert_parallel")
    for column in ("GiB per device", "fits", "all-to-all GB", "ms per step"):
        table.add_column(column, justify="right")
    for parallel, each in compared.items():
        fastest, slowest = each.step_seconds
        table.add_row(
            str(parallel),
            f"{each.memory_bytes / 2**30:.1f}",
            "yes" if each.fits else "no",
            f"{each.traffic['all-to-all (tokens)'] / 1e9:.3f}",
            f"{1e3 * fastest:,.0f} to {1e3 * slowest:,.0f}",
        )
    return table


def as_json(each: distribution.Costs) -> dict:
    """The costs, and what follows from them."""
    return {
        **each._asdict(),
        "chip": each.chip._asdict(),
        "memory_bytes": each.memory_bytes,
        "fits": each.fits,
        "step_seconds": each.step_seconds,
    }
