"""`keras-moe convert`: published weights become a preset."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from keras_moe import models
from keras_moe.cli.comparison import compare_saved, verify
from keras_moe.cli.overrides import FIRST, model_overrides
from keras_moe.cli.result import Result
from keras_moe.cli.targets import check_target
from keras_moe.models.preset_folder import staged

# Arguments of `models.convert` that this program sets, and what sets them here.
OWN = {
    "source": FIRST,
    "num_classes": "--num-classes",
    "task": "--task",
    "load_weights": "this program",
    "progress": "this program",
    "tower": "--tower",
}


def run(args: argparse.Namespace, console: Console) -> Result:
    """Converts, compares, and saves."""
    check_target(args.source, args.output)
    overrides = model_overrides(args.set, OWN)
    model, report = convert(args, overrides, console)
    verified = "not compared"
    if not args.no_verify:
        changed = bool(overrides) or args.num_classes is not None
        verified = verify(args.source, report.scheme, model, changed)
    report = report._replace(notes=[*report.notes, verified])
    # A model takes the target's place when it was read again and compared.
    with staged(args.output) as folder:
        model.save_to_preset(folder)
        if not args.no_verify:
            compare_saved(folder, model)
        report.save(Path(folder) / "conversion.json")
    parameters = model.count_params()

    def show(console: Console) -> None:
        if not args.quiet:
            report.print(console)
        console.print(
            f"{args.output}: {parameters:,} parameters; {verified}", markup=False
        )

    values = {"output": str(args.output), "parameters": parameters}
    return Result({**values, **report.to_dict()}, show)


def convert(
    args: argparse.Namespace, overrides: dict, console: Console
) -> tuple[Any, Any]:
    """`models.convert` with a progress bar."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    is_shown = console.is_terminal
    with Progress(
        *columns, console=console, transient=True, disable=not is_shown
    ) as progress:
        task = progress.add_task("opening", total=None)

        def show(done, total, name):
            progress.update(task, completed=done, total=total, description=name)

        return models.convert(
            args.source,
            num_classes=args.num_classes,
            task=args.task,
            progress=show,
            tower=args.tower,
            **overrides,
        )
