"""`keras-moe train`: a model trained by a recipe, and what came of it on disk."""

import argparse
import dataclasses
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe import data, models, training
from keras_moe.analysis import plots
from keras_moe.cli import train_evaluators
from keras_moe.cli.devices import set_devices, start_processes
from keras_moe.cli.result import Result
from keras_moe.cli.versions import backend_and_versions
from keras_moe.evaluation import sample_shots
from keras_moe.files import write_json
from keras_moe.processes import gathered_batch
from keras_moe.report import Report, write_report
from keras_moe.report.writing import import_jinja2


def run(args: argparse.Namespace, console: Console) -> Result | None:
    """Trains, and saves the model, the results and the pictures."""
    begin = time.perf_counter()
    check_options(args)
    start_processes(args)
    recipe = branch(args, load_recipe(args))
    folder = args.output or Path("runs") / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    number, _ = data.process_shard()
    if number == 0:
        console.print(settings_table(recipe))
    trained, test = fit(args, recipe, folder)
    if number:
        return None
    # First, since all else can be made again.
    card = card_of(recipe, trained)
    trained.model.save_to_preset(folder / "preset", card=card)
    results = results_of(recipe, trained, folder)
    results["seconds"] = time.perf_counter() - begin
    write_json(folder / "results.json", results)
    try:
        draw(results, f"{recipe.name} on {recipe.data.source}", folder)
    except ImportError as error:
        # Pictures need an extra; the results are there without.
        console.print(f"no pictures: {error}")
    written = report(args, recipe, trained, test, folder, console)
    if written and written.pictures:
        card = dataclasses.replace(card, picture=written.pictures[0])
        card.write(trained.model, folder / "preset", recipe.name)

    def show(console: Console) -> None:
        for name, value in {
            results["metric"]: f"{results['score']:.4f}",
            "parameters": f"{results['parameters']:,}",
            "seconds": f"{results['seconds']:.0f}",
            "preset": folder / "preset",
            "results": folder / "results.json",
            "picture": folder / "training.png",
            **({"report": written.page} if written else {}),
        }.items():
            console.print(f"{name:<18} {value}", highlight=False)

    return Result(results, show)


def check_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options that would have no effect."""
    if args.restart and args.extend:
        raise ValueError(
            "Expected --restart, which removes the earlier run, or --extend, which "
            "continues it; received: both"
        )
    if args.report_examples:
        # Before the training, at whose end the report is.
        import_jinja2()
    few_shot = {"--shots": args.shots, "--few-shot-data": args.few_shot_data}
    names = [name for name, value in few_shot.items() if value is not None]
    if names and not args.few_shot_every:
        raise ValueError(
            f"Expected --few-shot-every with {' and '.join(names)}; received: "
            f"--few-shot-every {args.few_shot_every}"
        )


def load_recipe(args: argparse.Namespace) -> training.Recipe:
    """The recipe, with what the command line overrides."""
    overrides = dict(args.recipe_set)
    overrides |= {f"model.{name}": value for name, value in args.set}
    if args.data is not None:
        overrides["data.source"] = args.data
    if args.preset is not None:
        overrides["model.preset"] = args.preset
    # Not as arguments of `load_recipe`, which has others of its own.
    return training.load_recipe(args.recipe).replace(**overrides)


def fit(
    args: argparse.Namespace, recipe: training.Recipe, folder: Path
) -> tuple[training.Training, Any]:
    """Trains, on the devices that are asked for; with the batches of the test data."""
    number, num_processes = data.process_shard()
    checkpoints = folder / "checkpoints"
    before = keras.distribution.distribution()
    test = []

    def callbacks(model, datasets):
        test.append(datasets.test)
        return watchers(args, recipe, folder, model, datasets)

    try:
        set_devices(
            args,
            recipe.model.preset,
            recipe.data.batch_size // recipe.optimizer.gradient_accumulation_steps,
            {"load_weights": recipe.model.load_weights, **recipe.model.overrides},
        )
        trained = training.train(
            recipe,
            data_dir=args.data_dir,
            callbacks=callbacks,
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
    if num_processes > 1 and number == 0:
        # No process has all weights; their pieces are in the last checkpoint.
        trained = training.train(
            recipe,
            data_dir=args.data_dir,
            checkpoint_dir=checkpoints,
            # Where nothing was left to train, the checkpoints are still the old run's.
            extend=args.extend,
        )
    return trained, test[0] if test else None


def report(
    args: argparse.Namespace,
    recipe: training.Recipe,
    trained: training.Training,
    test: Any,
    folder: Path,
    console: Console,
) -> Report | None:
    """The report on the routing of the test data, if it is asked for.

    A run whose report fails has trained all the same: the console says why there is
    none.
    """
    if not args.report_examples or not getattr(trained.model, "routing", None):
        return None
    try:
        return write_report(
            trained.model,
            test,
            folder / "report",
            name=f"{recipe.name} on {recipe.data.evaluated_source} "
            f"{recipe.data.test_split}",
            max_examples=args.report_examples,
            verbose=0,
        )
    except Exception as error:
        text = f"warning: no report, since it failed: {type(error).__name__}: {error}"
        console.print(
            f"{text}\nThe model is in {folder / 'preset'}; `keras-moe report {folder}` "
            "makes a report of it.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return None


def card_of(recipe: training.Recipe, trained: training.Training) -> models.ModelCard:
    """The page of the trained model: its recipe, data and score."""
    score = models.CardResult(
        recipe.objective.monitor.metric,
        trained.score,
        recipe.data.evaluated_source,
        recipe.data.test_split,
    )
    settings = recipe.settings()
    return models.ModelCard(
        name=recipe.name,
        description=recipe.description,
        data=recipe.data.source,
        recipe={k: v for k, v in settings.items() if k not in ("name", "description")},
        results=[score],
        picture_text="The load of each expert on the test data",
    )


def results_of(
    recipe: training.Recipe, trained: training.Training, folder: Path
) -> dict:
    """The settings, and what came of all lives of the run."""
    state = training.find_checkpoint(folder / "checkpoints").state["callbacks"]
    return {
        "recipe": recipe.to_dict(),
        **backend_and_versions(),
        "parameters": trained.model.count_params(),
        "metric": recipe.objective.monitor.metric,
        "score": trained.score,
        "history": trained.history,
        "router_health": state.get("RouterHealth 1", {}).get("layers", []),
        "evaluations": [
            record
            for number in (1, 2)
            for record in state.get(f"PeriodicEvaluation {number}", {}).get(
                "records", []
            )
        ],
    }


def draw(results: dict, title: str, folder: Path) -> None:
    """Draws the curves, and how the routers did."""
    # Figures of callbacks have a slash in their names.
    curves = {name: x for name, x in results["history"].items() if "/" not in name}
    plots.plot_training_history(curves, folder / "training.png", title=title)
    if results["router_health"]:
        plots.plot_router_health(
            folder / "router_health.csv", folder / "router_health.png", title=title
        )


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
    """Callbacks that evaluate the model at regular intervals."""
    callbacks = []
    if args.health_every and model.routing:
        # Each process has read a part.
        images, _ = gathered_batch(next(iter(datasets.test)))
        has_tensorboard = importlib.util.find_spec("tensorboardX") is not None
        callbacks.append(
            training.RouterHealth(
                images,
                every=args.health_every,
                csv_path=folder / "router_health.csv",
                tensorboard=folder / "tensorboard" if has_tensorboard else None,
            )
        )
    if args.few_shot_every:
        source = args.few_shot_data or recipe.data.source
        if not isinstance(source, str):
            raise ValueError(
                "Expected --few-shot-data with --few-shot-every on a mixture of "
                f"sources; received: {source}"
            )
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
        options = {} if args.shots is None else {"shots": args.shots}
        few_shot = training.FewShot(*pools, **options)
        if source.partition(":")[0] == "emoji":
            # Some of its classes have fewer pictures than a few shots: not after an
            # epoch.
            labels = np.concatenate([np.asarray(labels) for _, labels in pools[0]])
            shots = max(few_shot.options["shots"])
            sample_shots(labels, shots, int(labels.max()) + 1)
        callbacks.append(
            training.PeriodicEvaluation({"few_shot": few_shot}, args.few_shot_every)
        )
    if args.retrieval_every:
        retrieval = train_evaluators.retrieval(args, recipe, model)
        callbacks.append(
            training.PeriodicEvaluation({"retrieval": retrieval}, args.retrieval_every)
        )
    return callbacks


def settings_table(recipe: training.Recipe) -> Table:
    table = Table(title=f"{recipe.name} on {keras.backend.backend()}")
    table.add_column("setting")
    table.add_column("value", overflow="fold")
    for name, value in recipe.settings().items():
        if name != "name" and value != "":
            table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    return table
