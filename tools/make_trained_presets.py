"""Makes the weights of the presets that ship trained: one command for each.

    python tools/make_trained_presets.py vmoe_digits [--run FOLDER]

trains by the recipe of the same name, as `keras-moe train` does, on JAX unless
KERAS_BACKEND says otherwise; writes the folder `presets/NAME` with weights, configs,
checksums and card; measures the model that is read from there, as `keras-moe evaluate`
does; and puts the figures into the card and into `presets/NAME.json`. A run that was
ended is resumed, and one that is done is not trained again.

A group of HDF5's older format takes a kilobyte, and a model has hundreds of them: the
files are written again in the newer one, compressed; and models that are larger than
2 MB in float32 are stored in float16. They load into float32, and are measured so.
"""

import argparse
import json
import os
import re
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import h5py
import keras
from rich.console import Console

from keras_moe import models, training
from keras_moe.cli import evaluate, train
from keras_moe.cli.commands import make_parser
from keras_moe.cli.versions import backend_and_versions
from keras_moe.files import write_json
from keras_moe.models.model_card import write_card
from keras_moe.models.preset_folder import staged
from keras_moe.models.weights_checksums import is_weights

PRESETS = Path(__file__).resolve().parents[1] / "presets"
# The figures by the kind of the model: metrics of `keras-moe evaluate`, and which of
# their figures are wanted.
FIGURES = {
    "image_classifier": ("accuracy", r"accuracy"),
    "contrastive": ("retrieval", r".*_r1"),
}
LARGEST = 2_000_000  # bytes
# Shorter arrays take more room compressed.
SHORTEST = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="name of a recipe and of its preset")
    parser.add_argument("--run", help="folder of the run; runs/NAME by default")
    args = parser.parse_args()
    run = Path(args.run or f"runs/{args.name}")
    console = Console()
    train.run(parsed("train", args.name, "--output", run), console)
    model = trained_model(run / "preset")
    folder = PRESETS / args.name
    recipe = training.load_recipe(args.name)
    save(model, folder, models.ModelCard())
    results = measured(model, folder, recipe, console)
    save(model, folder, card_of(recipe, results))
    path = PRESETS / f"{args.name}.json"
    preset = json.loads(path.read_text(encoding="utf-8"))
    rows = [result._asdict() for result in results]
    write_json(path, {**preset, "weights": args.name, "results": rows})
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > LARGEST:
        raise ValueError(
            f"Expected a preset of at most {LARGEST:,} bytes; received: {size:,} bytes "
            f"in {folder}"
        )
    console.print(f"{folder}: {size:,} bytes, {rows}")


def parsed(*arguments: object) -> argparse.Namespace:
    return make_parser().parse_args([str(argument) for argument in arguments])


def trained_model(folder: Path) -> keras.Model:
    """The model of a run; one of pairs gets the preparation of images, too."""
    model = models.from_preset(str(folder))
    if getattr(model, "image_preprocessor", True) is None:
        prepare = models.ImagePreprocessor(model.backbone.image_shape)
        model = models.from_preset(str(folder), image_preprocessor=prepare)
    return model


def save(model: keras.Model, folder: Path, card: models.ModelCard) -> None:
    """Writes a preset's folder as `save_to_preset` does, with smaller files."""
    dtype = "float16" if 4 * model.count_params() > LARGEST else "float32"
    with staged(folder) as staging:
        model.save_to_preset(staging)
        for path in Path(staging).iterdir():
            if is_weights(path):
                write_small(path, dtype)
        write_card(model, Path(staging), folder, card)


def write_small(path: Path, dtype: str) -> None:
    """Writes a file of weights again, in less room."""
    old = path.with_suffix(".old")
    path.rename(old)
    with h5py.File(old) as source, h5py.File(path, "w", libver="latest") as target:

        def copy(name, item):
            if isinstance(item, h5py.Group):
                new = target.create_group(name)
            else:
                value = item[()]
                if value.dtype == "float32":
                    value = value.astype(dtype)
                packed = {"compression": "gzip", "shuffle": True}
                options = packed if value.size >= SHORTEST else {}
                new = target.create_dataset(name, data=value, **options)
            new.attrs.update(item.attrs)

        target.attrs.update(source.attrs)
        source.visititems(copy)
    old.unlink()


def measured(
    model: keras.Model, folder: Path, recipe: training.Recipe, console: Console
) -> list[models.CardResult]:
    """The figures of the model that is read from a folder."""
    metrics, wanted = FIGURES[type(model).task_name]
    source, split = recipe.data.evaluated_source, recipe.data.test_split
    args = parsed(
        *("evaluate", folder, "--metrics", metrics),
        *("--data", source, "--split", split),
    )
    values = evaluate.run(args, console).values
    figures = {**values, **values.get("retrieval", {})}
    return [
        models.CardResult(name, value, source, split)
        for name, value in figures.items()
        if re.fullmatch(wanted, name)
    ]


def card_of(
    recipe: training.Recipe, results: list[models.CardResult]
) -> models.ModelCard:
    settings = {**recipe.settings(), **backend_and_versions()}
    return models.ModelCard(
        name=recipe.name,
        description=recipe.description,
        license="apache-2.0",
        data=recipe.data.source,
        recipe={k: v for k, v in settings.items() if k not in ("name", "description")},
        results=results,
    )


if __name__ == "__main__":
    main()
