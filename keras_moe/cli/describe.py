"""`keras-moe describe`: what a model costs, block by block."""

import argparse

from rich.console import Console
from rich.table import Table

from keras_moe import models
from keras_moe.cli.overrides import FIRST, model_overrides
from keras_moe.cli.result import Result, show_all

OWN = {"preset": FIRST, "num_classes": "--num-classes"}


def run(args: argparse.Namespace, console: Console) -> Result:
    """Counts, without allocating a weight."""
    overrides = model_overrides(args.set, OWN)
    if args.list == bool(args.preset or overrides):
        raise ValueError(
            "Expected a preset, or --list alone; received: "
            f"preset={args.preset!r}, --list={args.list}"
        )
    if args.list:
        return every_preset(args.num_classes)
    description = models.describe(args.preset, args.num_classes, **overrides)
    return Result(description.to_dict(), description.print)


def every_preset(num_classes: int | None) -> Result:
    """A row for each built-in preset."""
    table = Table("preset", "parameters", "active", "GFLOPs", "what it is")
    rows = []
    for name, line in models.list_presets().items():
        costs = models.describe(name, num_classes)
        table.add_row(
            name,
            f"{costs.parameters / 1e6:,.1f}M",
            f"{costs.active_parameters / 1e6:,.1f}M",
            f"{costs.gflops:,.1f}",
            line,
        )
        row = costs.to_dict()
        row.pop("parts")
        rows.append({**row, "description": line})
    return Result(rows, show_all(table))
