"""`keras-moe quickstart`: a small V-MoE trained on digits, and a look inside it.

Nothing is downloaded: the scans of handwritten digits come with scikit-learn.
"""

import argparse
import shlex
import time
from pathlib import Path

import keras
import numpy as np
from rich.console import Console

from keras_moe import analysis, data, evaluation, models
from keras_moe.analysis import plots
from keras_moe.cli.fitting import compile_with_cosine, shifts_and_turns
from keras_moe.cli.result import Result
from keras_moe.files import write_json

PRESET = "vmoe_digits"


def run(args: argparse.Namespace, console: Console) -> Result:
    """Trains, evaluates, saves and loads, and draws what each expert looks at."""
    begin = time.perf_counter()
    args.output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(args.seed)

    console.rule(f"{PRESET} on {keras.backend.backend()}")
    model = models.from_preset(
        PRESET, num_classes=10, seed=args.seed, load_weights=False
    )
    image_shape = model.backbone.image_shape
    train_images, train_labels = data.load_digits("train", image_shape)
    test_images, test_labels = data.load_digits("test", image_shape)
    train(model, args)
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    few_shot = evaluation.few_shot_from_model(
        keras.Model(model.input, model.features),
        (train_images, train_labels),
        (test_images, test_labels),
        shots=(10,),
    )
    folder = args.output / "preset"
    save_and_load(model, folder, test_images)
    # At inference no token is dropped; these are the drops at the training capacity.
    limited = models.from_preset(str(folder), task="backbone", evaluation="official")
    selected = limited.moe.router_arguments["num_selected_experts"]
    statistics = {
        name: analysis.routing_statistics(routing, selected)
        for name, routing in predict_routing(limited, test_images).items()
    }
    picture = args.output / "experts.png"
    draw(model, test_images, picture)
    results = {
        "preset": PRESET,
        "backend": keras.backend.backend(),
        "test_accuracy": float(accuracy),
        "few_shot": few_shot.to_dict(),
        "routing": {name: row.to_dict() for name, row in statistics.items()},
        "seconds": time.perf_counter() - begin,
    }
    write_json(args.output / "results.json", results)

    def show(console: Console) -> None:
        analysis.print_statistics(statistics, console)
        console.print(
            "no expert: tokens that no expert served; dropped: the share of all "
            "choices, at the training capacity; entropy: of the load, 1 is balanced"
        )
        console.print(few_shot.table("10-shot linear accuracy of the features"))
        for name, value in {
            "test accuracy": f"{accuracy:.2%} of {len(test_labels)} images",
            "saved and loaded": f"{folder}: predictions are identical",
            "picture": picture,
            "results": args.output / "results.json",
            "seconds": f"{results['seconds']:.0f}",
        }.items():
            console.print(f"{name:<18} {value}", highlight=False, soft_wrap=True)
        console.print("\nThree things to do next:")
        for command, purpose in next_steps(folder).items():
            console.print(
                f"  {command}\n      {purpose}", highlight=False, soft_wrap=True
            )

    return Result(results, show)


def next_steps(folder: Path) -> dict[str, str]:
    """Commands to go on with, and what each of them does."""
    preset = shlex.quote(str(folder))
    return {
        f"keras-moe evaluate {preset} --data digits": (
            "measures the preset that was saved just now; --data folder:PHOTOS takes "
            "your own images"
        ),
        f"keras-moe report {preset} --data digits": (
            "writes a page on what each expert does with these images"
        ),
        "keras-moe describe vmoe_b32": (
            "shows a published model's blocks, experts and costs; "
            'keras_moe.models.from_preset("vmoe_b32", num_classes=10) makes it yours'
        ),
    }


def train(model: keras.Model, args: argparse.Namespace) -> None:
    """Trains with `fit` on shifted and turned digits."""
    batches = data.load(
        "digits",
        "train",
        model.backbone.image_shape,
        batch_size=args.batch_size,
        seed=args.seed,
        augment=shifts_and_turns(),
    )
    steps = args.epochs * int(batches.cardinality())
    compile_with_cosine(model, steps, args.learning_rate)
    # The batches come shuffled.
    model.fit(batches, epochs=args.epochs, shuffle=False)


def save_and_load(model: keras.Model, folder: Path, images: np.ndarray) -> None:
    """Saves the model as a preset, and loads it again."""
    model.save_to_preset(folder)
    loaded = models.from_preset(str(folder))
    before, after = (x.predict(images, verbose=0) for x in (model, loaded))
    if not np.array_equal(before, after):
        raise ValueError(
            "Expected the loaded preset's predictions to be the saved model's; "
            f"received: a difference of {np.abs(before - after).max():.2g}"
        )


def draw(model: keras.Model, images: np.ndarray, picture: Path) -> None:
    """Draws what each expert of the last MoE block looks at."""
    routing = predict_routing(model.backbone, images)
    last = list(routing)[-1]
    plots.plot_expert_views(
        images,
        routing[last],
        model.backbone.grid,
        picture,
        title=f"What each expert of {last} looks at",
    )


def predict_routing(backbone: keras.Model, images: np.ndarray) -> dict:
    """The routing record of each MoE block for the images."""
    return keras.Model(backbone.input, backbone.routing).predict(images, verbose=0)
