"""Trains a model by a recipe, and saves it as a preset.

    python tools/train.py --recipe mumoe_digits
    python tools/train.py --recipe mumoe_mixer_s16 --set model.preset=mumoe_mixer_s16_tr
    python tools/train.py --recipe mumoe_digits --set schedule.epochs=10 \
        model.num_experts=16
    python tools/train.py --recipe mumoe_clip_b32 --data folder:photos
    python tools/train.py --recipe vmoe_b16_i21k --data tfrecord:photos --devices all

The same command again goes on with a run that was ended, whatever ended it, from its
newest checkpoint; --restart begins anew, --extend goes on after its end:

    python tools/train.py --recipe mumoe_digits --set schedule.epochs=40 --extend
    python tools/train.py --recipe mumoe_digits --set schedule.patience=5 \
        schedule.best=restore

Writes to the output folder: `preset`, which `from_preset` loads; `results.json` with
the settings and what came of each epoch; `training.png`, the curves; `checkpoints`; and
of models with experts `router_health.csv`, its picture, and, where tensorboardX is
installed, `tensorboard`.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
# PyTorch's idle threads would spin, and stand still on a machine with other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

import keras
import numpy as np
from devices import add_device_arguments, set_devices, start_processes
from overrides import parse_override
from rich.console import Console
from rich.table import Table

import keras_moe
from keras_moe import data, training
from keras_moe.analysis import plots
from keras_moe.files import write_json


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console()
    try:
        run(args, console)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\nInterrupted: the same command goes on from the last checkpoint.",
            file=sys.stderr,
        )
        return 130
    except Exception as error:
        # An image that cannot be read is a ValueError in training, but not when it is
        # met elsewhere.
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
    parser.add_argument(
        "--recipe", required=True, help=f"{names}; or a TOML or JSON file"
    )
    parser.add_argument(
        "--data",
        help="digits, tfds:NAME, tfrecord:GLOB or folder:PATH in the place of the "
        "recipe's",
    )
    parser.add_argument("--data-dir", help="of TensorFlow Datasets")
    parser.add_argument(
        "--output", type=Path, help="a folder; runs/ and the recipe's name by default"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="STEPS",
        help="steps between checkpoints; by default one at each epoch's end",
    )
    parser.add_argument("--keep-checkpoints", type=int, default=3, metavar="N")
    parser.add_argument(
        "--keep-every",
        type=int,
        metavar="STEPS",
        help="checkpoints of these steps stay, too, for branches and soups",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="remove the checkpoints of an earlier run, and begin anew",
    )
    parser.add_argument(
        "--extend",
        action="store_true",
        help="go on with a run for more epochs or steps than it had, as --set says; "
        "--set schedule.schedule_steps=N leaves its learning rate as it was",
    )
    parser.add_argument(
        "--health-every",
        type=int,
        default=1,
        metavar="EPOCHS",
        help="look at the routers every so many epochs; 0 never",
    )
    parser.add_argument(
        "--few-shot-every",
        type=int,
        default=0,
        metavar="EPOCHS",
        help="few-shot accuracy every so many epochs; 0 never",
    )
    parser.add_argument("--shots", type=int, nargs="+", default=[5, 10])
    parser.add_argument(
        "--few-shot-data",
        help="images with splits train and test; the recipe's by default",
    )
    parser.add_argument(
        "--branch-from",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint of another run to begin with",
    )
    parser.add_argument(
        "--cooldown",
        type=int,
        metavar="STEPS",
        help="with --branch-from: let the learning rate fall for so many steps",
    )
    add_device_arguments(parser)
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="SECTION.NAME=VALUE",
        help="override settings of the recipe, such as schedule.epochs=3 or "
        "model.num_experts=8; values are JSON, or else strings",
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace, console: Console) -> None:
    """Trains, and saves what came of it."""
    begin = time.perf_counter()
    start_processes(args)
    overrides = dict(parse_override(text) for text in args.set)
    if args.data is not None:
        overrides["data.source"] = args.data
    recipe = training.load_recipe(args.recipe, **overrides)
    recipe = branch(args, recipe)
    folder = args.output or Path("runs") / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    number, num_processes = data.process_shard()
    if num_processes > 1 and args.few_shot_every:
        raise ValueError(
            "Expected --few-shot-every 0 with several processes, none of which has all "
            "outputs of a model; received: "
            f"--few-shot-every {args.few_shot_every}, processes={num_processes}"
        )
    if number == 0:
        console.print(settings_table(recipe))

    checkpoints = folder / "checkpoints"
    before = keras.distribution.distribution()
    try:
        set_devices(
            args,
            recipe.model.preset,
            recipe.data.batch_size // recipe.optimizer.gradient_accumulation_steps,
            **recipe.model.overrides,
        )
        trained = training.train(
            recipe,
            data_dir=args.data_dir,
            callbacks=lambda model, datasets: watchers(
                args, recipe, folder, model, datasets
            ),
            checkpoint_dir=checkpoints,
            checkpoint_every=args.checkpoint_every,
            keep_checkpoints=args.keep_checkpoints,
            keep_every=args.keep_every,
            resume=not args.restart,
            branch_from=args.branch_from,
            extend=args.extend,
            verbose="auto" if number == 0 else 0,
        )
    finally:
        keras.distribution.set_distribution(before)
    if number:
        return
    if num_processes > 1:
        # No process has all weights; their pieces are in the last checkpoint.
        trained = training.train(
            recipe, data_dir=args.data_dir, checkpoint_dir=checkpoints
        )
    trained.model.save_to_preset(folder / "preset")
    # Of all lives of the run.
    watched = training.find_checkpoint(checkpoints).state["callbacks"]
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
        "metric": recipe.objective.headline.metric,
        "score": trained.score,
        "history": trained.history,
        "router_health": watched.get("RouterHealth 1", {}).get("layers", []),
        "evaluations": watched.get("PeriodicEvaluation 1", {}).get("records", []),
        "seconds": time.perf_counter() - begin,
    }
    write_json(folder / "results.json", results)
    # The last, as it needs matplotlib.
    picture = folder / "training.png"
    title = f"{recipe.name} on {recipe.data.source}"
    # What callbacks measured has a slash in its name.
    curves = {name: x for name, x in trained.history.items() if "/" not in name}
    plots.plot_training_history(curves, picture, title=title)
    if results["router_health"]:
        plots.plot_router_health(
            folder / "router_health.csv", folder / "router_health.png", title=title
        )
    for name, value in {
        recipe.objective.headline.metric: f"{trained.score:.4f}",
        "parameters": f"{results['parameters']:,}",
        "seconds": f"{results['seconds']:.0f}",
        "preset": folder / "preset",
        "results": folder / "results.json",
        "picture": picture,
    }.items():
        console.print(f"{name:<18} {value}", highlight=False)


def branch(args: argparse.Namespace, recipe: training.Recipe) -> training.Recipe:
    """The recipe of a cooldown, if --cooldown asks for one."""
    if args.cooldown is None:
        return recipe
    if args.branch_from is None:
        raise ValueError("Expected --branch-from with --cooldown")
    batches = training.open_checkpoint(args.branch_from).step
    accumulated = recipe.optimizer.gradient_accumulation_steps
    start, rest = divmod(batches, accumulated)
    if rest:
        raise ValueError(
            "Expected a checkpoint after an update of the weights, every "
            f"{accumulated} batches; received: {batches} batches"
        )
    return training.cooldown_branch(recipe, start, args.cooldown)


def watchers(
    args: argparse.Namespace,
    recipe: training.Recipe,
    folder: Path,
    model: keras.Model,
    datasets: training.Datasets,
) -> list[keras.callbacks.Callback]:
    """What looks at the model now and then."""
    found = []
    if data.process_shard()[1] > 1:
        # Keras's `predict` reads outputs that no process has as a whole.
        return found
    if args.health_every and model.routing:
        images, _ = next(iter(datasets.test))
        has_tensorboard = importlib.util.find_spec("tensorboardX") is not None
        found.append(
            training.RouterHealth(
                np.asarray(images),
                every=args.health_every,
                csv_path=folder / "router_health.csv",
                tensorboard=folder / "tensorboard" if has_tensorboard else None,
            )
        )
    if args.few_shot_every:
        source = args.few_shot_data or recipe.data.source
        splits = ("train", "test")
        if args.few_shot_data is None:
            splits = (recipe.data.train_split, recipe.data.test_split)
        pools = [
            data.load(
                source,
                split,
                model.backbone.image_shape,
                shuffle=False,
                data_dir=args.data_dir,
            )
            for split in splits
        ]
        few_shot = training.FewShot(*pools, shots=args.shots)
        found.append(
            training.PeriodicEvaluation({"few_shot": few_shot}, args.few_shot_every)
        )
    return found


def settings_table(recipe: training.Recipe) -> Table:
    table = Table(title=f"{recipe.name} on {keras.backend.backend()}")
    table.add_column("setting")
    table.add_column("value", overflow="fold")
    for name, value in recipe.settings().items():
        if name != "name" and value != "":
            table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    return table


if __name__ == "__main__":
    sys.exit(main())
