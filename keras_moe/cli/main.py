"""The entry point of `keras-moe`.

Results go to stdout; with JSON, everything else goes to stderr. The exit status is 0, 2
for a user's mistake, 1 for a bug, 130 after Ctrl-C, and 141 if stdout's reader left.
"""

import argparse
import contextlib
import faulthandler
import importlib
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from keras_moe import choose_backend, import_keras
from keras_moe._errors import unfit
from keras_moe._version import __version__
from keras_moe.cli import (
    convert,
    describe,
    estimate,
    evaluate,
    export,
    generate,
    predict,
    quickstart,
    report,
    tokenize,
    train,
    twins,
    upcycle,
)
from keras_moe.cli._arguments import STDOUT, Parser, add_command

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS = (
    quickstart,
    train,
    tokenize,
    twins,
    evaluate,
    predict,
    generate,
    report,
    export,
    convert,
    upcycle,
    describe,
    estimate,
)
# Errors of the library and of the operating system that a user can do something about.
MISTAKES = (ImportError, OSError, TypeError, ValueError)
# An error of TensorFlow may carry a graph.
LONGEST_MESSAGE = 1500
# Columns of tables that go to a file or a pipe.
WIDTH = 160


def make_parser() -> Parser:
    parser = Parser(
        prog="keras-moe",
        description="Vision mixtures of experts for Keras 3. KERAS_BACKEND selects "
        "jax, tensorflow or torch; without it, the backend is that of your keras.json "
        "if you have edited it, or else the first one that is installed.",
        examples="keras-moe quickstart\n"
        "keras-moe describe vmoe_b32\n"
        "keras-moe train mumoe_digits\n"
        "keras-moe evaluate runs/mumoe_digits --json\n"
        "keras-moe predict runs/mumoe_digits photo.png\n"
        "keras-moe report runs/mumoe_digits\n"
        "keras-moe COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        add_command(commands, module)
    return parser


def main(
    argv: list[str] | None = None, make_parser: Callable[[], Parser] = make_parser
) -> int:
    wants_traceback = os.environ.get("KERAS_MOE_TRACEBACK", "0") not in ("", "0")
    interrupted, log = "Interrupted.", None
    try:
        args = make_parser().parse_args(argv)
        args.argv = sys.argv[1:] if argv is None else argv
        wants_traceback = args.traceback = wants_traceback or args.traceback
        interrupted = args.interrupted
        # Within another program, such as a test, stderr is not this program's.
        if argv is None and not wants_traceback:
            log = divert_native_log()
        run(args)
        status = 0
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        # The reader, such as `head`, has enough. Python flushes stdout once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except Exception as error:
        if wants_traceback:
            traceback.print_exc()
        # An image that cannot be read is an error of TensorFlow outside training.
        is_of_tensorflow = type(error).__module__.startswith("tensorflow")
        is_mistake = isinstance(error, MISTAKES) or is_of_tensorflow
        status = 2 if is_mistake else 1
        text = " ".join(str(error).split())[:LONGEST_MESSAGE]
        if not is_mistake:
            # A long run cannot be repeated to see its traceback.
            log = log or _new_log()
            with open(log, "a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
            text = f"{type(error).__name__}: {text} (unexpected; see {log})"
        print(f"error: {text or type(error).__name__}", file=sys.stderr)
    if log is not None and status != 1:
        log.unlink(missing_ok=True)
    return status


def run(args: argparse.Namespace) -> None:
    if args.json not in (None, STDOUT):
        # A folder that cannot be made is no reason to lose a result.
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    set_environment()
    to_people = contextlib.nullcontext()
    if args.json == STDOUT:
        to_people = contextlib.redirect_stdout(sys.stderr)
    with to_people, warnings.catch_warnings():
        warnings.showwarning = showing_once()
        import_keras()
        import_own(args.imports)
        console = new_console()
        result = args.command.run(args, console)
        if result is None:
            return
        if args.json != STDOUT:
            result.show(console)
            # A reader that left is noticed here, and not when Python ends.
            sys.stdout.flush()
    if args.json is None:
        return
    from keras_moe._files import json_text, write_text

    text = json_text(result.values)
    if args.json == STDOUT:
        # Flushed here, where an error still has its line.
        print(text, flush=True)
    else:
        write_text(args.json, text + "\n")


def import_own(modules: list[str]) -> None:
    """Imports the user's modules, which may be in the working directory."""
    if not modules:
        return
    # Python leaves it out of the path of an installed program.
    sys.path.insert(0, os.getcwd())
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            expected = f"a module in {os.getcwd()} or an installed one"
            raise unfit(expected, f"--import {module} ({error})") from error


def new_console() -> "Console":
    """A console of `rich` without markup, which names and errors may look like.

    It lets the program end when the reader of stdout left.
    """
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            # Rich would end the process with status 1.
            raise BrokenPipeError

    chosen_elsewhere = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = None if chosen_elsewhere else WIDTH
    # A name such as tfds:cat:1.0.0 has no emoji, either.
    return PipedConsole(width=width, markup=False, emoji=False)


def set_environment() -> None:
    """Selects the backend and keeps libraries quiet, before they are imported."""
    choose_backend()
    for name, value in {
        # PyTorch's idle threads would spin, which slows other work.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "GRPC_VERBOSITY": "ERROR",
    }.items():
        os.environ.setdefault(name, value)


def showing_once() -> Callable[..., None]:
    """A `warnings.showwarning` that prints each warning as one line, and once."""
    shown = set()

    def show(message, *args, **kwargs):
        text = " ".join(str(message).split())
        if text not in shown:
            print(f"warning: {text}", file=sys.stderr)
        shown.add(text)

    return show


def divert_native_log() -> Path:
    """Redirects what TensorFlow, XLA and CUDA write to stderr to a file."""
    log = _new_log()
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(
        stderr, "w", buffering=1, encoding=sys.stderr.encoding, errors="replace"
    )
    faulthandler.enable(sys.stderr)
    return log


def _new_log() -> Path:
    handle, path = tempfile.mkstemp(prefix="keras-moe-", suffix=".log")
    os.close(handle)
    return Path(path)
