"""Declares and reads the command line's arguments, without importing Keras."""

import argparse
import json
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from keras_moe._errors import unfit

if TYPE_CHECKING:
    from rich.console import Console

# What takes options: a parser or a group of its options.
Options: TypeAlias = argparse._ActionsContainer
# The value of `--json` without a file.
STDOUT = "-"
# What a command prints at Ctrl-C if the same command resumes its work.
RESUMES = "Interrupted: the same command resumes where it stopped."


def verbosity() -> int:
    """Keras's `verbose`: a bar on a terminal, a line for each epoch in a file."""
    return 1 if sys.stdout.isatty() else 2


class UsageError(ValueError):
    """A command line that cannot be parsed."""


class Result(NamedTuple):
    """A command's result as JSON, and what to print: tables, text and functions."""

    values: Any
    shown: tuple = ()

    def show(self, console: "Console") -> None:
        for thing in self.shown:
            if callable(thing):
                thing(console)
            else:
                is_text = isinstance(thing, str)
                console.print(thing, highlight=False, soft_wrap=is_text)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises its errors, and shows examples and defaults."""

    def __init__(self, *, examples: str = "", description: str = "", **kwargs: Any):
        width = min(shutil.get_terminal_size().columns - 2, 88)
        paragraphs = [textwrap.fill(x, width) for x in description.split("\n\n")]
        super().__init__(
            description="\n\n".join(paragraphs),
            epilog=f"examples:\n{textwrap.indent(examples, '  ')}",
            formatter_class=_Formatter,
            allow_abbrev=False,
            **kwargs,
        )

    def error(self, message: str):
        raise UsageError(f"{message} (see {self.prog} --help)")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Ends the help of an argument with its default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        default = action.default
        if default in (None, False, argparse.SUPPRESS, []):
            return action.help or ""
        if isinstance(default, (list, tuple)):
            default = " ".join(map(str, default))
        return f"{action.help} Default: {default}."


def add_command(commands: argparse._SubParsersAction, module: ModuleType) -> None:
    """Adds the sub-command of a module, called like it, with its docstring as help."""
    name = module.__name__.rpartition(".")[2].replace("_", "-")
    text = module.__doc__ or ""
    line = text.partition("\n")[0].removesuffix(".")
    parser = commands.add_parser(
        name,
        help=line[0].lower() + line[1:],
        description=text.strip(),
        examples=module.EXAMPLES,
    )
    module.add_arguments(parser)
    interrupted = getattr(module, "INTERRUPTED", "Interrupted.")
    parser.set_defaults(command=module, interrupted=interrupted)
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="Import a module of your own first, from this folder or installed: what it"
        " registers (routers, backbones, losses, presets) can then be named. May be "
        "given several times.",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        type=file_or_stdout(".json"),
        metavar="FILE.json",
        help="Print the results as JSON instead of tables; or, with a file name, write "
        "them to that file and print the tables.",
    )
    what = "Show the traceback of an error, as KERAS_MOE_TRACEBACK=1 does."
    add_flag(group, "--traceback", what)


def command_line(args: argparse.Namespace) -> str | None:
    """The command as it was typed; None for arguments of another program."""
    argv = getattr(args, "argv", None)
    return None if argv is None else shlex.join(["keras-moe", *map(str, argv)])


def add_preset(parser: Options, name: str = "preset", **kwargs: Any) -> None:
    """Adds the model, as a positional argument or as an option."""
    what = "The model: a preset's name, a folder, an hf:// handle or published weights."
    parser.add_argument(name, **{"metavar": "PRESET", "help": what, **kwargs})


def add_data(parser: Options, more: str = "", **kwargs: Any) -> None:
    """Adds `--data` and `--data-dir`, as `keras_moe.data.load` takes them."""
    what = (
        "The data: digits, emoji, fashion_mnist, tfds:NAME, tfrecord:GLOB or "
        "folder:PATH."
    )
    parser.add_argument("--data", metavar="SOURCE", help=what + more, **kwargs)
    parser.add_argument(
        "--data-dir", metavar="FOLDER", help="The folder of TensorFlow Datasets."
    )


def add_overrides(
    parser: Options,
    option: str = "--set",
    what: str = "arguments of the model, as in from_preset",
    example: str = "num_experts=8 image_shape=[384,384,3]",
) -> None:
    """Adds an option of `NAME=VALUE` pairs, of which `dict` makes the overrides."""
    parser.add_argument(
        option,
        nargs="+",
        action="extend",
        default=[],
        type=override,
        metavar="NAME=VALUE",
        help=f"Override {what}. Values are JSON, or else strings: {example}.",
    )


def add_flag(parser: Options, name: str, what: str) -> None:
    parser.add_argument(name, action="store_true", help=what)


def add_data_options(parser: Options) -> None:
    what = "options of load_pairs"
    add_overrides(parser, "--data-options", what, "templates=imagenet")


def add_count(
    parser: Options,
    name: str,
    help: str,
    default: int | list[int] | None = None,
    minimum: int = 1,
    **kwargs: Any,
) -> None:
    """Adds an integer from a minimum on."""
    kwargs = {"type": at_least(minimum), "metavar": "N", **kwargs}
    parser.add_argument(name, help=help, default=default, **kwargs)


def add_batch_size(parser: Options) -> None:
    add_count(parser, "--batch-size", "The number of examples in a batch.", 32)


def add_shots(parser: Options, default: list[int] | None) -> None:
    what = "Training examples of each class for few-shot accuracy."
    add_count(parser, "--shots", what, default, nargs="+")


def add_length(
    parser: Options,
    epochs: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
) -> None:
    add_count(parser, "--epochs", "Passes over the training data.", epochs)
    add_count(parser, "--batch-size", "Examples in a training step.", batch_size)
    parser.add_argument(
        "--learning-rate",
        type=positive,
        default=learning_rate,
        help="The peak learning rate.",
    )


def add_output(parser: Options, what: str, default: Path | None = None) -> None:
    parser.add_argument(
        "--output", type=Path, default=default, metavar="FOLDER", help=what
    )


def add_target(
    parser: Options,
    what: str = "The folder of the new preset; an older preset there is replaced.",
) -> None:
    parser.add_argument("output", type=Path, metavar="FOLDER", help=what)


def check_target(source: str, output: Path) -> None:
    """Refuses, before the work, a folder of something else and the source itself."""
    from keras_moe._files import check_replaceable
    from keras_moe.models.saving._preset_folder import is_preset

    target = output.expanduser().resolve()
    if target == Path(source).expanduser().resolve():
        expected = "another folder than the source, which saving would replace"
        raise unfit(expected, output=str(output), source=source)
    check_replaceable(target, "preset", is_preset)


def add_layout(parser: Options) -> None:
    parser.add_argument(
        "--expert-parallel",
        type=integer_or("batch"),
        help="The number of devices over which experts are split, or 'batch' for all "
        "that share a batch.",
    )
    what = "The number of devices over which each layer is split."
    add_count(parser, "--model-parallel", what, 1)


def model_overrides(
    pairs: Iterable[tuple[str, Any]], own: Collection[str]
) -> dict[str, Any]:
    """Reads `--set`; rejects the arguments in `own`, which the command sets itself."""
    overrides = dict(pairs)
    for name, value in overrides.items():
        if name in own:
            expected = "arguments of the model in --set"
            raise unfit(expected, f"{name}={value!r}, which the command sets itself")
    return overrides


def override(text: str) -> tuple[str, Any]:
    """The type of `NAME=VALUE` arguments: a name and a JSON value, or else a string."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"Expected NAME=VALUE; received: {text}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError) as error:
        if value[:1] in ("[", "{", '"') or value in ("True", "False", "None"):
            raise argparse.ArgumentTypeError(
                f"Expected JSON after {name}=, such as true or [1, 2]; received: "
                f"{value:.80} ({error})"
            ) from error
    return name, value


def json_or_string(text: str) -> Any:
    return override(f"VALUE={text}")[1]


def at_least(minimum: int) -> Callable[[str], int]:
    """The type of arguments that are integers from a minimum on."""

    def parse(text: str) -> int:
        if not text.lstrip("+-").isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"Expected an integer, at least {minimum}; received: {text}"
            )
        return int(text)

    return parse


def positive(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(
            f"Expected a finite number above 0; received: {text}"
        )
    return float(text)


def integer_or(word: str) -> Callable[[str], int | str]:
    """The type of arguments that are one word, or positive integers."""
    integer = at_least(1)
    return lambda text: text if text == word else integer(text)


def file_or_stdout(suffix: str) -> Callable[[str], str]:
    """The type of `--json` and `--csv`, which must not take a positional argument."""

    def parse(text: str) -> str:
        if text != STDOUT and Path(text).suffix != suffix:
            raise argparse.ArgumentTypeError(
                f"Expected a file that ends with {suffix}, or none; received: {text}"
            )
        return text

    return parse
