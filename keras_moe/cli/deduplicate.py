"""`keras-moe deduplicate`: images of one split that are in another."""

import argparse

from rich.console import Console
from rich.progress import Progress

from keras_moe import data
from keras_moe.cli.result import Result, show_all


def run(args: argparse.Namespace, console: Console) -> Result:
    """Compares all images, and writes the indices of the copies."""
    against = args.against_data or args.data
    max_distance = None if args.max_distance < 0 else args.max_distance
    args.output.parent.mkdir(parents=True, exist_ok=True)
    is_shown = console.is_terminal
    with Progress(console=console, transient=True, disable=not is_shown) as bars:

        def bar(name):
            task = bars.add_task(name, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

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
    return Result(values, show_all(line))
