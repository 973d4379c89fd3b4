"""Count the parameters, active parameters and FLOPs of a model, and the routed share.

Nothing is allocated: the largest preset takes no longer than the smallest.
"""

import argparse
from typing import TYPE_CHECKING

import keras_moe
from keras_moe._errors import unfit
from keras_moe.cli import _arguments

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """\
keras-moe describe vmoe_b32
keras-moe describe vmoe_h14 --num-classes 1000 --set image_shape=[384,384,3]
keras-moe describe --list
keras-moe describe --list "vmoe_*16\""""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments.add_preset(parser, nargs="?")
    _arguments.add_count(
        parser, "--num-classes", "Count a head for this many classes, too."
    )
    _arguments.add_overrides(parser)
    pattern = "List the presets; with a pattern, those whose names have it."
    parser.add_argument("--list", nargs="?", const="*", metavar="PATTERN", help=pattern)


def run(args: argparse.Namespace, console: "Console") -> _arguments.Result:
    overrides = _arguments.model_overrides(args.set, ("preset", "num_classes"))
    if (args.list is not None) == bool(args.preset or overrides):
        expected = "a preset, or --list alone"
        raise unfit(expected, f"preset={args.preset!r}, --list={args.list!r}")
    if args.list is not None:
        return listed(args.list, args.num_classes)
    description = keras_moe.models.describe(
        args.preset, num_classes=args.num_classes, **overrides
    )
    return _arguments.Result(description.to_dict(), (description.print,))


def listed(pattern: str, num_classes: int | None) -> _arguments.Result:
    """A row for each preset whose name matches."""
    from rich.table import Table

    names = keras_moe.models.list_presets(pattern)
    if not names:
        raise ValueError(f"Expected a pattern of presets; received: --list {pattern}")
    table = Table("preset", "parameters", "active", "GFLOPs", "routed", "what it is")
    rows = []
    for name, line in names.items():
        costs = keras_moe.models.describe(name, num_classes=num_classes)
        table.add_row(
            name,
            f"{costs.parameters / 1e6:,.1f}M",
            f"{costs.active_parameters / 1e6:,.1f}M",
            f"{costs.gflops:,.1f}",
            f"{costs.routed_share:.0%}" if costs.routed_share else "",
            line,
        )
        rows.append({**costs.to_dict(), "description": line})
        rows[-1].pop("parts")
    return _arguments.Result(rows, (table,))
