"""Makes the weights of the presets that ship trained: one command for each.

    python tools/make_trained_presets.py vmoe_digits [--run FOLDER] [--card]

trains by the recipe of the same name, as `keras-moe train` does, on JAX unless
KERAS_BACKEND says otherwise; writes the folder `presets/NAME` with weights, configs,
checksums and card; measures the model that is read from there, as `keras-moe evaluate`
does; reports on it, as `keras-moe report` does, for the card's picture; and puts the
figures into the card and into `presets/NAME.json`. A run that was ended is resumed, and
one that is done is not trained again. `--card` renews the card and its picture alone:
weights and figures stay, and the recipe must be the one that the weights were made by.

The licence of the weights and the attribution of the data are those of
`presets/NAME.json`.

A group of HDF5's older format takes a kilobyte, and a model has hundreds of them: the
files are written again in the newer one, compressed; and models that are larger than
2 MB in float32 are stored in float16. They load into float32, and are measured so.
"""

import argparse
import json
import os
import re
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import h5py
import keras
from PIL import Image
from rich.console import Console

from keras_moe import models, training
from keras_moe._files import write_json
from keras_moe.cli import evaluate, report, train
from keras_moe.cli.main import make_parser
from keras_moe.cli.train import backend_and_versions
from keras_moe.models.base.model_card import CARD, write_card
from keras_moe.models.saving._preset_folder import is_weights, staged

PRESETS = Path(__file__).resolve().parents[1] / "presets"
# The figures by the kind of the model: metrics of `keras-moe evaluate`, and which of
# their figures are wanted.
FIGURES = {
    "image_classifier": ("accuracy", r"accuracy"),
    "contrastive": ("retrieval", r".*_r1"),
    "causal_lm": ("perplexity", r"perplexity"),
}
LARGEST = 2_000_000  # bytes
# The width of a card's picture, in pixels.
WIDEST = 1100
# Shorter arrays take more room compressed.
SHORTEST = 256


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="name of a recipe and of its preset")
    parser.add_argument("--run", help="folder of the run; runs/NAME by default")
    parser.add_argument("--card", action="store_true", help="renew the card alone")
    args = parser.parse_args(argv)
    known = models.builtin_presets()[args.name]
    folder = Path(known.get("weights", PRESETS / args.name))
    console = Console()
    recipe = training.load_recipe(args.name)
    if args.card:
        renew_card(folder, recipe, console)
    else:
        run = Path(args.run or f"runs/{args.name}")
        train.run(parsed("train", args.name, "--output", run), console)
        model = trained_model(run / "preset")
        save(model, folder, models.ModelCard())
        results = measured(model, folder, recipe, console)
        path = PRESETS / f"{args.name}.json"
        preset = json.loads(path.read_text(encoding="utf-8"))
        rows = [result._asdict() for result in results]
        write_json(path, {**preset, "weights": args.name, "results": rows})
        with tempfile.TemporaryDirectory() as temporary:
            picture = drawn(folder, recipe, Path(temporary), console)
            card = card_of(folder, recipe, backend_and_versions(), picture)
            save(model, folder, card)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > LARGEST:
        raise ValueError(
            f"Expected a preset of at most {LARGEST:,} bytes; received: {size:,} bytes "
            f"in {folder}"
        )
    console.print(f"{folder}: {size:,} bytes")


def renew_card(folder: Path, recipe: training.Recipe, console: Console) -> None:
    """Writes the page of a preset again, with a new picture.

    Args:
        folder: folder of the preset.
        recipe: recipe of the preset's name.
        console: console that people read.

    Raises:
        ValueError: if the page has the settings of another recipe.
    """
    model = models.from_preset(str(folder))
    before = training_rows((folder / CARD).read_text(encoding="utf-8"))
    made_by = {name: before.get(name) for name in backend_and_versions()}
    with tempfile.TemporaryDirectory() as temporary:
        picture = drawn(folder, recipe, Path(temporary), console)
        card = card_of(folder, recipe, made_by, picture)
        after = training_rows(card.text(model, folder.name))
        if differences := sorted(dict(before.items() ^ after.items())):
            raise ValueError(
                f"Expected the recipe that the weights of {folder} were made by; "
                f"received: other settings of {differences}. Without --card they are "
                "trained again"
            )
        card.write(model, folder, folder.name)


def training_rows(page: str) -> dict[str, str]:
    """The settings of the training on a card, as they are written there.

    Args:
        page: card of a preset, as Markdown.
    """
    section = page.partition("\n## Training\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", section, re.M)
    return {name: value for name, value in rows if name not in ("setting", "---")}


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


def drawn(
    folder: Path, recipe: training.Recipe, temporary: Path, console: Console
) -> Path:
    """The first picture of the report on a preset, small enough to ship."""
    source, split = recipe.data.evaluated_source, recipe.data.test_split
    args = parsed(
        *("report", folder, "--data", source, "--split", split),
        *("--output", temporary / "report"),
    )
    picture = Image.open(report.run(args, console).values["pictures"][0])
    white = Image.new("RGBA", picture.size, "white")
    picture = Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    picture.thumbnail((WIDEST, WIDEST), Image.Resampling.LANCZOS)
    path = temporary / "experts.png"
    picture.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def card_of(
    folder: Path, recipe: training.Recipe, made_by: dict, picture: Path
) -> models.ModelCard:
    """The page of a preset: its entry in the list, its recipe and its picture.

    Args:
        folder: folder of the preset, of its name.
        recipe: recipe of the preset's name.
        made_by: backend and versions that the weights were made by.
        picture: path of the picture.
    """
    path = PRESETS / f"{folder.name}.json"
    listed = json.loads(path.read_text(encoding="utf-8"))
    settings = {**recipe.settings(), **made_by}
    shown = "The patches of largest weight of each expert, a row for each, in the last "
    shown += "layer with experts of"
    if recipe.objective.name == "next_token":
        # Reports on texts have no patches.
        shown = "A heat map of the load of each expert, a row for each layer with "
        shown += "experts of"
    source, split = recipe.data.evaluated_source, recipe.data.test_split
    return models.ModelCard(
        name=recipe.name,
        description=recipe.description,
        license=listed["license"],
        attribution=listed["attribution"],
        data=recipe.data.source,
        recipe={k: v for k, v in settings.items() if k not in ("name", "description")},
        results=[models.CardResult(**result) for result in listed["results"]],
        picture=picture,
        picture_text=f"{shown} {recipe.name}, on {source}, {split}",
    )


if __name__ == "__main__":
    main()
