"""Converts weights that others have published into a preset of this library.

    python tools/convert.py \\
        gs://vmoe_checkpoints/vmoe_s32_last2_ilsvrc2012_randaug_medium out
    python tools/convert.py hf://timm/vit_base_patch16_224.augreg_in21k out
    python tools/convert.py ViT-B_16.npz out --set image_shape=[384,384,3]

The preset is written whole or not at all, read again and compared. Where the source's
framework is installed (timm, KerasHub), a test image goes through both models. The
folder gets a conversion.json that says what each weight was made of.
"""

import argparse
import os
import sys
from pathlib import Path

import keras
import numpy as np
from describe import parse_override
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from keras_moe import models

# Of the difference between two frameworks on one image, by the outputs' size.
TOLERANCE = 1e-3


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
        check_target(args.out_preset)
        overrides = dict(parse_override(text) for text in args.set)
        model, report = convert(args, overrides, console)
        verified = "not compared"
        if not args.no_verify:
            verified = verify(args.source, model, console, bool(overrides))
        model.save_to_preset(args.out_preset)
        if not args.no_verify:
            compare_saved(args.out_preset, model)
    except (ImportError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report = report._replace(notes=[*report.notes, verified])
    report.save(Path(args.out_preset) / "conversion.json")
    if not args.quiet:
        report.print(console)
    console.print(
        f"{args.out_preset}: {model.count_params():,} parameters; {verified}",
        markup=False,
    )
    return 0


def check_target(out_preset: str) -> None:
    """Refuses before the work what saving would refuse after it."""
    target = Path(out_preset)
    is_other = target.is_dir() and any(target.iterdir())
    if target.is_file() or (is_other and not (target / "config.json").is_file()):
        raise ValueError(
            f"Expected a new folder or an older preset; received: {out_preset}"
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


def verify(source: str, model: keras.Model, console: Console, changed: bool) -> str:
    """Compares with the source's own model, where that is possible.

    Raises:
        ValueError: if they differ.
    """
    if changed:
        return "not compared with the source's model: arguments were overridden"
    images = test_image(model)
    expected = timm_outputs(source, images)
    if expected is None:
        expected = keras_hub_outputs(source, images)
    if expected is None:
        return "not compared with the source's model, which is not installed here"
    found = model.predict(images, verbose=0)
    if found.shape != expected.shape:
        return "not compared with the source's model, which has another head"
    difference = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6)
    if not difference < TOLERANCE:
        raise ValueError(
            f"Expected the source's outputs within {TOLERANCE} of their size; "
            f"received: {difference:.2g}"
        )
    return f"outputs equal the source's own model within {difference:.1g} of their size"


def timm_outputs(source: str, images: np.ndarray) -> np.ndarray | None:
    """What timm's model gives, or None without timm or for another source."""
    try:
        import timm
        import torch
    except ImportError:
        return None
    name = source
    if os.path.isdir(source):
        name = f"local-dir:{source}"
    elif source.startswith("hf://"):
        name = f"hf-hub:{source.removeprefix('hf://')}"
    else:
        return None
    try:
        other = timm.create_model(name, pretrained=True).eval()
    except (RuntimeError, KeyError, ValueError, FileNotFoundError):
        return None
    cfg = other.pretrained_cfg
    pixels = (images + 1) / 2
    pixels = (pixels - np.array(cfg["mean"])) / np.array(cfg["std"])
    with torch.no_grad():
        pixels = torch.from_numpy(pixels.astype("float32")).permute(0, 3, 1, 2)
        return other(pixels.cpu()).cpu().numpy()


def keras_hub_outputs(source: str, images: np.ndarray) -> np.ndarray | None:
    """What KerasHub's model gives, or None for another source."""
    import keras_hub

    try:
        other = keras_hub.models.Backbone.from_preset(source)
    except (ValueError, FileNotFoundError, OSError, KeyError):
        return None
    if isinstance(other, keras_hub.models.ViTBackbone):
        return other.predict(images, verbose=0)
    if hasattr(other, "get_vision_embeddings"):
        return keras.ops.convert_to_numpy(other.get_vision_embeddings(images))
    return None


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
