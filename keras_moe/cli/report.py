"""Write a page on what the experts of a preset do with data.

Writes report.html, a page that needs only a browser and no network, its pictures as PNG
files, and report.json. Lists what is wrong with the routers, or that nothing is. The
folder of a run says which data it was tested on; other presets need --data.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras_moe
from keras_moe.cli import _arguments
from keras_moe.cli._devices import add_devices, set_devices
from keras_moe.cli._inputs import (
    PAIR_OPTIONS,
    Examples,
    Model,
    find_examples,
    find_model,
    with_bar,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from keras_moe.report import Report

EXAMPLES = """\
keras-moe report vmoe_fashion --data fashion_mnist --split sample
keras-moe report runs/limoe_emoji --output emoji_report
keras-moe report runs/vmoe --data tfds:cifar10 --examples 10000 --json"""
STYLES = {"good": "green", "notice": "yellow", "problem": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments.add_preset(
        parser, help="The folder of a run of keras-moe train, or any preset."
    )
    _arguments.add_data(parser, " The default is the data of the run.")
    parser.add_argument(
        "--split", help="The split to report on; the run's test split, or test."
    )
    folder = "The folder of the report; an older report there is replaced."
    _arguments.add_output(parser, folder, Path("report"))
    few = "The examples to draw, of all classes alike; by default all are read."
    _arguments.add_count(parser, "--examples", few)
    _arguments.add_count(
        parser, "--show", "The number of examples to show one by one.", 6
    )
    seed = "The seed that draws the examples, those shown and their groups."
    _arguments.add_count(parser, "--seed", seed, 0, 0)
    shown = "The numbers of those to show instead, counted from 0 as they are read."
    _arguments.add_count(parser, "--show-examples", shown, minimum=0, nargs="+")
    _arguments.add_batch_size(parser)
    _arguments.add_overrides(parser)
    _arguments.add_data_options(parser)
    add_devices(parser)


def run(args: argparse.Namespace, console: "Console") -> _arguments.Result:
    import keras

    chosen = find_model(args)
    set_devices(args, chosen.preset, args.batch_size, chosen.overrides)
    written, examples = write_report(chosen, args, console)
    values = {
        "preset": args.preset,
        "data": examples.source,
        "split": examples.split,
        "backend": keras.backend.backend(),
        "examples": written.num_examples,
        "page": str(written.page),
        "json": str(written.data),
        "pictures": [str(path) for path in written.pictures],
        "findings": [finding._asdict() for finding in written.findings],
    }
    return _arguments.Result(
        values, (findings_table(values), f"Report: {written.page}")
    )


def write_report(
    chosen: Model, args: argparse.Namespace, console: "Console"
) -> "tuple[Report, Examples]":
    from keras_moe.report import Options

    model = chosen.load()
    # Of images with labels, nothing reads captions.
    options = ("captions", *PAIR_OPTIONS) if chosen.embeds_pairs else PAIR_OPTIONS[1:]
    examples = find_examples(args, chosen.recipe, options)
    shape: Any = getattr(getattr(model, "backbone", model), "image_shape", None)
    class_names = None
    if chosen.writes_texts:
        rows = model.training_inputs(examples.texts())
        size = args.batch_size
        batches = [
            {name: rows[name][start : start + size] for name in model.input}
            for start in range(0, len(rows["token_ids"]), size)
        ]
    elif not chosen.embeds_pairs:
        batches = examples.images(examples.split, shape, args.batch_size)
        class_names = examples.class_names()
    elif model.preprocessor is None:
        raise ValueError(
            "Expected a preset with a tokenizer, such as the folder of a run of "
            f"keras-moe train; received: preset={args.preset!r} without"
        )
    else:
        batches = examples.pairs(shape, args.batch_size)
    with keras_moe.data.reading_errors():
        written = keras_moe.report.write_report(
            model,
            with_bar(console)(batches, examples.split),
            args.output,
            name=f"{Path(args.preset).name} on {examples.source} {examples.split}",
            class_names=class_names,
            batch_size=args.batch_size,
            max_examples=args.examples,
            options=Options(
                num_examples=args.show,
                seed=args.seed,
                examples=args.show_examples,
                training_batch_size=chosen.recipe.get("batch_size"),
            ),
            command=_arguments.command_line(args),
            credit=keras_moe.data.credit(examples.source),
            verbose=0,
        )
    return written, examples


def findings_table(values: dict) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "finding",
        "",
        title=f"{values['preset']}: routing of {values['examples']:,} examples of "
        f"{values['data']} {values['split']}",
    )
    for finding in values["findings"]:
        level = Text(finding["level"], STYLES[finding["level"]])
        table.add_row(level, finding["text"])
    return table
