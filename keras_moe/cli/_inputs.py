"""What programs begin with: a preset and data, asked for or a run's; and their bars."""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import keras_moe
from keras_moe._errors import unfit
from keras_moe.cli._arguments import model_overrides

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

# Options of `load_pairs` that an evaluation may set: it reads all captions, in order.
PAIR_OPTIONS = ("templates", "unreadable", "exclude")


class Model(NamedTuple):
    """A preset with overrides, and the settings of the run that trained it, if any."""

    preset: str
    overrides: dict[str, Any]
    embeds_pairs: bool
    writes_texts: bool
    recipe: dict[str, Any]

    def load(self) -> Any:
        task = {"task": "contrastive"} if self.embeds_pairs else {}
        if self.writes_texts:
            task = {"task": "causal_lm"}
        return keras_moe.models.from_preset(self.preset, **{**task, **self.overrides})


class Examples(NamedTuple):
    """The data to evaluate on, as `keras_moe.data.load` and `load_pairs` take it."""

    source: str
    split: str
    train_split: str
    data_dir: str | None
    max_labels: int | None
    excluded: dict[str, Any]  # by split
    options: dict[str, Any]

    def has_several_labels(self, split: str | None = None) -> bool:
        from keras_moe.data.sources import open_source

        split = split or self.split
        classes = open_source(self.source, split, self.data_dir).classes
        return classes is not None and classes.max_labels is not None

    def images(self, split: str, image_shape: tuple, batch_size: int) -> Any:
        """The batches of a split in order: labels are integers, or 0-1 vectors."""
        several = self.has_several_labels(split)
        return keras_moe.data.load(
            self.source,
            split,
            image_shape,
            batch_size,
            shuffle=False,
            one_hot=several,
            data_dir=self.data_dir,
            multi_label=several,
            max_labels=self.max_labels,
            exclude=self.excluded.get(split, ()),
            unreadable=self.options.get("unreadable", "raise"),
        )

    def pairs(self, image_shape: tuple, batch_size: int, **options: Any) -> Any:
        """The batches of image-text pairs of the split whose figures are wanted."""
        return keras_moe.data.load_pairs(
            self.source,
            self.split,
            image_shape,
            batch_size,
            shuffle=False,
            data_dir=self.data_dir,
            exclude=self.excluded.get(self.split, ()),
            **self.options,
            **options,
        )

    def texts(self) -> list[str]:
        return list(keras_moe.data.load_texts(self.source, self.split, self.data_dir))

    def class_names(self) -> tuple[str, ...] | None:
        return keras_moe.data.class_names(self.source, self.data_dir)

    def num_classes(self) -> int:
        names = self.class_names()
        if names is not None:
            return len(names)
        return keras_moe.data.num_classes(self.source, self.data_dir)


def find_model(args: argparse.Namespace) -> Model:
    from keras_moe.models import DecoderBackbone
    from keras_moe.models.backbones._pairs import PairBackbone

    preset, recipe = find_run(args.preset)
    overrides = model_overrides(args.set, ["preset"])
    arguments = dict(overrides)
    options = {k: arguments.pop(k) for k in ("task", "load_weights") if k in arguments}
    resolved = keras_moe.models.resolve(preset, arguments, **options, counts_only=True)
    with resolved as blueprint:
        kinds = (PairBackbone, DecoderBackbone)
        embeds_pairs, writes_texts = (issubclass(blueprint.backbone, x) for x in kinds)
    return Model(preset, overrides, embeds_pairs, writes_texts, recipe)


def find_run(preset: str) -> tuple[str, dict]:
    """The preset of a run's folder, and the settings of its recipe."""
    from keras_moe._files import path_within, read_text

    folder = Path(preset).expanduser()
    if (folder / "preset").is_dir() and (folder / "results.json").is_file():
        run_folder = folder
    elif folder.name == "preset" and (folder.parent / "results.json").is_file():
        run_folder = folder.parent
    else:
        return preset, {}
    path = run_folder / "results.json"
    try:
        recipe = json.loads(read_text(path, run_folder))["recipe"]
        source = {"source": recipe["data"]["source"]}
        settings = {**recipe["data"], **recipe["objective"], **source}
        if run_folder == folder:
            path_within(folder / "preset", folder)
        return str(run_folder / "preset"), settings
    except (ValueError, LookupError, TypeError) as error:
        raise unfit(f"the results of keras-moe train in {path}", repr(error)) from error


def find_examples(
    args: argparse.Namespace, recipe: dict, options: Sequence[str] = PAIR_OPTIONS
) -> Examples:
    from keras_moe._checks import check_argument_names

    if args.data is None and not recipe:
        expected = "--data, or the folder of a run that says what it was trained on"
        raise unfit(expected, preset=args.preset)
    if args.data not in (None, recipe.get("source")):
        # The settings of a run belong to its data.
        recipe = {}
    source = args.data or recipe.get("test_source") or recipe["source"]
    if not isinstance(source, str):
        raise unfit("--data for a run on a mixture of sources", source)
    split = args.split or recipe.get("test_split", "test")
    asked_for = dict(args.data_options)
    check_argument_names(asked_for, list(options), "--data-options")
    own = ("templates", "unreadable")
    chosen = {k: recipe[k] for k in own if recipe.get(k) is not None} | asked_for
    excluded = {}
    if recipe.get("exclude"):
        excluded[recipe.get("train_split", "train")] = recipe["exclude"]
    if "exclude" in chosen:
        excluded[split] = chosen.pop("exclude")
    keras_moe.data.PairOptions(**chosen)
    return Examples(
        source,
        split,
        getattr(args, "train_split", None) or recipe.get("train_split", "train"),
        args.data_dir,
        recipe.get("max_labels"),
        excluded,
        chosen,
    )


@contextlib.contextmanager
def progress_shown(
    console: "Console", text: str, *columns: "ProgressColumn | str"
) -> Iterator[Callable[[int, int | None, str], None]]:
    """A function of (done, total, name) that moves a bar on a terminal."""
    from rich.progress import Progress, TextColumn

    is_shown = console.is_terminal
    # Names of files may have brackets, which are no markup.
    own = [TextColumn(x, markup=False) if isinstance(x, str) else x for x in columns]
    with Progress(
        *own, console=console, transient=True, disable=not is_shown
    ) as progress:
        task = progress.add_task(text, total=None)

        def show(done, total, name):
            progress.update(task, completed=done, total=total, description=name)

        yield show


def with_bar(console: "Console") -> Callable[[Iterable, str], Iterable]:
    """A function that adds a progress bar to the batches of a split."""
    from rich.markup import escape
    from rich.progress import track

    class Shown:
        """Batches that can be read again, as far as the given ones can."""

        def __init__(self, batches, split):
            self.batches, self.split = batches, split

        def __iter__(self):
            return iter(
                track(self.batches, escape(self.split), console=console, transient=True)
            )

        def cardinality(self):
            known = getattr(self.batches, "cardinality", self.batches.__len__)
            return known()

    return Shown if console.is_terminal else lambda batches, split: batches
