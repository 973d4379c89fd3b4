"""Convert published weights into a preset.

If the source's framework is installed (timm, KerasHub), a test image goes through both
models. The preset is written to a new folder, read again and compared, and only then
takes its place. Its conversion.json says which arrays each weight was made of.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras_moe
from keras_moe import _backends
from keras_moe.cli._arguments import (
    FIRST,
    Result,
    add_count,
    add_flag,
    add_overrides,
    add_target,
    check_target,
    model_overrides,
)

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from keras_moe.models import ConversionReport, MoETask

EXAMPLES = """\
keras-moe convert gs://vmoe_checkpoints/vmoe_s32_last2_ilsvrc2012_randaug_medium out
keras-moe convert hf://timm/vit_base_patch16_224.augreg_in21k out
keras-moe convert ViT-B_16.npz out --set image_shape=[384,384,3]"""
# Largest difference between two frameworks on one image, over the outputs' size; the
# second in half precision.
TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
UNCOMPARED = "not compared with the source's model"
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
    source = "The weights, as keras_moe.models.convert takes them."
    parser.add_argument("source", metavar="SOURCE", help=source)
    add_target(parser)
    add_count(parser, "--num-classes", "The number of classes of a new head.")
    parser.add_argument(
        "--task",
        choices=("backbone", "image_classifier", "contrastive", "causal_lm"),
        help="The kind of model; by default what the source is.",
    )
    tower = "The tower of an image-text model to convert by itself."
    parser.add_argument("--tower", choices=("image", "text"), help=tower)
    add_overrides(parser)
    add_flag(parser, "--no-verify", "Skip all comparisons.")
    add_flag(parser, "--quiet", "Do not print the table of weights.")


def run(args: argparse.Namespace, console: "Console") -> Result:
    from keras_moe.models.saving._preset_folder import staged

    check_target(args.source, args.output)
    overrides = model_overrides(args.set, OWN)
    model, report = convert(args, overrides, console)
    verified = "not compared"
    if not args.no_verify:
        changed = bool(overrides) or args.num_classes is not None
        verified = verify(args.source, report.library, model, changed)
    report = report._replace(notes=[*report.notes, verified])
    # The new preset takes the old one's place after it was read again and compared.
    with staged(args.output) as folder:
        model.save_to_preset(folder)
        if not args.no_verify:
            compare_saved(folder, model)
        report.save(Path(folder) / "conversion.json")
    parameters = model.count_params()
    line = f"{args.output}: {parameters:,} parameters; {verified}"
    values = {"output": str(args.output), "parameters": parameters}
    table = () if args.quiet else (report.print,)
    return Result({**values, **report.to_dict()}, (*table, line))


def convert(
    args: argparse.Namespace, overrides: dict, console: "Console"
) -> "tuple[Any, ConversionReport]":
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


# Comparison with the source's own model, on one image


class Uncompared(Exception):
    """The reason why the source's own model cannot be asked."""


def verify(source: str, library: str, model: "MoETask", changed: bool) -> str:
    """Compares with the source's own model, where that is possible."""
    import numpy as np

    from keras_moe.training._upcycled import example_inputs

    if changed:
        return f"{UNCOMPARED}: arguments were overridden"
    images = example_inputs(getattr(model, "backbone", model))
    if isinstance(images, dict):
        return f"{UNCOMPARED}: this program compares images alone"
    expected = None
    if library == "KerasHub":
        expected = keras_hub_outputs(source, images)
    elif library == "timm":
        if not all(map(importlib.util.find_spec, ("timm", "torch"))):
            return f"{UNCOMPARED}: timm is not installed here"
        try:
            expected = timm_outputs(source, images)
        except Uncompared as error:
            return f"{UNCOMPARED}: {error}"
    if expected is None:
        return f"{UNCOMPARED}: this program has no way to run it"
    outputs = model.predict(images, verbose=0)
    if outputs.shape != expected.shape:
        return f"{UNCOMPARED}, which has another head"
    difference = np.abs(outputs - expected).max() / max(np.abs(expected).max(), 1e-6)
    half = "16" in model.dtype_policy.compute_dtype
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    if not difference < tolerance:
        raise ValueError(
            f"Expected the source's outputs within {tolerance} of their size; "
            f"received: {difference:.2g}"
        )
    return f"outputs equal the source's own model within {difference:.1g} of their size"


def timm_outputs(source: str, images: "np.ndarray") -> "np.ndarray":
    """The outputs of timm's model, run in another process on files without pickles."""
    import numpy as np

    from keras_moe.models.conversion import image_normalization, open_folder

    if not os.path.isdir(source) and not source.startswith("hf://"):
        raise Uncompared("a file without its folder does not tell timm's architecture")
    file, config = open_folder(source)
    with file:
        files = sorted({file[name].file for name in file})
    if "architecture" not in config:
        raise Uncompared("no config tells timm's architecture")
    cfg = config.get("pretrained_cfg", {})
    sizes = {k: cfg[k] for k in ("input_size", "fixed_input_size") if k in cfg}
    arguments = {k: config[k] for k in ("num_classes", "global_pool") if k in config}
    arguments.update(config.get("model_args", {}), pretrained_cfg_overlay=sizes)
    mean, std = image_normalization(config, images.shape[-1]) or (0.5, 0.5)
    pixels = ((images + 1) / 2 - np.array(mean)) / np.array(std)
    request = {
        "architecture": config["architecture"],
        "arguments": arguments,
        "files": [os.path.abspath(path) for path in files],
    }
    program = Path(_backends.__file__).with_name("timm_outputs.py")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        np.save(folder / "images.npy", pixels.transpose(0, 3, 1, 2).astype("float32"))
        # -P: the modules beside the program have the names of backends.
        command = [sys.executable, "-P", str(program), str(folder)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            status = f"status {result.returncode}"
            reason = [status, *result.stderr.strip().splitlines()][-1]
            raise Uncompared(f"timm failed with {reason}")
        return np.load(folder / "outputs.npy", allow_pickle=False)


def keras_hub_outputs(source: str, images: "np.ndarray") -> "np.ndarray":
    """The outputs of KerasHub's model: the classifier's, if the preset has one."""
    import keras

    from keras_moe.models.conversion import hub_model

    other = hub_model(source)
    if hasattr(other, "get_vision_embeddings"):
        outputs = other.get_vision_embeddings(images)
    elif isinstance(other.input, dict):
        outputs = other({"images": images})
    else:
        # Not `predict`: a task's preprocessor would change the images.
        outputs = other(images)
    return keras.ops.convert_to_numpy(outputs)


def compare_saved(preset: str, model: "MoETask") -> None:
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
