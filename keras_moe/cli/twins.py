"""Find out whether experts help on your data.

Trains the model of a recipe, a dense one of equal FLOPs and one of equal parameters,
from several seeds on the same batches. Training images that are held out choose each
model's learning rate; the test images are read once, at the end.

Writes `twins.json` and, with the extra `plots`, the errors over the costs as
`twins.png` to the output folder. The same command again resumes where it ended.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import keras_moe
from keras_moe.cli import _arguments
from keras_moe.cli._inputs import progress_shown
from keras_moe.cli.train import load_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from keras_moe.training import Twins

EXAMPLES = """\
keras-moe twins vmoe_digits
keras-moe twins vmoe_digits --data folder:PHOTOS --seeds 5 --output runs/photos-twins
keras-moe twins vmoe_s32_i1k --data tfds:imagenette --rates 5e-4 1e-3 2e-3 4e-3"""
INTERRUPTED = _arguments.RESUMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    recipe = "The recipe: a name, or a TOML or JSON file."
    parser.add_argument("recipe", metavar="RECIPE", help=recipe)
    _arguments.add_preset(parser, "--preset", help="Another model than the recipe's.")
    _arguments.add_data(parser, " The default is the data of the recipe.")
    _arguments.add_overrides(parser)
    _arguments.add_overrides(
        parser, "--recipe-set", "settings of the recipe", "schedule.epochs=10"
    )
    _arguments.add_length(parser.add_argument_group("settings that recipes have, too"))
    _arguments.add_count(parser, "--seeds", "The number of seeds of each model.", 3)
    parser.add_argument(
        "--rates",
        type=_arguments.positive,
        nargs="+",
        metavar="RATE",
        help="The learning rates of which each model gets the best; by default half of "
        "the recipe's, that, and twice as much.",
    )
    parser.add_argument(
        "--held-out",
        type=_arguments.positive,
        default=0.1,
        metavar="N",
        help="The number of training images to choose by, or below 1 their share.",
    )
    steps = "The number of training steps to measure; 0 for none."
    _arguments.add_count(parser, "--timed-steps", steps, 20, 0)
    folder = "The folder of the runs; by default runs/, the recipe's name and -twins."
    _arguments.add_output(parser, folder)


def run(args: argparse.Namespace, console: "Console") -> _arguments.Result:
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

    recipe = load_recipe(args)
    folder = args.output or Path("runs") / f"{recipe.name}-twins"
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    last = None
    with progress_shown(console, "twins", "{task.description}", *columns) as show:

        def progress(done: int, total: int, text: str) -> None:
            nonlocal last
            show(done, total, text)
            if done != last and text and not console.is_terminal:
                # A line for each run, since the bar is not shown.
                console.print(f"{done + 1} of {total}: {text}", highlight=False)
            last = done

        result = keras_moe.training.twins(
            recipe,
            folder,
            args.seeds,
            args.rates,
            args.held_out,
            args.timed_steps,
            args.data_dir,
            progress,
        )
    rows = [f"{'results':<18} {folder / 'twins.json'}"]
    try:
        draw(result, folder / "twins.png")
        rows.append(f"{'picture':<18} {folder / 'twins.png'}")
    except ImportError as error:
        # Pictures need an extra; the results are there without.
        console.print(f"no picture: {error}")
    return _arguments.Result(
        result.to_dict(), (result.table(), *rows, f"\n{result.sentence}")
    )


def draw(result: "Twins", path: Path) -> None:
    from keras_moe.analysis import plots

    errors = {
        name: [1 - run["accuracy"] for run in twin.runs]
        for name, twin in result.models.items()
    }
    costs = {
        "forward MFLOPs of an image": {n: x.mflops for n, x in result.models.items()}
    }
    steps = {n: x.step_ms for n, x in result.models.items() if x.step_ms is not None}
    if steps:
        costs["time of a training step, ms"] = steps
    plots.plot_errors_over_costs(errors, costs, path, f"Twins on {result.source}")
