"""Train a model by a recipe, and save it as a preset.

The same command again resumes a run that ended early, for whatever reason, from its
newest checkpoint; --restart begins anew, and --extend continues beyond its end.

Writes to the output folder: `preset`, which from_preset loads; `results.json` with the
settings and the history; `training.png`, the curves; `checkpoints`; and for models with
experts `router_health.csv` and its picture, `tensorboard` if tensorboardX is installed,
and with --report-examples `report`.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import math
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras_moe
from keras_moe._errors import unfit
from keras_moe.cli import _arguments, _devices

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from keras_moe.models import ModelCard, MoETask
    from keras_moe.report import Report
    from keras_moe.training import Recipe
    from keras_moe.training.data_sections import Datasets
    from keras_moe.training.run import Training

EXAMPLES = """\
keras-moe train --list
keras-moe train mumoe_digits
keras-moe train finetune --data folder:PHOTOS --preset vmoe_digits
keras-moe train mumoe_digits --epochs 10 --set num_experts=16
keras-moe train mumoe_mixer_s16 --preset mumoe_mixer_s16_tr
keras-moe train mumoe_clip_b32 --data folder:photos
keras-moe train moepp_lm_python --data text:BOOKS
keras-moe train vmoe_b16_i21k --data tfrecord:photos --devices all
keras-moe train mumoe_digits --epochs 40 --extend
keras-moe train mumoe_digits --recipe-set schedule.patience=5 schedule.best=restore"""
INTERRUPTED = _arguments.RESUMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    recipe = "The recipe: a name, or a TOML or JSON file."
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help=recipe)
    _arguments.add_flag(parser, "--list", "List the recipes that ship with keras_moe.")
    preset = "Another model than the recipe's, with its weights if it has any."
    _arguments.add_preset(parser, "--preset", help=preset)
    _arguments.add_data(parser, " The default is the data of the recipe.")
    _arguments.add_overrides(parser)
    what = "settings of the recipe"
    _arguments.add_overrides(parser, "--recipe-set", what, "schedule.warmup_steps=100")
    folder = "The folder of the run; by default runs/ and the recipe's name."
    _arguments.add_output(parser, folder)
    _arguments.add_length(parser.add_argument_group("settings that recipes have, too"))
    add_checkpoints(parser)
    add_looks(parser)
    _devices.add_devices(parser)
    _devices.add_processes(parser)


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    every = "The number of steps between checkpoints; by default those of an epoch."
    _arguments.add_count(group, "--checkpoint-every", every)
    newest = "The number of newest checkpoints to keep."
    _arguments.add_count(group, "--keep-checkpoints", newest, 3)
    kept = "Also keep the checkpoints at multiples of N steps, for branches and soups."
    _arguments.add_count(group, "--keep-every", kept)
    restart = "Delete the checkpoints of an earlier run, and begin anew."
    _arguments.add_flag(group, "--restart", restart)
    extend = (
        "Continue a finished run for more --epochs; --recipe-set "
        "schedule.schedule_steps=N leaves its learning rates as they were."
    )
    _arguments.add_flag(group, "--extend", extend)
    branch_from = "The checkpoint of another run to begin with."
    group.add_argument(
        "--branch-from", type=Path, metavar="CHECKPOINT", help=branch_from
    )
    cooldown = "With --branch-from, the steps in which the learning rate falls."
    _arguments.add_count(group, "--cooldown", cooldown)


def add_looks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation during training")
    for name, what, default in (
        ("--health-every", "looks at the routers", 1),
        ("--few-shot-every", "few-shot accuracies", 0),
        ("--retrieval-every", "recalls of the test pairs", 0),
    ):
        epochs = f"The number of epochs between {what}; 0 for none."
        _arguments.add_count(group, name, epochs, default, 0)
    _arguments.add_shots(group, None)
    few_shot_data = "Images with splits train and test for it; by default the recipe's."
    group.add_argument("--few-shot-data", metavar="SOURCE", help=few_shot_data)
    report = (
        "The number of test examples of a report on the routing at the end, drawn of "
        "all classes alike; also on a finished run, by the same command. Its first "
        "picture goes into the model card. 0 for no report."
    )
    _arguments.add_count(group, "--report-examples", report, 0, 0)


def run(args: argparse.Namespace, console: "Console") -> _arguments.Result | None:
    from keras_moe._files import write_json

    begin = time.perf_counter()
    if args.list == bool(args.recipe):
        expected = "a recipe, or --list alone"
        raise unfit(expected, f"recipe={args.recipe!r}, --list={args.list}")
    if args.list:
        return listed()
    check_options(args)
    _devices.start_processes(args)
    recipe = branch(args, load_recipe(args))
    folder = args.output or Path("runs") / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    process, _ = keras_moe.data.process_shard()
    trained, test = fit(args, recipe, folder, console)
    if process:
        return None
    # First, since everything else can be made again.
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
    report = write_report(args, recipe, trained, test, folder, console)
    if report:
        add_picture(card, report.pictures, recipe, trained, folder)
    rows = {results["metric"]: f"{results['score']:.4f}"}
    if trained.linear_probe is not None:
        rows["linear probe"] = f"{trained.linear_probe:.4f} with the starting features"
    rows |= {
        "parameters": f"{results['parameters']:,}",
        "seconds": f"{results['seconds']:.0f}",
        "preset": folder / "preset",
        "results": folder / "results.json",
        "picture": folder / "training.png",
    }
    if report:
        rows["report"] = report.page
    if trained.score + 1e-6 < (trained.linear_probe or 0):
        rows["below the probe"] = advice(trained.history, results["metric"])
    labels = ', ["a cat", "a dog"]' if hasattr(trained.model, "similarity") else ""
    examples = {"classify": f"photo{labels}", "generate": '"Once upon a time"'}
    for method, example in examples.items():
        if hasattr(trained.model, method):
            preset = json.dumps(str(folder / "preset"))
            rows["use it"] = f"from_preset({preset}).{method}({example})"
    return _arguments.Result(
        results, tuple(f"{name:<18} {value}" for name, value in rows.items())
    )


def advice(history: dict[str, list[float]], metric: str) -> str:
    """What to change where fine-tuning ended below its linear probe."""
    change = "raise --epochs or --learning-rate, for it still learns"
    trained = history.get(metric.removeprefix("val_"), [0.0])
    if trained[-1] > max(history[metric]):
        change = (
            "lower --learning-rate or --epochs, or keep the best epoch with "
            "--recipe-set schedule.best=restore, for it fits the training images only"
        )
    return f"{change}; --output or --restart begins anew"


def listed() -> _arguments.Result:
    from rich.table import Table

    recipes = keras_moe.training.list_recipes()
    table = Table("recipe", "what it trains")
    for name, description in recipes.items():
        table.add_row(name, description)
    return _arguments.Result(recipes, (table,))


def check_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options that would have no effect."""
    if args.restart and args.extend:
        raise ValueError("Expected --restart or --extend; received: both")
    if (args.shots or args.few_shot_data) and not args.few_shot_every:
        expected = "--few-shot-every with --shots and --few-shot-data"
        raise unfit(expected, f"--few-shot-every {args.few_shot_every}")
    if args.cooldown and not args.branch_from:
        raise ValueError("Expected --branch-from with --cooldown; received: none")
    if args.report_examples:
        from keras_moe.report.writing import import_jinja2

        # Before the training, at whose end the report is.
        import_jinja2()


def load_recipe(args: argparse.Namespace) -> "Recipe":
    overrides = dict(args.recipe_set)
    overrides |= {f"model.{name}": value for name, value in args.set}
    given = {
        "schedule.epochs": args.epochs,
        "data.batch_size": args.batch_size,
        "schedule.learning_rate": args.learning_rate,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if twice := given.keys() & overrides.keys():
        expected = "each setting once, as an option or in --recipe-set"
        raise unfit(expected, f"both for {', '.join(sorted(twice))}")
    overrides |= given
    if args.epochs is not None:
        # Instead of a length in steps.
        overrides.setdefault("schedule.steps", None)
    if args.data is not None:
        overrides["data.source"] = args.data
    if args.preset is not None:
        overrides["model.preset"] = args.preset
    # Not as arguments of `load_recipe`, which has its own.
    return keras_moe.training.load_recipe(args.recipe).replace(**overrides)


def branch(args: argparse.Namespace, recipe: "Recipe") -> "Recipe":
    """The recipe of a cooldown, if --cooldown asks for one."""
    if args.cooldown is None:
        return recipe
    batches = keras_moe.training.open_checkpoint(args.branch_from).step
    accumulated = recipe.optimizer.gradient_accumulation_steps
    start, rest = divmod(batches, accumulated)
    if rest:
        expected = f"a checkpoint after an update, every {accumulated} batches"
        raise unfit(expected, f"{batches} batches")
    return keras_moe.training.cooldown_branch(recipe, start, args.cooldown)


def fit(
    args: argparse.Namespace, recipe: "Recipe", folder: Path, console: "Console"
) -> "tuple[Training, Any]":
    """Trains on the devices that are asked for; also returns the test batches."""
    import keras

    from keras_moe.models.loading.blueprint import costs_of

    process, num_processes = keras_moe.data.process_shard()
    checkpoints = folder / "checkpoints"
    test = []

    def callbacks(model, datasets):
        # Not before, where an error would follow it.
        if process == 0:
            for line in first_lines(recipe, model, args.data_dir):
                console.print(line, highlight=False, soft_wrap=True)
            console.print(settings_table(recipe))
            if (costs := costs_of(model)) is not None:
                costs.print_routing(console, recipe.data.batch_size)
        test.append(datasets.test)
        return evaluations(args, recipe, folder, model, datasets)

    _devices.set_devices(
        args,
        recipe.model.preset,
        recipe.data.batch_size // recipe.optimizer.gradient_accumulation_steps,
        {"load_weights": recipe.model.load_weights, **recipe.model.overrides},
    )
    trained = keras_moe.training.train(
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
        verbose=_arguments.verbosity() if process == 0 else 0,
    )
    keras.distribution.set_distribution(None)
    if num_processes > 1 and process == 0:
        # No process has all weights; the last checkpoint has them.
        trained = keras_moe.training.train(
            recipe,
            data_dir=args.data_dir,
            checkpoint_dir=checkpoints,
            # If nothing was left to train, the checkpoints are still the old run's.
            extend=args.extend,
        )
    return trained, test[0] if test else None


def evaluations(
    args: argparse.Namespace,
    recipe: "Recipe",
    folder: Path,
    model: "MoETask",
    datasets: "Datasets",
) -> list:
    import keras

    from keras_moe._processes import gathered_batch

    training = keras_moe.training
    callbacks, board = [], None
    if importlib.util.find_spec("tensorboardX") is not None:
        board = folder / "tensorboard"
    if args.health_every and model.routing:
        # Test data may be sorted by class. Each process has read a part.
        shuffled = datasets.shuffled_test
        test = datasets.test if shuffled is None else shuffled()
        batch = gathered_batch(next(iter(test)))
        callbacks.append(
            training.RouterHealth(
                keras.utils.unpack_x_y_sample_weight(batch)[0],
                every=args.health_every,
                csv_path=folder / "router_health.csv",
                tensorboard=board and board / "routers",
            )
        )
    if args.few_shot_every:
        few_shot = {"few_shot": new_few_shot(args, recipe, model)}
        callbacks.append(training.PeriodicEvaluation(few_shot, args.few_shot_every))
    if args.retrieval_every:
        retrieval = {"retrieval": new_retrieval(args, recipe, model)}
        callbacks.append(training.PeriodicEvaluation(retrieval, args.retrieval_every))
    # Last, when the others have added to the logs.
    if board is not None:
        callbacks.append(training.ScalarLog(board / "training"))
    return callbacks


def new_few_shot(args: argparse.Namespace, recipe: "Recipe", model: "MoETask") -> Any:
    """Few-shot accuracy on the recipe's data, or on other data."""
    source, splits = args.few_shot_data, ("train", "test")
    if source is None:
        source = recipe.data.source
        splits = (recipe.data.train_split, recipe.data.test_split)
    if not isinstance(source, str):
        expected = "--few-shot-data with --few-shot-every on a mixture of sources"
        raise unfit(expected, source)
    shape, folder = model.backbone.image_shape, args.data_dir
    pools = [
        keras_moe.data.load(source, split, shape, shuffle=False, data_dir=folder)
        for split in splits
    ]
    options = {} if args.shots is None else {"shots": args.shots}
    return keras_moe.training.FewShot(*pools, **options)


def new_retrieval(args: argparse.Namespace, recipe: "Recipe", model: "MoETask") -> Any:
    """Recalls of all captions of the pairs that the recipe evaluates on."""
    from keras_moe.data.sources import has_captions

    config: Any = recipe.data
    objective: Any = recipe.objective
    source, split, data_dir = config.evaluated_source, config.test_split, args.data_dir
    of_pairs = isinstance(objective, keras_moe.training.Contrastive)
    if not of_pairs or not has_captions(source, split, data_dir):
        expected = "a recipe of pairs with captions of their own with --retrieval-every"
        raise unfit(expected, f"{recipe.name} on {source!r}")
    options = config.test_pair_options(data_dir)
    pairs = keras_moe.data.load_pairs(
        source,
        split,
        model.backbone.image_shape,
        objective.evaluation_batch_size or config.batch_size,
        tokenizer=model.preprocessor,
        shuffle=False,
        data_dir=data_dir,
        **{**options, "captions": "all"},
    )
    return keras_moe.training.Retrieval(pairs)


def write_report(
    args: argparse.Namespace,
    recipe: "Recipe",
    trained: "Training",
    test: Any,
    folder: Path,
    console: "Console",
) -> "Report | None":
    """The report on the test data's routing, if asked for; a failure only warns."""
    if not args.report_examples or not getattr(trained.model, "routing", None):
        return None
    data = recipe.data
    try:
        if test is None:
            # Nothing was left to train.
            test = recipe.datasets(trained.model, args.data_dir).test
        return keras_moe.report.write_report(
            trained.model,
            test,
            folder / "report",
            name=f"{recipe.name} on {data.evaluated_source} {data.test_split}",
            max_examples=args.report_examples,
            options=keras_moe.report.Options(training_batch_size=data.batch_size),
            command=_arguments.command_line(args),
            credit=keras_moe.data.credit(data.evaluated_source),
            verbose=0,
        )
    except Exception as error:
        if args.traceback:
            traceback.print_exc()
        text = (
            f"warning: no report, since it failed: {type(error).__name__}: {error}\n"
            f"The model is in {folder / 'preset'}; `keras-moe report {folder}` makes a "
            "report of it."
        )
        console.print(text, highlight=False, soft_wrap=True)
        return None


def card_of(recipe: "Recipe", trained: "Training") -> "ModelCard":
    score = keras_moe.models.CardResult(
        recipe.objective.monitor.metric.removeprefix("val_"),
        trained.score,
        recipe.data.evaluated_source,
        recipe.data.test_split,
    )
    from keras_moe.models.base.model_card import licence_of

    settings, base = recipe.settings(), None
    if starts_from_weights(recipe):
        base = recipe.model.preset
    return keras_moe.models.ModelCard(
        name=recipe.name,
        description=recipe.description,
        data=recipe.data.source,
        recipe={k: v for k, v in settings.items() if k not in ("name", "description")},
        results=[score],
        base_model=base,
        base_license=None if base is None else licence_of(base),
        picture_text="What each expert does with the test data",
    )


def add_picture(
    card: "ModelCard",
    pictures: list,
    recipe: "Recipe",
    trained: "Training",
    folder: Path,
) -> None:
    from keras_moe.report.writing import FRONT

    credit = keras_moe.data.credit(recipe.data.evaluated_source) or ""
    # Pieces of the user's own photos are not for a page that may be published.
    shown = [x for x in pictures if credit or Path(x).name != FRONT]
    if shown:
        card = dataclasses.replace(card, picture=shown[0], attribution=credit)
        card.write(trained.model, folder / "preset", "preset")


def results_of(recipe: "Recipe", trained: "Training", folder: Path) -> dict:
    """The settings and the history of the run, interruptions included."""
    from keras_moe.models.loading.blueprint import costs_of

    checkpoint = keras_moe.training.find_checkpoint(folder / "checkpoints")
    state = {} if checkpoint is None else checkpoint.state["callbacks"]
    evaluated = (state.get(f"PeriodicEvaluation {number}", {}) for number in (1, 2))
    costs = costs_of(trained.model)
    return {
        "recipe": recipe.to_dict(),
        **backend_and_versions(),
        "parameters": trained.model.count_params(),
        "costs": costs and costs.to_dict(),
        "metric": recipe.objective.monitor.metric,
        "score": trained.score,
        "linear_probe": trained.linear_probe,
        "history": trained.history,
        "router_health": state.get("RouterHealth 1", {}).get("layers", []),
        "evaluations": [x for own in evaluated for x in own.get("records", [])],
    }


def backend_and_versions() -> dict[str, Any]:
    import keras

    from keras_moe.training.run_checkpoint import versions

    return {"backend": keras.backend.backend(), "versions": versions()}


def draw(results: dict, title: str, folder: Path) -> None:
    from keras_moe.analysis import plots

    # Figures of callbacks have a slash in their names.
    curves = {name: x for name, x in results["history"].items() if "/" not in name}
    plots.plot_training_history(curves, folder / "training.png", title=title)
    if results["router_health"]:
        plots.plot_router_health(
            folder / "router_health.csv", folder / "router_health.png", title=title
        )


def starts_from_weights(recipe: "Recipe") -> bool:
    from keras_moe.models.registry import is_architecture

    return recipe.model.load_weights and not is_architecture(recipe.model.preset)


def first_lines(recipe: "Recipe", model: Any, data_dir: str | None) -> Iterator[str]:
    """What the settings leave open: the weights at the start, the images' sizes."""
    from keras_moe.data.sources import open_source
    from keras_moe.training.objectives import LabelledImages

    start = "random weights"
    if starts_from_weights(recipe):
        start = f"the weights of {recipe.model.preset}"
    yield f"starts from {start}"
    config: Any = recipe.data
    # Objectives from outside may read their data themselves.
    if not isinstance(recipe.objective, LabelledImages):
        return
    splits = (config.train_split, config.test_split)
    train, test = (
        open_source(config.source, split, data_dir).without(excluded)
        for split, excluded in zip(splits, config.left_out(data_dir))
    )
    height, width, channels = model.backbone.image_shape
    sizes = [f"{w}x{h}" for h, w in sorted(train.sizes(), key=math.prod)] or ["?"]
    yield (
        f"{train.count:,} images to train on, {test.count:,} to test on: "
        f"{width}x{height}{' grey' * (channels == 1)}, from "
        f"{' to '.join(dict.fromkeys((sizes[0], sizes[-1])))}"
    )


def settings_table(recipe: "Recipe") -> "Table":
    import keras
    from rich.table import Table

    table = Table("setting", title=f"{recipe.name} on {keras.backend.backend()}")
    table.add_column("value", overflow="fold")
    for name, value in recipe.settings().items():
        if name != "name" and value not in ("", None):
            table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    return table
