"""Finds the images of one split that are in another, exactly or nearly.

    python tools/deduplicate.py --data folder:photos --split train --against test
    python tools/deduplicate.py --data tfds:cifar10 --split train --against test \\
        --output duplicates.json --max-distance 2

Writes a JSON file with the indices, which `keras_moe.data.load(exclude=...)` reads.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from keras_moe import data


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", required=True, help="digits, tfds:NAME, tfrecord:GLOB or folder:PATH"
    )
    parser.add_argument("--split", default="train", help="to look through")
    parser.add_argument("--against", default="test", help="the split to find")
    parser.add_argument("--against-data", help="its source, if it is another")
    parser.add_argument("--data-dir", help="of TensorFlow Datasets")
    parser.add_argument(
        "--max-distance",
        type=int,
        default=3,
        help="bits of 64 in which a copy may differ; -1 for the same pixels alone",
    )
    parser.add_argument("--output", type=Path, default=Path("duplicates.json"))
    args = parser.parse_args(argv)
    if not -1 <= args.max_distance <= 64:
        parser.error(
            "Expected --max-distance from -1 to 64; "
            f"received: --max-distance {args.max_distance}"
        )
    try:
        run(args)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    against = args.against_data or args.data
    with Progress(transient=True) as bars:

        def bar(name):
            task = bars.add_task(name, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        hashes, reference = (
            data.image_hashes(source, split, args.data_dir, bar(f"{source} {split}"))
            for source, split in ((args.data, args.split), (against, args.against))
        )
        found = data.find_duplicates(
            hashes,
            reference,
            None if args.max_distance < 0 else args.max_distance,
            bar("comparing"),
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    data.write_exclusion(
        args.output,
        args.data,
        args.split,
        len(hashes.exact),
        found,
        against=f"{against} {args.against}",
        max_distance=args.max_distance,
    )
    Console().print(
        f"{len(found)} of {len(hashes.exact)} images of {args.split} are among the "
        f"{len(reference.exact)} of {args.against}: {args.output}",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
