"""Train a small V-MoE on handwritten digits, and look inside it.

Takes about two minutes on two cores, without a download: the scans come with
scikit-learn. Reports test accuracy, 10-shot accuracy of the features and each expert's
share of the tokens, saves a preset, loads it again, and draws what each expert looks
at.
"""

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras_moe
from keras_moe._errors import unfit
from keras_moe.cli import _arguments

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from keras_moe.analysis.routing import RoutingStatistics
    from keras_moe.models import ImageClassifier

EXAMPLES = """\
keras-moe quickstart
keras-moe quickstart --epochs 5 --output runs/five_epochs"""
PRESET = "vmoe_digits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments.add_count(
        parser, "--seed", "The seed of weights, noise and order.", 0, 0
    )
    _arguments.add_length(parser, 50, 32, 2e-3)
    _arguments.add_output(parser, "The folder of the results.", Path("runs/quickstart"))


def run(args: argparse.Namespace, console: "Console") -> _arguments.Result:
    import keras

    from keras_moe._files import write_json

    begin = time.perf_counter()
    args.output.mkdir(parents=True, exist_ok=True)
    console.rule(f"{PRESET} on {keras.backend.backend()}")
    model, accuracy = train(args)
    image_shape = model.backbone.image_shape
    train_data = keras_moe.data.load_digits("train", image_shape)
    test_data = keras_moe.data.load_digits("test", image_shape)
    features = keras.Model(model.input, model.features)
    extract = keras_moe.evaluation.extract_features
    pool, test = (extract(features, x) for x in (train_data, test_data))
    few_shot = keras_moe.evaluation.few_shot(*pool, *test, shots=(10,))
    folder = args.output / "preset"
    save_and_load(model, folder, test_data[0])
    statistics = routing_statistics(folder, test_data[0])
    picture = args.output / "experts.png"
    draw(model, test_data[0], picture)
    results = {
        "preset": PRESET,
        "backend": keras.backend.backend(),
        "test_accuracy": accuracy,
        "few_shot": few_shot.to_dict(),
        "routing": {name: row.to_dict() for name, row in statistics.items()},
        "seconds": time.perf_counter() - begin,
    }
    write_json(args.output / "results.json", results)
    rows = {
        "test accuracy": f"{accuracy:.2%} of {len(test_data[1])} images",
        "saved and loaded": f"{folder}: predictions are identical",
        "picture": picture,
        "results": args.output / "results.json",
        "seconds": f"{results['seconds']:.0f}",
    }
    steps = [f"  {x}\n      {purpose}" for x, purpose in next_steps(folder).items()]
    shown = (
        lambda console: keras_moe.analysis.print_statistics(statistics, console),
        "no expert: tokens that no expert served; dropped: the share of all choices, "
        "at the training capacity; entropy: of the load, 1 is balanced",
        few_shot.table("10-shot linear accuracy of the features"),
        *(f"{name:<18} {value}" for name, value in rows.items()),
        "\nThree things to do next:",
        *steps,
    )
    return _arguments.Result(results, shown)


def next_steps(folder: Path) -> dict[str, str]:
    preset = shlex.quote(str(folder))
    return {
        f"keras-moe evaluate {preset} --data digits": (
            "measures the preset that was just saved; --data folder:PHOTOS takes your "
            "own images"
        ),
        f"keras-moe report {preset} --data digits": (
            "writes a page on what each expert does with these images"
        ),
        "keras-moe describe vmoe_b32": (
            "shows a published model's blocks, experts and costs; "
            'keras_moe.models.from_preset("vmoe_b32", num_classes=10) makes it yours'
        ),
    }


def train(args: argparse.Namespace) -> tuple[Any, float]:
    """The model, trained with AdamW and cosine decay, and its test accuracy."""
    schedule = {"epochs": args.epochs, "learning_rate": args.learning_rate}
    settings = {
        "name": "quickstart",
        "data": {"batch_size": args.batch_size, "augment": ["translation", "rotation"]},
        "model": {"preset": PRESET, "load_weights": False},
        "schedule": {**schedule, "warmup_steps": 0.1},
        "optimizer": {"weight_decay": 0.05},
        "seed": args.seed,
    }
    recipe = keras_moe.training.Recipe.from_dict(settings)
    trained = keras_moe.training.train(recipe, verbose=_arguments.verbosity())
    return trained.model, trained.score


def save_and_load(model: "ImageClassifier", folder: Path, images: "np.ndarray") -> None:
    import numpy as np

    model.save_to_preset(folder)
    loaded = keras_moe.models.from_preset(str(folder))
    before, after = (x.predict(images, verbose=0) for x in (model, loaded))
    if not np.array_equal(before, after):
        expected = "the loaded preset's predictions to be the saved model's"
        raise unfit(expected, f"a difference of {np.abs(before - after).max():.2g}")


def routing_statistics(
    folder: Path, images: "np.ndarray"
) -> "dict[str, RoutingStatistics]":
    """Statistics of each MoE block at the training capacity, which drops tokens."""
    limited: Any = keras_moe.models.from_preset(
        str(folder), task="backbone", evaluation="official"
    )
    selected = limited.moe.router_arguments["num_selected_experts"]
    return {
        name: keras_moe.analysis.routing_statistics(routing, selected)
        for name, routing in predict_routing(limited, images).items()
    }


def draw(model: Any, images: "np.ndarray", picture: Path) -> None:
    from keras_moe.analysis import plots

    routing = predict_routing(model.backbone, images)
    last = list(routing)[-1]
    plots.plot_expert_views(
        images,
        routing[last],
        model.backbone.grid,
        picture,
        title=f"What each expert of {last} looks at",
    )


def predict_routing(backbone: Any, images: "np.ndarray") -> dict:
    import keras

    reader: Any = keras.Model(backbone.input, backbone.routing)
    return reader.predict(images, verbose=0)
