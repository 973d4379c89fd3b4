"""Export a model for a server, a phone or another library.

The end of the name says what is written: .onnx for ONNX, .pt2 for PyTorch, .tflite for
LiteRT on phones. A folder needs --format. Programs take any number of examples unless
there is a --batch-size. An older export is replaced once the new one is whole.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras_moe
from keras_moe._errors import unfit
from keras_moe.cli._arguments import Result, add_count, add_overrides, add_preset
from keras_moe.cli._inputs import find_model

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """\
keras-moe export runs/vmoe_digits model.onnx
keras-moe export vmoe_digits model.tflite
keras-moe export vmoe_digits served --format saved_model
keras-moe export hf://timm/vit_base_patch16_clip_224.openai clip --format open_clip"""
# By the end of a file's name, and Keras's names of the formats.
ENDINGS = {".onnx": "onnx", ".pt2": "pt2", ".tflite": "litert"}
PROGRAMS = {
    "onnx": "onnx",
    "pt2": "torch",
    "litert": "litert",
    "saved_model": "tf_saved_model",
}
LIBRARIES = ("transformers", "open_clip", "timm", "moe_plus_plus")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset(parser)
    parser.add_argument(
        "output",
        type=Path,
        metavar="OUTPUT",
        help="The file or the folder to write.",
    )
    parser.add_argument(
        "--format",
        choices=(*PROGRAMS, *LIBRARIES),
        help="What is written; by default as the file's name ends. onnx and pt2 need "
        "KERAS_BACKEND=torch, litert tensorflow, and saved_model jax or tensorflow; "
        "the weights of transformers and other libraries are written by all.",
    )
    add_count(parser, "--batch-size", "The only number of examples of a program.")
    add_overrides(parser)


def run(args: argparse.Namespace, console: "Console") -> Result:
    import keras

    from keras_moe.models.base._exporting import check_writer

    format = args.format or ENDINGS.get(args.output.suffix)
    if format is None:
        expected = f"--format, or a file that ends with {' or '.join(ENDINGS)}"
        raise unfit(expected, str(args.output))
    if format in PROGRAMS:
        # Before a large model is loaded.
        check_writer(PROGRAMS[format], {x: name for name, x in PROGRAMS.items()})
    elif args.batch_size is not None:
        raise unfit("--batch-size for a program", f"--format {format}")
    model = find_model(args).load()
    if format in PROGRAMS:
        export_program(model, args.output, PROGRAMS[format], args.batch_size)
    else:
        keras_moe.models.export_weights(model, format, args.output)
    parameters = model.count_params()
    values = {"output": str(args.output), "format": format, "parameters": parameters}
    values["backend"] = keras.backend.backend()
    line = f"{args.output}: {type(model).__name__}, {format}, {parameters:,} parameters"
    return Result(values, (line,))


def export_program(
    model: Any, output: Path, format: str, batch_size: int | None
) -> None:
    from keras_moe.models.base._exporting import signature_of

    options: dict[str, Any] = {}
    if batch_size is not None:
        options["input_signature"] = signature_of(model, batch_size)
    elif format == "torch":
        from keras_moe._backends.torch import any_batch

        options["dynamic_shapes"] = any_batch(model.input)
    model.export(output, format=format, verbose=False, **options)
