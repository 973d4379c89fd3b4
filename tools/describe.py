"""Prints what a preset costs: parameters, active parameters and FLOPs, per block.

    python tools/describe.py vmoe_b32
    python tools/describe.py vmoe_h14 --num-classes 1000 --set image_shape=[384,384,3]
    python tools/describe.py --list

Nothing is allocated: the largest preset answers in a second.
"""

import argparse
import json
import sys

from overrides import parse_override
from rich.console import Console
from rich.table import Table

from keras_moe import models


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", nargs="?", help="a built-in name, folder or handle")
    parser.add_argument("--num-classes", type=int, help="count a head too")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="override arguments; values are JSON, or else strings",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="list the presets")
    args = parser.parse_args(argv)
    if args.list:
        table = Table("preset", "parameters", "active", "GFLOPs", "what it is")
        for name, line in models.list_presets().items():
            costs = models.describe(name)
            table.add_row(
                name,
                f"{costs.parameters / 1e6:,.1f}M",
                f"{costs.active_parameters / 1e6:,.1f}M",
                f"{costs.gflops:,.1f}",
                line,
            )
        Console().print(table)
        return 0
    if not args.preset:
        parser.error("a preset is needed, or --list")
    try:
        overrides = dict(parse_override(text) for text in args.set)
        description = models.describe(args.preset, args.num_classes, **overrides)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(description.to_dict(), indent=2))
    else:
        description.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
