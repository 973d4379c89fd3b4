"""Converts weights that others have published into a preset of this library.

    python tools/convert.py \\
        gs://vmoe_checkpoints/vmoe_s32_last2_ilsvrc2012_randaug_medium out
    python tools/convert.py hf://timm/vit_base_patch16_224.augreg_in21k out
    python tools/convert.py ViT-B_16.npz out --set image_shape=[384,384,3]

Where the source's framework is installed (timm, KerasHub), a test image goes through
both models. The preset is written beside its place, read again and compared, and takes
its place only then. The folder gets a conversion.json that says what each weight was
made of.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from overrides import parse_override
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from keras_moe import models
from keras_moe.models.conversion import sources
from keras_moe.models.conversion.timm_names import image_normalization
from keras_moe.models.preset_folder import is_preset, staged

# Of the difference between two frameworks on one image, by the outputs' size; the
# second in half precision.
TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
# Arguments of `models.convert` that this program sets, and what sets them here.
OWN = {
    "source": "the first argument",
    "num_classes": "--num-classes",
    "task": "--task",
    "load_weights": "this program",
    "progress": "this program",
}
UNCOMPARED = "not compared with the source's model"
TIMM_SECONDS = 1800


class Uncompared(Exception):
    """The reason why the source's own model cannot be asked."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="see keras_moe.models.convert")
    parser.add_argument("out_preset", help="the folder of the new preset")
    parser.add_argument("--num-classes", type=int, help="a new head")
    parser.add_argument("--task", choices=("backbone", "image_classifier"))
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="override arguments; values are JSON, or else strings",
    )
    parser.add_argument("--no-verify", action="store_true", help="compare nothing")
    parser.add_argument("--quiet", action="store_true", help="print no table")
    args = parser.parse_args(argv)
    console = Console()
    try:
        check_target(args.source, args.out_preset)
        overrides = dict(parse_override(text) for text in args.set)
        check_overrides(overrides)
        model, report = convert(args, overrides, console)
        verified = "not compared"
        if not args.no_verify:
            changed = bool(overrides) or args.num_classes is not None
            verified = verify(args.source, report.scheme, model, changed)
        report = report._replace(notes=[*report.notes, verified])
        # Only what was read again and compared takes the target's place.
        with staged(args.out_preset) as folder:
            model.save_to_preset(folder)
            if not args.no_verify:
                compare_saved(folder, model)
            report.save(Path(folder) / "conversion.json")
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if not args.quiet:
        report.print(console)
    console.print(
        f"{args.out_preset}: {model.count_params():,} parameters; {verified}",
        markup=False,
    )
    return 0


def check_target(source: str, out_preset: str) -> None:
    """Refuses before the work what saving would refuse after it, and the source."""
    target = Path(out_preset).expanduser().resolve()
    if target == Path(source).expanduser().resolve():
        raise ValueError(
            "Expected another folder than the source, which saving would replace; "
            f"received: {out_preset}"
        )
    is_other = target.is_dir() and any(target.iterdir()) and not is_preset(target)
    if is_other or (target.exists() and not target.is_dir()):
        raise ValueError(
            f"Expected a new folder or an older preset; received: {out_preset}"
        )
    above = next(path for path in target.parents if path.exists())
    if not above.is_dir():
        raise ValueError(
            f"Expected a folder to write {out_preset} to; received: {above}, a file"
        )


def check_overrides(overrides: dict) -> None:
    """Refuses the arguments that this program sets itself."""
    for name in overrides:
        if name in OWN:
            raise ValueError(
                f"Expected arguments of the model in --set; received: {name}=..., "
                f"which {OWN[name]} sets"
            )


def convert(args, overrides: dict, console: Console):
    """`models.convert` with a progress bar."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("opening", total=None)

        def show(done, total, name):
            progress.update(task, completed=done, total=total, description=name)

        return models.convert(
            args.source,
            num_classes=args.num_classes,
            task=args.task,
            progress=show,
            **overrides,
        )


def test_image(model: keras.Model) -> np.ndarray:
    """One image (1, height, width, channels) in [-1, 1], always the same."""
    shape = (1, *model.input_shape[1:])
    return np.random.default_rng(0).uniform(-1, 1, shape).astype("float32")


def verify(source: str, scheme: str, model: keras.Model, changed: bool) -> str:
    """Compares with the source's own model, where that is possible.

    Raises:
        ValueError: if they differ.
    """
    if changed:
        return f"{UNCOMPARED}: arguments were overridden"
    images = test_image(model)
    expected = None
    if scheme.endswith("(KerasHub)"):
        expected = keras_hub_outputs(source, images)
    elif scheme.endswith("(timm)"):
        if not all(map(importlib.util.find_spec, ("timm", "torch"))):
            return f"{UNCOMPARED}: timm is not installed here"
        try:
            expected = timm_outputs(source, images)
        except Uncompared as error:
            return f"{UNCOMPARED}: {error}"
    if expected is None:
        return f"{UNCOMPARED}: this program has no way to run it"
    found = model.predict(images, verbose=0)
    if found.shape != expected.shape:
        return f"{UNCOMPARED}, which has another head"
    difference = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6)
    half = "16" in model.compute_dtype
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    if not difference < tolerance:
        raise ValueError(
            f"Expected the source's outputs within {tolerance} of their size; "
            f"received: {difference:.2g}"
        )
    return f"outputs equal the source's own model within {difference:.1g} of their size"


def timm_outputs(source: str, images: np.ndarray) -> np.ndarray:
    """What timm's model gives, which runs in a process of its own.

    It gets the files that our own reader opened: timm's loader may take a pickle,
    whose reading runs the code in it.

    Raises:
        Uncompared: if timm cannot run it.
    """
    if not os.path.isdir(source) and not source.startswith("hf://"):
        raise Uncompared("a file without its folder does not tell timm's architecture")
    file, config = sources.open_folder(source)
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
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        np.save(folder / "images.npy", pixels.transpose(0, 3, 1, 2).astype("float32"))
        run_timm(folder)
        return np.load(folder / "outputs.npy", allow_pickle=False)


def run_timm(folder: Path) -> None:
    """Runs `timm_outputs.py` on a request.

    Raises:
        Uncompared: if it fails, is killed by a signal or takes too long.
    """
    program = Path(__file__).with_name("timm_outputs.py")
    command = [sys.executable, str(program), str(folder)]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMM_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise Uncompared(f"timm took more than {TIMM_SECONDS} s") from error
    if result.returncode < 0:
        name = signal.Signals(-result.returncode).name
        raise Uncompared(f"timm's process was ended by {name}")
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Uncompared(f"timm failed with {reason}")


def keras_hub_outputs(source: str, images: np.ndarray) -> np.ndarray | None:
    """What KerasHub's model gives: of a classifier's preset the classifier."""
    other = sources.hub_model(source)
    if hasattr(other, "get_vision_embeddings"):
        outputs = other.get_vision_embeddings(images)
    elif isinstance(other.input, dict):
        outputs = other({"images": images})
    else:
        # Not `predict`: a task's preprocessor would change the images.
        outputs = other(images)
    return keras.ops.convert_to_numpy(outputs)


def compare_saved(preset: str, model: keras.Model) -> None:
    """Reads the preset again: it must be the model that was saved."""
    images = test_image(model)
    again = models.from_preset(str(preset))
    if not np.allclose(
        again.predict(images, verbose=0), model.predict(images, verbose=0), atol=1e-5
    ):
        raise ValueError(f"Expected the saved model back from {preset}; it differs")


if __name__ == "__main__":
    sys.exit(main())
