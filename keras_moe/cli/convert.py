"""Convert published weights into a preset.

The preset is written to a new folder, read again and compared, and only then takes its
place. Its conversion.json says which arrays each weight was made of.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras_moe
from keras_moe.cli import _arguments
from keras_moe.cli._inputs import progress_shown

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """\
keras-moe convert gs://vmoe_checkpoints/vmoe_s32_last2_ilsvrc2012_randaug_medium out
keras-moe convert hf://timm/vit_base_patch16_224.augreg_in21k out
keras-moe convert ViT-B_16.npz out --set image_shape=[384,384,3]"""
# Arguments of `models.convert`, which options set.
OWN = ("source", "num_classes", "task", "load_weights", "progress", "tower")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = "The weights, as keras_moe.models.convert takes them."
    parser.add_argument("source", metavar="SOURCE", help=source)
    _arguments.add_target(parser)
    _arguments.add_count(
        parser, "--num-classes", "The number of classes of a new head."
    )
    parser.add_argument(
        "--task",
        choices=("backbone", "image_classifier", "contrastive", "causal_lm"),
        help="The kind of model; by default what the source is.",
    )
    tower = "The tower of an image-text model to convert by itself."
    parser.add_argument("--tower", choices=("image", "text"), help=tower)
    _arguments.add_overrides(parser)
    _arguments.add_flag(parser, "--no-verify", "Do not read the preset again.")
    _arguments.add_flag(parser, "--quiet", "Do not print the table of weights.")


def run(args: argparse.Namespace, console: "Console") -> _arguments.Result:
    from keras_moe.models.saving._preset_folder import staged

    _arguments.check_target(args.source, args.output)
    overrides = _arguments.model_overrides(args.set, OWN)
    with progress_shown(console, "opening") as show:
        model, report = keras_moe.models.convert(
            args.source,
            num_classes=args.num_classes,
            task=args.task,
            progress=show,
            tower=args.tower,
            **overrides,
        )
    # The new preset takes the old one's place after it was read again and compared.
    with staged(args.output) as folder:
        model.save_to_preset(folder)
        if not args.no_verify:
            compare_saved(folder, model)
        report.save(Path(folder) / "conversion.json")
    parameters = model.count_params()
    line = f"{args.output}: {parameters:,} parameters"
    values = {"output": str(args.output), "parameters": parameters}
    table = () if args.quiet else (report.print,)
    return _arguments.Result({**values, **report.to_dict()}, (*table, line))


def compare_saved(preset: str, model: Any) -> None:
    import keras
    import numpy as np

    from keras_moe.training._upcycled import example_inputs

    inputs = example_inputs(getattr(model, "backbone", model))
    loaded = keras_moe.models.from_preset(str(preset))
    outputs = (
        keras.tree.flatten(x.predict(inputs, verbose=0)) for x in (loaded, model)
    )
    if not all(np.allclose(x, y, atol=1e-5) for x, y in zip(*outputs)):
        raise ValueError(f"Expected the saved model back from {preset}; it differs")
