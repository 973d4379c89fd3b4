"""The common ground of all sub-commands: help, errors, JSON, interruption."""

import io
import json
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from keras_moe import WRITTEN_BY_KERAS
from keras_moe._tables import numbers_table
from keras_moe.cli import describe, train
from keras_moe.cli._arguments import Result, override
from keras_moe.cli._inputs import progress_shown
from keras_moe.cli.main import COMMANDS, main, make_parser, set_environment
from tests.forks import run_python

NAMES = [module.__name__.rpartition(".")[2] for module in COMMANDS]


@pytest.fixture
def work(monkeypatch):
    """Replaces what `describe` does by a function, or by an error."""

    def replace(what):
        def fail(args, console):
            raise what

        is_error = isinstance(what, BaseException)
        monkeypatch.setattr(describe, "run", fail if is_error else what)

    return replace


def seconds_of_children():
    """The processor's time of all processes that have ended: others change nothing."""
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize("name", NAMES)
def test_help_is_quick_and_quiet_and_has_examples(name):
    begin = seconds_of_children()
    done = run_python("-m", "keras_moe.cli", name, "--help")
    seconds = seconds_of_children() - begin
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\n  keras-moe {name}" in done.stdout.partition("examples:")[2]
    assert seconds < 1
    for shared in ("--json [FILE.json]", "--traceback"):
        assert shared in done.stdout


def test_arguments_are_parsed_before_keras_is_imported():
    code = (
        "import sys; sys.argv = ['keras-moe', 'describe', 'vit_b16', '--set', 'x']\n"
        "from keras_moe.cli.main import main\n"
        "status = main(sys.argv[1:])\n"
        "heavy = {'keras', 'numpy', 'rich', 'jax', 'tensorflow', 'torch'}\n"
        "print(status, sorted(heavy & set(sys.modules)))"
    )
    done = run_python("-c", code)
    assert done.stdout == "2 []\n", done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_parsed(name):
    parser = make_parser()
    (action,) = (x for x in parser._actions if hasattr(x, "add_parser"))
    examples = [x.split() for x in action.choices[name].epilog.splitlines()[1:]]
    assert examples
    for program, *arguments in examples:
        assert program == "keras-moe"
        args = parser.parse_args(arguments)
        assert args.command.__name__ == f"keras_moe.cli.{name}"


def test_overrides_are_json_or_strings():
    values = {"1": 1, "[1,2]": [1, 2], "null": None, '{"b": true}': {"b": True}}
    values |= {"softmax": "softmax", "b=c": "b=c", "": ""}
    for text, value in values.items():
        assert override(f"a={text}") == ("a", value)


def test_results_are_tables_or_json(program, work, tmp_path):
    def run(args, console):
        print("a line of training")
        console.print("a progress bar")
        table = Table("name")
        table.add_row("a row")
        # Names of files are no markup.
        table.add_row("photo[b].jpg[/i]")
        console.print("tfds:cat:1.0.0")
        return Result({"loss": float("nan"), "steps": (1, 2)}, (table, "end"))

    work(run)
    expected = {"loss": None, "steps": [1, 2]}
    shown = program("describe", "x")
    assert shown.status == 0
    assert "a row" in shown.output
    assert "photo[b].jpg[/i]" in shown.output
    assert "tfds:cat:1.0.0" in shown.output
    assert shown.output.endswith("end\n")
    assert shown.errors == ""
    # Nothing but JSON on stdout.
    asked = program("describe", "x", "--json")
    assert json.loads(asked.output) == expected
    assert asked.errors == "a line of training\na progress bar\ntfds:cat:1.0.0\n"
    path = tmp_path / "new" / "results.json"
    written = program("describe", "x", "--json", path)
    assert written.output == shown.output
    assert json.loads(path.read_text()) == expected
    work(lambda args, console: None)
    assert program("describe", "x", "--json") == (0, "", "")


def test_tables_and_bars_read_no_markup():
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    console.print(numbers_table("on [x]", ["a"], [["[/y]"]]))
    with progress_shown(console, "photos", "{task.description}") as show:
        show(1, 2, "photo[/b].jpg")
    output = console.file.getvalue()
    assert all(text in output for text in ("on [x]", "[/y]", "photo[/b].jpg"))


def invalid_argument_of_tensorflow(message):
    module = {"__module__": "tensorflow.python.framework.errors_impl"}
    return type("InvalidArgumentError", (Exception,), module)(message)


@pytest.mark.parametrize(("error", "line"), [
    (ValueError("Expected a;\n   received: b"), "error: Expected a; received: b\n"),
    (TypeError(), "error: TypeError\n"),
    (ImportError("no timm"), "error: no timm\n"),
    (FileNotFoundError(2, "No such file", "x"), "error: [Errno 2] No such file"),
    (invalid_argument_of_tensorflow("no a.png\n" + 5000 * "x"), "error: no a.png xx"),
])  # fmt: skip
def test_a_mistake_is_one_line(mistake, work, error, line):
    work(error)
    errors = mistake("describe", "x")
    assert errors.startswith(line)
    assert len(errors) < 1600


def test_a_traceback_is_shown_on_request(program, work):
    work(ValueError("here"))
    status, _, errors = program("describe", "x", "--traceback")
    assert status == 2
    assert errors.startswith("Traceback (most recent call last):")
    assert errors.endswith("\nerror: here\n")


def test_an_unexpected_failure_keeps_its_traceback(program, work):
    work(KeyError("lost"))
    status, _, errors = program("describe", "x")
    assert status == 1
    path = re.fullmatch(r"error: KeyError: 'lost' \(unexpected; see (.*)\)\n", errors)
    file = Path(path.group(1))
    assert "Traceback (most recent call last):" in file.read_text()
    file.unlink()


def test_ctrl_c_is_one_line(program, work, monkeypatch):
    work(KeyboardInterrupt())
    assert program("describe", "x") == (130, "", "\nInterrupted.\n")
    monkeypatch.setattr(train, "run", describe.run)
    status, _, errors = program("train", "mumoe_digits")
    assert status == 130
    assert "the same command resumes" in errors


def test_a_reader_that_left_is_no_error(capsys, monkeypatch, work, tmp_path):
    """`keras-moe describe --list | head -1` ends as other programs of Unix do."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def fileno(self):
            return file.fileno()

    logs = set(Path(tempfile.gettempdir()).glob("keras-moe-*.log"))
    work(lambda args, console: Result({"a": 1}, ("a line",)))
    with open(tmp_path / "stdout", "w") as file:
        monkeypatch.setattr(sys, "stdout", Closed())
        assert main(["describe", "x"]) == 141
    assert capsys.readouterr().err == ""
    assert set(Path(tempfile.gettempdir()).glob("keras-moe-*.log")) <= logs


@pytest.mark.parametrize(("config", "backend"), [
    ({**WRITTEN_BY_KERAS, "floatx": "float16"}, "tensorflow"),
    # Keras writes this file itself.
    (WRITTEN_BY_KERAS, None),
    ("{", None),
    (None, None),
])  # fmt: skip
def test_the_users_keras_json_holds(monkeypatch, tmp_path, config, backend):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "keras.json").write_text(text)
    for name in ("OMP_WAIT_POLICY", "TF_CPP_MIN_LOG_LEVEL", "GRPC_VERBOSITY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    set_environment()
    assert os.environ["KERAS_BACKEND"] == "jax"
    monkeypatch.delenv("KERAS_BACKEND")
    monkeypatch.setattr("keras_moe.find_spec", lambda name: name != "torch")
    # As before Keras is imported, and as after it.
    set_environment()
    assert "KERAS_BACKEND" not in os.environ
    monkeypatch.delitem(sys.modules, "keras")
    set_environment()
    assert os.environ["KERAS_BACKEND"] == (backend or "jax")


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_and_comes_once(program, work):
    def run(args, console):
        for space in ("\n  ", " "):
            warnings.warn(f"a corrupt{space}checkpoint", stacklevel=1)
        return Result({})

    work(run)
    assert program("describe", "x").errors == "warning: a corrupt checkpoint\n"


def test_your_own_modules_are_imported_first(done, mistake, tmp_path, monkeypatch):
    (tmp_path / "own_router.py").write_text(
        "from keras_moe.routers import TokenChoiceRouter, register_router\n\n"
        "@register_router('own_choice')\n"
        "class OwnRouter(TokenChoiceRouter):\n"
        "    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ("describe", "vmoe_digits", "--set", "router=own_choice", "--import")
    assert "router='own_choice'" in mistake(*arguments[:-1])
    done(*arguments, "own_router")
    assert "--import other (No module named 'other')" in mistake(*arguments, "other")
