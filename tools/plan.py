"""Prints what training costs on many devices: memory, traffic, and time of a step.

    python tools/plan.py --preset vmoe_h14 --chip tpu_v4 --devices 256 --batch-size 4096
    python tools/plan.py --preset vmoe_h14 --chip h200 --devices 8 --batch-size 512
    python tools/plan.py --preset vmoe_l16 --chip tpu_v5e --devices 64 \\
        --batch-size 4096 --expert-parallel 32 --set rematerialize=true

It is arithmetic: no device is needed, and nothing is allocated. Without
--expert-parallel the layouts that the numbers allow are compared, and the one that
splits experts most is shown.
"""

import os

# For the layouts' names alone: nothing runs on it.
os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse
import contextlib
import sys

from overrides import parse_override
from rich.console import Console
from rich.table import Table

from keras_moe import distribution
from keras_moe.distribution.costs import ITEMSIZES, OPTIMIZERS


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console()
    try:
        overrides = dict(parse_override(text) for text in args.set)
        if args.expert_parallel is None:
            found = layouts(args, overrides)
            console.print(comparison(args, found))
            args.expert_parallel = max(found)
        costs(args, overrides, args.expert_parallel).print(console)
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", required=True, help="a name, folder or handle")
    parser.add_argument("--chip", default="tpu_v4", choices=distribution.CHIPS)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument(
        "--expert-parallel", type=parallel, help="'batch' or how many devices"
    )
    parser.add_argument("--model-parallel", type=int, default=1)
    parser.add_argument("--optimizer", default="adam", choices=OPTIMIZERS)
    parser.add_argument("--dtype", default="bfloat16", choices=ITEMSIZES)
    parser.add_argument(
        "--utilization", type=float, default=0.4, help="of the chip's peak"
    )
    parser.add_argument(
        "--text-tokens", type=int, default=0, help="beside each image, as in LIMoE"
    )
    parser.add_argument("--num-classes", type=int, help="count a head too")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="override the model's arguments; values are JSON, or else strings",
    )
    return parser.parse_args(argv)


def parallel(text: str) -> int | str:
    return text if text == "batch" else int(text)


def costs(args, overrides, expert_parallel):
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
        **overrides,
    )


def layouts(args: argparse.Namespace, overrides: dict) -> dict:
    """The costs for each number of devices over which experts can be split."""
    found = {1: costs(args, overrides, 1)}
    devices = args.devices // args.model_parallel
    for ways in range(2, devices + 1):
        if devices % ways == 0:
            # What does not divide the experts is refused, and all if there are none.
            with contextlib.suppress(ValueError):
                found[ways] = costs(args, overrides, ways)
    return found


def comparison(args: argparse.Namespace, found: dict) -> Table:
    """A row for each layout."""
    table = Table(title=f"{args.preset} on {args.devices} x {args.chip}")
    table.add_column("expert_parallel")
    for column in ("GiB per device", "fits", "all-to-all GB", "ms per step"):
        table.add_column(column, justify="right")
    for parallel, each in found.items():
        fastest, slowest = each.step_seconds
        table.add_row(
            str(parallel),
            f"{each.memory_bytes / 2**30:.1f}",
            "yes" if each.fits else "no",
            f"{each.traffic['all-to-all (tokens)'] / 1e9:.3f}",
            f"{1e3 * fastest:,.0f} to {1e3 * slowest:,.0f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
