"""`keras-moe report`: a page on what the experts of a preset do with data."""

import argparse
from pathlib import Path

import keras
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_moe import data, models
from keras_moe.cli.devices import set_devices
from keras_moe.cli.evaluate_pairs import find_source
from keras_moe.cli.measured import find_images, find_run, has_pairs, shown
from keras_moe.cli.overrides import FIRST, model_overrides
from keras_moe.cli.result import Result, show_all
from keras_moe.report import Options, write_report

_STYLES = {"good": "green", "notice": "yellow", "problem": "red"}


def run(args: argparse.Namespace, console: Console) -> Result:
    """Writes the report, and returns its files and findings."""
    preset, recipe = find_run(args.preset)
    overrides = model_overrides(args.set, {"preset": FIRST})
    of_pairs = has_pairs(preset, overrides)
    before = keras.distribution.distribution()
    try:
        set_devices(args, preset, args.batch_size, overrides)
        if of_pairs:
            model = models.from_preset(preset, **{"task": "contrastive", **overrides})
            batches, source, split = _pairs(args, recipe, model)
            class_names = None
        else:
            model = models.from_preset(preset, **overrides)
            images = find_images(args, recipe)
            source, split = images.source, images.test_split
            shape = getattr(model, "backbone", model).image_shape
            batches = images.batches(split, shape, args.batch_size)
            class_names = images.class_names()
        with data.reading_errors():
            written = write_report(
                model,
                shown(console)(batches, split),
                args.output,
                name=f"{Path(args.preset).name} on {source} {split}",
                class_names=class_names,
                batch_size=args.batch_size,
                max_examples=args.examples,
                options=Options(
                    num_examples=args.show,
                    seed=args.seed,
                    examples=args.show_examples and tuple(args.show_examples),
                ),
                verbose=0,
            )
    finally:
        keras.distribution.set_distribution(before)
    values = {
        "preset": args.preset,
        "data": source,
        "split": split,
        "backend": keras.backend.backend(),
        "examples": written.num_examples,
        "page": str(written.page),
        "json": str(written.data),
        "pictures": [str(path) for path in written.pictures],
        "findings": [finding._asdict() for finding in written.findings],
    }
    return Result(values, show_all(_table(values), f"Report: {written.page}"))


def _pairs(args, recipe, model):
    """The pairs that are asked for, or those of the run."""
    source, recipe = find_source(args, recipe)
    source = args.data or recipe.get("test_source") or source
    if not isinstance(source, str):
        raise ValueError(
            f"Expected --data for a run on a mixture of sources; received: {source}"
        )
    split = args.split or recipe.get("test_split", "test")
    names = ("templates", "unreadable")
    options = {x: recipe[x] for x in names if recipe.get(x) is not None}
    options |= dict(args.data_options)
    if model.preprocessor is None:
        raise ValueError(
            "Expected a preset with a tokenizer, such as the folder of a run of "
            f"keras-moe train; received: preset={args.preset!r} without"
        )
    batches = data.load_pairs(
        source,
        split,
        model.backbone.image_shape,
        args.batch_size,
        shuffle=False,
        data_dir=args.data_dir,
        **options,
    )
    return batches, source, split


def _table(values):
    """The findings."""
    table = Table(
        title=f"{values['preset']}: routing of {values['examples']:,} examples of "
        f"{values['data']} {values['split']}"
    )
    table.add_column("finding")
    table.add_column("")
    for finding in values["findings"]:
        level = Text(finding["level"], _STYLES[finding["level"]])
        # Names of others are no markup.
        table.add_row(level, Text(finding["text"]))
    return table
