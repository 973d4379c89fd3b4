"""Trains a small V-MoE on real handwritten digits and looks at what it learned.

    make quickstart

It needs no download: the scans come with scikit-learn. Everything is written to
`runs/quickstart/`.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
# PyTorch's idle threads would spin, and stand still on a machine with other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import time
from pathlib import Path

import keras
import numpy as np
from rich.console import Console

from keras_moe import analysis, data, evaluation, models
from keras_moe.analysis import plots
from keras_moe.files import write_json

PRESET = "vmoe_digits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    args = parser.parse_args()
    for name in ("epochs", "batch_size"):
        if getattr(args, name) < 1:
            option = f"--{name.replace('_', '-')}"
            parser.error(
                f"Expected {option} of at least 1; received: {getattr(args, name)}"
            )
    if not 0 < args.learning_rate < float("inf"):
        parser.error(
            f"Expected a finite --learning-rate above 0; received: {args.learning_rate}"
        )
    if not 0 <= args.seed < 2**32:
        parser.error(f"Expected --seed from 0 to 2**32 - 1; received: {args.seed}")
    args.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    start = time.perf_counter()
    keras.utils.set_random_seed(args.seed)

    console.rule(f"{PRESET} on {keras.backend.backend()}")
    model = models.from_preset(PRESET, num_classes=10, seed=args.seed)
    image_shape = model.backbone.image_shape
    train_images, train_labels = data.load_digits("train", image_shape)
    test_images, test_labels = data.load_digits("test", image_shape)
    train(model, image_shape, args)
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)

    features = keras.Model(model.input, model.features)
    few_shot = evaluation.few_shot_from_model(
        features, (train_images, train_labels), (test_images, test_labels), shots=(10,)
    )

    folder = args.output / "preset"
    predictions = model.predict(test_images, verbose=0)
    model.save_to_preset(folder)
    loaded = models.from_preset(str(folder))
    if not np.array_equal(predictions, loaded.predict(test_images, verbose=0)):
        raise SystemExit(
            "The loaded preset predicts something else than the saved one."
        )

    # At inference no token is dropped; these are the drops at the training capacity.
    selected = model.backbone.moe.num_selected_experts
    limited = models.from_preset(
        str(folder),
        task="backbone",
        evaluation="official",
    )
    statistics = {
        name: analysis.routing_statistics(routing, selected)
        for name, routing in predict_routing(limited, test_images).items()
    }
    analysis.print_statistics(statistics, console)
    console.print(
        "no expert: tokens that no expert served; dropped: the share of all choices, "
        "at the training capacity; entropy: of the load, 1 is balanced"
    )

    routing = predict_routing(model.backbone, test_images)
    picture = args.output / "experts.png"
    last = list(routing)[-1]
    plots.plot_expert_views(
        test_images,
        routing[last],
        model.backbone.grid,
        picture,
        title=f"What each expert of {last} looks at",
    )

    results = {
        "preset": PRESET,
        "backend": keras.backend.backend(),
        "test_accuracy": float(accuracy),
        "few_shot": few_shot.to_dict(),
        "routing": {name: row.to_dict() for name, row in statistics.items()},
        "seconds": time.perf_counter() - start,
    }
    write_json(args.output / "results.json", results)
    console.print(few_shot.table("10-shot linear accuracy of the features"))
    console.print(f"test accuracy      {accuracy:.2%} of {len(test_labels)} images")
    console.print(f"saved and loaded   {folder}: predictions are identical")
    console.print(f"picture            {picture}")
    console.print(f"results            {args.output / 'results.json'}")
    console.print(f"seconds            {results['seconds']:.0f}")


def train(model: keras.Model, image_shape: tuple, args: argparse.Namespace) -> None:
    """Trains with `fit` on shifted, turned and resized digits."""
    batches = data.load(
        "digits",
        "train",
        image_shape,
        batch_size=args.batch_size,
        seed=args.seed,
        augment=[
            keras.layers.RandomTranslation(0.1, 0.1, fill_mode="nearest"),
            keras.layers.RandomRotation(0.03, fill_mode="nearest"),
        ],
    )
    steps = args.epochs * batches.cardinality().numpy()
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        steps,
        warmup_target=args.learning_rate,
        warmup_steps=steps // 10,
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(
            schedule, weight_decay=0.05, global_clipnorm=1.0
        )
    )
    # The batches come shuffled.
    model.fit(batches, epochs=args.epochs, shuffle=False)


def predict_routing(backbone: keras.Model, images: np.ndarray) -> dict:
    """What the routers of each MoE block did with the images."""
    return keras.Model(backbone.input, backbone.routing).predict(images, verbose=0)


if __name__ == "__main__":
    main()
