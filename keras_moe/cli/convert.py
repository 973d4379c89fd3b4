"""Convert published weights into a preset.

If the source's framework is installed (timm, KerasHub), a test image goes through both
models. The preset is written to a new folder, read again and compared, and only then
takes its place. Its conversion.json says which arrays each weight was made of.
"""

import argparse
from pathlib import Path
from typing import Any

import keras_moe
from keras_moe.cli._arguments import (
    FIRST,
    Result,
    add_count,
    add_overrides,
    add_target,
    check_target,
    model_overrides,
)

EXAMPLES = """\
keras-moe convert gs://vmoe_checkpoints/vmoe_s32_last2_ilsvrc2012_randaug_medium out
keras-moe convert hf://timm/vit_base_patch16_224.augreg_in21k out
keras-moe convert ViT-B_16.npz out --set image_shape=[384,384,3]"""
# Arguments of `models.convert`, and what sets them.
OWN = {
    "source": FIRST,
    "num_classes": "--num-classes",
    "task": "--task",
    "load_weights": "this program",
    "progress": "this program",
    "tower": "--tower",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="The weights, as keras_moe.models.convert takes them.",
    )
    add_target(parser)
    add_count(parser, "--num-classes", "The number of classes of a new head.")
    parser.add_argument(
        "--task",
        choices=("backbone", "image_classifier", "contrastive", "causal_lm"),
        help="The kind of model; by default what the source is.",
    )
    parser.add_argument(
        "--tower",
        choices=("image", "text"),
        help="The tower of an image-text model to convert by itself.",
    )
    add_overrides(parser)
    parser.add_argument(
        "--no-verify", action="store_true", help="Skip all comparisons."
    )
    parser.add_argument(
        "--quiet", action="store_true", help="Do not print the table of weights."
    )


def run(args: argparse.Namespace, console: Any) -> Result:
    from keras_moe.cli import _comparison
    from keras_moe.models.saving._preset_folder import staged

    check_target(args.source, args.output)
    overrides = model_overrides(args.set, OWN)
    model, report = convert(args, overrides, console)
    verified = "not compared"
    if not args.no_verify:
        changed = bool(overrides) or args.num_classes is not None
        verified = _comparison.verify(args.source, report.scheme, model, changed)
    report = report._replace(notes=[*report.notes, verified])
    # The new preset takes the old one's place after it was read again and compared.
    with staged(args.output) as folder:
        model.save_to_preset(folder)
        if not args.no_verify:
            _comparison.compare_saved(folder, model)
        report.save(Path(folder) / "conversion.json")
    parameters = model.count_params()
    line = f"{args.output}: {parameters:,} parameters; {verified}"
    values = {"output": str(args.output), "parameters": parameters}
    table = () if args.quiet else (report.print,)
    return Result({**values, **report.to_dict()}, (*table, line))


def convert(args: argparse.Namespace, overrides: dict, console: Any) -> tuple[Any, Any]:
    """The converted model and its report; shows a progress bar."""
    from rich.progress import Progress

    is_shown = console.is_terminal
    with Progress(console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("opening", total=None)

        def show(done, total, name):
            progress.update(task, completed=done, total=total, description=name)

        return keras_moe.models.convert(
            args.source,
            num_classes=args.num_classes,
            task=args.task,
            progress=show,
            tower=args.tower,
            **overrides,
        )
