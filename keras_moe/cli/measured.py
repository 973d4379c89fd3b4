"""The model and the data of programs that measure presets and look into them."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from keras_moe import data, models
from keras_moe.cli.evaluate_pairs import find_source
from keras_moe.data.labels import as_hierarchy
from keras_moe.data.sources import open_source
from keras_moe.models.pair_backbone import PairBackbone


class Images(NamedTuple):
    """The images to evaluate on.

    Attributes:
        source: source, as `keras_moe.data.load` takes it.
        test_split: split whose figures are wanted.
        train_split: split from which shots are drawn.
        data_dir: folder of TensorFlow Datasets, or None.
        hierarchy: file of a `LabelHierarchy`, or None.
        several: whether images have several labels.
        max_labels: number of labels of an image after padding, or None.
        excluded_split: split from which `exclude` leaves out images, or None.
        exclude: files of the images that are left out, as `keras_moe.data.load`.
        unreadable: treatment of images that cannot be read, as `keras_moe.data.load`.
    """

    source: str
    test_split: str
    train_split: str
    data_dir: str | None
    hierarchy: str | None
    several: bool
    max_labels: int | None
    excluded_split: str | None
    exclude: Any
    unreadable: str

    def batches(self, split: str, image_shape: tuple, batch_size: int) -> Any:
        """The batches of a split in order: labels are integers, or 0-1 vectors."""
        return data.load(
            self.source,
            split,
            image_shape,
            batch_size,
            shuffle=False,
            one_hot=self.several,
            data_dir=self.data_dir,
            multi_label=self.several,
            hierarchy=self.hierarchy,
            max_labels=self.max_labels,
            exclude=self.exclude if split == self.excluded_split else (),
            unreadable=self.unreadable,
        )

    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of the labels, if they have names."""
        if self.hierarchy is not None:
            return tuple(as_hierarchy(self.hierarchy).classes)
        return data.class_names(self.source, self.data_dir)


def find_run(preset: str) -> tuple[str, dict]:
    """The preset of a run's folder, and the settings of its recipe."""
    folder = Path(preset).expanduser()
    if (folder / "preset").is_dir() and (folder / "results.json").is_file():
        run_folder = folder
    elif folder.name == "preset" and (folder.parent / "results.json").is_file():
        run_folder = folder.parent
    else:
        return preset, {}
    path = run_folder / "results.json"
    try:
        recipe = json.loads(path.read_text(encoding="utf-8"))["recipe"]
        source = {"source": recipe["data"]["source"]}
        settings = {**recipe["data"], **recipe["objective"], **source}
        return str(run_folder / "preset"), settings
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ValueError(
            f"Expected the results of keras-moe train in {path}; received: {error!r}"
        ) from error


def find_images(args: argparse.Namespace, recipe: dict) -> Images:
    """The images that are asked for, or those of the run."""
    source, recipe = find_source(args, recipe)
    test_split = args.split or recipe.get("test_split", "test")
    classes = open_source(source, test_split, args.data_dir).classes
    hierarchy = args.hierarchy or recipe.get("hierarchy")
    several = classes.max_labels is not None or hierarchy is not None
    return Images(
        source,
        test_split,
        args.train_split or recipe.get("train_split", "train"),
        args.data_dir,
        hierarchy,
        several,
        recipe.get("max_labels"),
        recipe.get("train_split", "train"),
        recipe.get("exclude") or (),
        recipe.get("unreadable") or "raise",
    )


def has_pairs(preset: str, overrides: dict) -> bool:
    """Whether a preset's model embeds pairs of images and texts."""
    arguments = dict(overrides)
    options = {k: arguments.pop(k) for k in ("task", "load_weights") if k in arguments}
    with models.resolve(preset, arguments, **options, counts_only=True) as blueprint:
        return issubclass(blueprint.backbone, PairBackbone)


def shown(console: Console) -> Callable[[Iterable, str], Iterable]:
    """A function that shows the progress of batches to people."""

    def show(batches, split):
        if not console.is_terminal:
            return batches
        return track(batches, split, console=console, transient=True)

    return show
