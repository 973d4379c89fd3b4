"""The entry point of `keras-moe`: from a command line to a result and a status.

Results go to stdout, as tables or as JSON; all else that is printed goes to stdout with
tables and to stderr with JSON. The status is 0, 2 for a mistake of the user, 1 for a
failure of the program, 130 after Ctrl-C, 141 where the reader of stdout left.
"""

import contextlib
import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from keras_moe import import_keras
from keras_moe.cli.commands import make_parser
from keras_moe.cli.native_log import divert_native_log
from keras_moe.cli.parser import STDOUT, Parser

# Errors of the library and of the operating system that a user can do something about.
MISTAKES = (ImportError, OSError, TypeError, ValueError)
# An error of TensorFlow may carry a graph.
LONGEST_MESSAGE = 1500
# The content of `keras.json` until a user changes it.
WRITTEN_BY_KERAS = {
    "floatx": "float32",
    "epsilon": 1e-07,
    "backend": "tensorflow",
    "image_data_format": "channels_last",
}
# Columns of tables that go to a file or a pipe.
WIDTH = 160


def main(
    argv: list[str] | None = None, make_parser: Callable[[], Parser] = make_parser
) -> int:
    """Runs a sub-command, and returns the exit status."""
    wants_traceback = os.environ.get("KERAS_MOE_TRACEBACK", "0") not in ("", "0")
    interrupted, log = "Interrupted.", None
    try:
        args = make_parser().parse_args(argv)
        wants_traceback |= args.traceback
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
        is_mistake = isinstance(error, MISTAKES) or _is_of_tensorflow(error)
        status = 2 if is_mistake else 1
        text = _one_line(error, is_mistake)
        if not is_mistake:
            text += f" (unexpected; see {_traceback_file(log)})"
        print(f"error: {text}", file=sys.stderr)
    if log is not None and status != 1:
        log.unlink(missing_ok=True)
    return status


def run(args: Any) -> None:
    """Runs the sub-command that was parsed, and prints its result."""
    if args.json not in (None, STDOUT):
        # A folder that cannot be made is no reason to lose a result.
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    set_environment()
    to_people = contextlib.nullcontext()
    if args.json == STDOUT:
        to_people = contextlib.redirect_stdout(sys.stderr)
    with to_people, warnings.catch_warnings():
        warnings.showwarning = show_warning
        import_keras()
        console = new_console()
        result = importlib.import_module(args.module).run(args, console)
        if result is None:
            return
        if args.json != STDOUT:
            result.show(console)
            # A reader that left is noticed here, and not when Python ends.
            sys.stdout.flush()
    if args.json is None:
        return
    from keras_moe.files import json_text, write_text

    text = json_text(result.values)
    if args.json == STDOUT:
        # Flushed here, where an error still has its line.
        print(text, flush=True)
    else:
        write_text(args.json, text + "\n")


def new_console() -> Any:
    """A console of `rich` whose output ends as that of other programs does."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            # Rich ends the process with status 1 here.
            raise BrokenPipeError

    return PipedConsole(width=None if sys.stdout.isatty() else _width())


def set_environment() -> None:
    """Chooses the backend and keeps libraries quiet, before they are imported."""
    backend = configured_backend() or next(
        filter(find_spec, ("jax", "torch", "tensorflow")), "jax"
    )
    for name, value in {
        # Keras's own default is TensorFlow, which may be there for `tf.data` alone.
        "KERAS_BACKEND": backend,
        # Idle threads of PyTorch would spin, and stand still beside other work.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "GRPC_VERBOSITY": "ERROR",
    }.items():
        os.environ.setdefault(name, value)


def configured_backend() -> str | None:
    """The backend that the user's `keras.json` names, or None.

    Keras writes that file itself, with TensorFlow in it, when it is first imported: a
    file of Keras's own settings names no choice of the user.
    """
    folder = os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")
    path = Path(folder).expanduser() / "keras.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return None
    if not isinstance(config, dict) or config == WRITTEN_BY_KERAS:
        return None
    backend = config.get("backend")
    return backend if isinstance(backend, str) else None


def show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """Prints a warning as one line; see `warnings.showwarning`."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _width() -> int | None:
    return None if "COLUMNS" in os.environ else WIDTH


def _is_of_tensorflow(error: Exception) -> bool:
    """An image that cannot be read is an error of TensorFlow outside training."""
    return type(error).__module__.startswith("tensorflow")


def _one_line(error: Exception, is_mistake: bool) -> str:
    text = " ".join(str(error).split())
    if len(text) > LONGEST_MESSAGE:
        text = text[:LONGEST_MESSAGE] + "..."
    if is_mistake and text:
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def _traceback_file(log: Path | None) -> Path:
    """The file with the traceback: a long run cannot be repeated to see it."""
    if log is None:
        handle, path = tempfile.mkstemp(prefix="keras-moe-", suffix=".log")
        os.close(handle)
        log = Path(path)
    with open(log, "a", encoding="utf-8") as file:
        traceback.print_exc(file=file)
    return log
