"""Find the images of one split that are also in another.

Copies that were resized or compressed again count, too. Writes a file of their indices,
which keras_moe.data.load(exclude=...) reads.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import keras_moe
from keras_moe.cli._arguments import Result, add_count, add_data

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """\
keras-moe deduplicate --data folder:photos --split train --against test
keras-moe deduplicate --data tfds:cifar10 --output duplicates.json --max-distance 2"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data(parser, required=True)
    parser.add_argument(
        "--split", default="train", help="The split to search for copies."
    )
    parser.add_argument(
        "--against", default="test", help="The split whose images are searched for."
    )
    against_data = "The source of that split, if it is not --data."
    parser.add_argument("--against-data", metavar="SOURCE", help=against_data)
    bits = "The bits of 64 in which a copy's hash may differ; -1 for identical pixels."
    add_count(parser, "--max-distance", bits, 3, minimum=-1)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("duplicates.json"),
        metavar="FILE.json",
        help="The file of indices.",
    )


def run(args: argparse.Namespace, console: "Console") -> Result:
    from rich.progress import Progress

    from keras_moe._checks import check_integer

    data = keras_moe.data
    # Before the images are read.
    check_integer("max_distance", args.max_distance, -1, 32)
    against = args.against_data or args.data
    max_distance = None if args.max_distance < 0 else args.max_distance
    args.output.parent.mkdir(parents=True, exist_ok=True)
    is_shown = console.is_terminal
    with Progress(console=console, transient=True, disable=not is_shown) as bars:

        def bar(name):
            task = bars.add_task(name, total=None)
            return lambda done, total, _: bars.update(task, completed=done, total=total)

        hashes, reference = (
            data.image_hashes(source, split, args.data_dir, bar(f"{source} {split}"))
            for source, split in ((args.data, args.split), (against, args.against))
        )
        duplicates = data.find_duplicates(
            hashes, reference, max_distance, bar("comparing")
        )
    data.write_exclusion(
        args.output,
        args.data,
        args.split,
        len(hashes.exact),
        duplicates,
        against=f"{against} {args.against}",
        max_distance=args.max_distance,
    )
    values = {
        "data": args.data,
        "split": args.split,
        "images": len(hashes.exact),
        "against": f"{against} {args.against}",
        "reference_images": len(reference.exact),
        "duplicates": len(duplicates),
        "output": str(args.output),
    }
    line = (
        f"{len(duplicates)} of {len(hashes.exact)} images of {args.split} are among "
        f"the {len(reference.exact)} of {args.against}: {args.output}"
    )
    return Result(values, (line,))
