"""Trains a model by a recipe, and saves it as a preset.

    python tools/train.py --recipe mumoe_digits
    python tools/train.py --recipe mumoe_mixer_s16 --set preset=mumoe_mixer_s16_tr
    python tools/train.py --recipe mumoe_digits --set epochs=10 --model num_experts=16
    python tools/train.py --recipe mumoe_clip_b32 --data folder:photos

Writes to the output folder: `preset`, which `from_preset` loads; `results.json` with
the settings and what came of each epoch; and `training.png`, the curves.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
# PyTorch's idle threads would spin, and stand still on a machine with other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

import keras
from overrides import parse_override
from results import write_json
from rich.console import Console
from rich.table import Table

import keras_moe
from keras_moe import training
from keras_moe.analysis import plots


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console()
    try:
        run(args, console)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted: what is not trained to its end is lost.", file=sys.stderr)
        return 130
    except Exception as error:
        # An image that cannot be decoded is an error of TensorFlow's own.
        if not type(error).__module__.startswith("tensorflow"):
            raise
        print(f"error: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    names = ", ".join(training.list_recipes())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", required=True, help=f"{names}; or a JSON file")
    parser.add_argument(
        "--data", help="digits, tfds:NAME or folder:PATH in the place of the recipe's"
    )
    parser.add_argument("--data-dir", help="of TensorFlow Datasets")
    parser.add_argument(
        "--output", type=Path, help="a folder; runs/ and the recipe's name by default"
    )
    for name, what in (("--set", "the recipe's settings"), ("--model", "the model's")):
        parser.add_argument(
            name,
            nargs="+",
            action="extend",
            default=[],
            metavar="NAME=VALUE",
            help=f"override {what}; values are JSON, or else strings",
        )
    return parser.parse_args(argv)


def run(args: argparse.Namespace, console: Console) -> None:
    """Trains, and saves what came of it."""
    begin = time.perf_counter()
    overrides = dict(parse_override(text) for text in args.set)
    if args.data is not None:
        overrides["data"] = args.data
    recipe = training.load_recipe(args.recipe, **overrides)
    recipe = recipe.replace(
        model_arguments=dict(parse_override(text) for text in args.model)
    )
    folder = args.output or Path("runs") / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    console.print(settings_table(recipe))

    trained = training.train(recipe, data_dir=args.data_dir)
    trained.model.save_to_preset(folder / "preset")
    backend = keras.backend.backend()
    results = {
        "recipe": recipe.to_dict(),
        "backend": backend,
        "versions": {
            "keras_moe": keras_moe.__version__,
            "keras": keras.__version__,
            backend: importlib.import_module(backend).__version__,
        },
        "parameters": trained.model.count_params(),
        "test_accuracy": trained.test_accuracy,
        "history": trained.history,
        "seconds": time.perf_counter() - begin,
    }
    write_json(folder / "results.json", results)
    # The last, as it needs matplotlib.
    picture = folder / "training.png"
    plots.plot_training_history(
        trained.history, picture, title=f"{recipe.name} on {recipe.data}"
    )
    for name, value in {
        "test accuracy": f"{trained.test_accuracy:.2%}",
        "parameters": f"{results['parameters']:,}",
        "seconds": f"{results['seconds']:.0f}",
        "preset": folder / "preset",
        "results": folder / "results.json",
        "picture": picture,
    }.items():
        console.print(f"{name:<14} {value}", highlight=False)


def settings_table(recipe: training.Recipe) -> Table:
    table = Table(title=f"{recipe.name} on {keras.backend.backend()}")
    table.add_column("setting")
    table.add_column("value", overflow="fold")
    for name, value in recipe.to_dict().items():
        if name != "name" and value != "":
            table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    return table


if __name__ == "__main__":
    sys.exit(main())
