"""Say what is on photos: names and probabilities.

An image-text model chooses among the texts of --labels. Folders are read with those
below them. A file that is no image is refused by its name before anything is printed.
"""

import argparse
import csv
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_moe._errors import unfit
from keras_moe.cli import _arguments
from keras_moe.cli._inputs import Model, find_model, with_bar

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """\
keras-moe predict vmoe_fashion shoe.png
keras-moe predict runs/flowers photos --top 1 --csv photos.csv
keras-moe predict limoe_emoji cat.png --labels "a cat" "a dog" --json"""
# Files of a folder that a warning names.
NAMED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments.add_preset(parser)
    parser.add_argument(
        "photos",
        metavar="PHOTO",
        nargs="+",
        type=Path,
        help="Image files (BMP, GIF, JPEG, PNG, WebP) and folders of them.",
    )
    what = 'The texts that an image-text model chooses among, such as "a cat" "a dog".'
    parser.add_argument("--labels", metavar="TEXT", nargs="+", help=what)
    _arguments.add_count(parser, "--top", "The number of classes of a photo.", 5)
    _arguments.add_batch_size(parser)
    _arguments.add_overrides(parser)
    parser.add_argument(
        "--csv",
        nargs="?",
        const=_arguments.STDOUT,
        type=_arguments.file_or_stdout(".csv"),
        metavar="FILE.csv",
        help="Print lines of photo, rank, name and probability instead of the table; "
        "or, with a file name, write them to that file.",
    )


def run(args: argparse.Namespace, console: "Console") -> _arguments.Result:
    from keras_moe._files import write_text

    photos, chosen = photos_in(args.photos), find_model(args)
    if args.csv not in (None, _arguments.STDOUT):
        # Before the work.
        Path(args.csv).parent.mkdir(parents=True, exist_ok=True)
    check_labels(chosen, args)
    model = chosen.load()
    if not hasattr(model, "classify"):
        raise unfit("a model with classes", f"{args.preset!r}, which has no head")
    options = {"top": args.top, "batch_size": args.batch_size}
    if args.labels:
        options["names"] = args.labels
    starts, found = range(0, len(photos), args.batch_size), []
    for start in with_bar(console)(starts, "photos"):
        part = photos[start : start + args.batch_size]
        found += zip(part, model.classify(part, **options))
    values = [
        {"photo": str(photo), "classes": [x._asdict() for x in classes]}
        for photo, classes in found
    ]
    text = csv_text(values)
    if args.csv not in (None, _arguments.STDOUT):
        write_text(args.csv, text)
    if args.csv == _arguments.STDOUT:
        return _arguments.Result(values, (lambda console: console.file.write(text),))
    return _arguments.Result(values, (table_of(values),))


def photos_in(paths: Sequence[Path]) -> list[Path]:
    """The files, and the images in the folders and below them."""
    from keras_moe.data._files import IMAGE_SUFFIXES, files_below, is_image

    photos: list[Path] = []
    for path in paths:
        if not path.is_dir():
            photos.append(path)
            continue
        files = files_below(path, path)
        images, others = [], []
        for file in files:
            (images if is_image(file) else others).append(file)
        if not images:
            expected = f"a folder with images ({', '.join(IMAGE_SUFFIXES)})"
            raise unfit(expected, f"{len(files)} other files in {path}")
        if others:
            names = ", ".join(map(str, others[:NAMED]))
            names += ", ..." if len(others) > NAMED else ""
            text = f"Files that are no images are not read ({len(others)}): {names}"
            warnings.warn(text, stacklevel=2)
        photos += images
    return photos


def check_labels(chosen: Model, args: argparse.Namespace) -> None:
    if chosen.writes_texts:
        raise unfit("a model of images", f"{args.preset!r}, a language model")
    if chosen.embeds_pairs and not args.labels:
        raise unfit("--labels for an image-text model", preset=args.preset)
    if args.labels and not chosen.embeds_pairs:
        expected = "no --labels for a model that has its own classes"
        raise unfit(expected, f"--labels {' '.join(args.labels)}")


def csv_text(values: Sequence[dict[str, Any]]) -> str:
    """A line for each class of each photo."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("photo", "rank", "name", "probability"))
    for row in values:
        for rank, found in enumerate(row["classes"], 1):
            name, probability = found["name"], found["probability"]
            writer.writerow((row["photo"], rank, name, f"{probability:.6g}"))
    return file.getvalue()


def table_of(values: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("photo", "name")
    table.add_column("probability", justify="right")
    for row in values:
        for rank, found in enumerate(row["classes"]):
            photo = "" if rank else row["photo"]
            table.add_row(photo, found["name"], f"{found['probability']:.2%}")
    return table
