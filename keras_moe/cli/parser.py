"""Arguments that sub-commands share, and how they are read.

Only the standard library is imported: help is printed before Keras is there.
"""

import argparse
import json
import math
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The value of `--json` without a file.
STDOUT = "-"
# Last words of what can be resumed.
RESUMES = "Interrupted: the same command resumes where it stopped."


class UsageError(ValueError):
    """A command line that cannot be parsed."""


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are exceptions, and whose help has examples."""

    def __init__(self, *, examples: str = "", description: str = "", **kwargs: Any):
        width = min(shutil.get_terminal_size().columns - 2, 88)
        paragraphs = [textwrap.fill(x, width) for x in description.split("\n\n")]
        super().__init__(
            description="\n\n".join(paragraphs),
            epilog=f"examples:\n{textwrap.indent(examples, '  ')}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **kwargs,
        )

    def error(self, message: str):
        raise UsageError(f"{message} (see {self.prog} --help)")


def add_command(
    commands: Any,
    name: str,
    line: str,
    examples: str,
    description: str = "",
    interrupted: str = "Interrupted.",
    module: str | None = None,
) -> Parser:
    """Adds a sub-command."""
    parser = commands.add_parser(
        name,
        help=line,
        description=f"{line[0].upper()}{line[1:]}.\n\n{description}",
        examples=examples,
    )
    module = module or f"keras_moe.cli.{name}"
    parser.set_defaults(module=module, interrupted=interrupted)
    add_output(parser)
    return parser


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds `--json` and `--traceback`, which every sub-command has."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        type=_json_file,
        metavar="FILE.json",
        help="print the results as JSON in the place of tables; with a name, write "
        "them to that file beside the tables",
    )
    group.add_argument(
        "--traceback",
        action="store_true",
        help="show where an error comes from; KERAS_MOE_TRACEBACK=1 does the same",
    )


def add_preset(parser: argparse.ArgumentParser, name: str = "preset", **kwargs) -> None:
    """Adds the model: a positional `PRESET`, or an option where it has a default."""
    what = "a built-in name, a folder, an hf:// handle or published weights"
    kwargs = {"metavar": "PRESET", "help": what, **kwargs}
    parser.add_argument(name, **kwargs)


def add_data(parser: argparse.ArgumentParser, **kwargs: Any) -> None:
    """Adds `--data` and `--data-dir`, the images as `keras_moe.data.load`
    takes them.
    """
    what = (
        "digits, emoji, fashion_mnist, tfds:NAME, tfrecord:GLOB, folder:PATH or "
        "openclipart:PATH"
    )
    more = kwargs.pop("help", "")
    parser.add_argument("--data", metavar="SOURCE", help=what + more, **kwargs)
    parser.add_argument(
        "--data-dir", metavar="FOLDER", help="folder of TensorFlow Datasets"
    )


def add_overrides(
    parser: argparse.ArgumentParser,
    option: str = "--set",
    what: str = "arguments of the model, as in from_preset",
    example: str = "num_experts=8 image_shape=[384,384,3]",
) -> None:
    """Adds an option of `NAME=VALUE` pairs; `dict` of its value are the overrides."""
    parser.add_argument(
        option,
        nargs="+",
        action="extend",
        default=[],
        type=override,
        metavar="NAME=VALUE",
        help=f"override {what}; values are JSON, or else strings: {example}",
    )


def add_num_classes(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds `--num-classes`."""
    parser.add_argument("--num-classes", type=at_least(1), help=what)


def add_class_subset(parser: argparse.ArgumentParser) -> None:
    """Adds `--class-subset`."""
    parser.add_argument(
        "--class-subset",
        choices=("imagenet_a", "imagenet_r"),
        help="the 200 of ImageNet's 1,000 classes among which the model chooses, as "
        "accuracies on ImageNet-A and ImageNet-R are measured",
    )


def add_pair_evaluation(parser: argparse.ArgumentParser) -> None:
    """Adds what evaluates models of images and texts."""
    pairs = parser.add_argument_group("models of images and texts")
    pairs.add_argument(
        "--templates",
        metavar="TEMPLATES",
        help="of zero-shot prompts: a file, ours (the default), name, imagenet, "
        "simple, or one text with {}",
    )
    pairs.add_argument(
        "--class-names",
        metavar="FILE",
        help="names in the order of the labels, or imagenet; by default the data's",
    )
    pairs.add_argument(
        "--contrastive-batch",
        type=at_least(1),
        default=1024,
        metavar="N",
        help="images that are compared with each other; fewer if the data has fewer",
    )
    add_overrides(
        pairs, "--data-options", "options of load_pairs", "unreadable=exclude"
    )


def add_shots(parser: Any, default: list[int] | None) -> None:
    """Adds `--shots`, the examples of each class of few-shot accuracies."""
    parser.add_argument(
        "--shots",
        type=at_least(1),
        nargs="+",
        default=default,
        metavar="K",
        help="training examples of each class",
    )


def add_run(
    parser: Any,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    folder: str,
) -> None:
    """Adds the arguments of a training without a recipe, and the folder of its
    results.
    """
    parser.add_argument("--epochs", type=at_least(1), default=epochs)
    parser.add_argument("--batch-size", type=at_least(1), default=batch_size)
    parser.add_argument("--learning-rate", type=positive, default=learning_rate)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs") / folder,
        metavar="FOLDER",
        help=f"folder of the results; runs/{folder} by default",
    )


def add_layout(parser: Any) -> None:
    """Adds the arguments by which a model is split over devices."""
    parser.add_argument(
        "--expert-parallel",
        type=integer_or("batch"),
        metavar="N",
        help="devices over which experts are split, or 'batch'",
    )
    parser.add_argument("--model-parallel", type=at_least(1), default=1, metavar="N")


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Adds `--devices` and what belongs to it, see `devices`."""
    parser.set_defaults(coordinator=None, num_processes=None, process_id=None)
    group = parser.add_argument_group("many devices, on JAX")
    group.add_argument(
        "--devices", type=integer_or("all"), metavar="N", help="how many, or 'all'"
    )
    add_layout(group)


def override(text: str) -> tuple[str, Any]:
    """`NAME=VALUE` as a name and a value."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"Expected NAME=VALUE; received: {text}")
    try:
        return name, json.loads(value)
    except RecursionError as error:
        raise argparse.ArgumentTypeError(
            f"Expected JSON after {name}=; received: {len(value)} characters that nest "
            "too deeply"
        ) from error
    except json.JSONDecodeError as error:
        if value[:1] in ("[", "{", '"'):
            raise argparse.ArgumentTypeError(
                f"Expected JSON after {name}=; received: {value} "
                f"({error.msg} at character {error.pos})"
            ) from error
    as_json = {"True": "true", "False": "false", "None": "null"}.get(value)
    if as_json:
        raise argparse.ArgumentTypeError(
            f"Expected JSON, {name}={as_json}; received: {text}"
        )
    return name, value


def at_least(minimum: int, maximum: float = math.inf) -> Callable[[str], int]:
    """An argument's type: integers from a minimum on."""
    what = f"at least {minimum}"
    if maximum < math.inf:
        what = f"{minimum} to {maximum}"

    def parse(text: str) -> int:
        value = _parsed(int, "an integer", text)
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"Expected {what}; received: {text}")
        return value

    return parse


def positive(text: str) -> float:
    """An argument's type: finite numbers above 0."""
    value = _parsed(float, "a number", text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"Expected a finite number above 0; received: {text}"
        )
    return value


def integer_or(word: str, minimum: int = 1) -> Callable[[str], int | str]:
    """An argument's type: one word, or integers from a minimum on."""
    integer = at_least(minimum)
    return lambda text: text if text == word else integer(text)


def json_or_string(text: str) -> Any:
    """An argument's type: a JSON value, or else a string."""
    return override(f"VALUE={text}")[1]


def _parsed(kind, what, text):
    try:
        return kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"Expected {what}; received: {text}"
        ) from error


def _json_file(text: str) -> str:
    """A file of `--json`, which must not take the argument that stands behind it."""
    if text != STDOUT and Path(text).suffix != ".json":
        raise argparse.ArgumentTypeError(
            f"Expected a file that ends with .json, or none; received: {text}"
        )
    return text
