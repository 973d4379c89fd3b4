"""The command-line programs, called in this process."""

import contextlib
import io
import json
import warnings
from typing import NamedTuple

import pytest


class Outcome(NamedTuple):
    """The status of a program, and the text that it printed."""

    status: int
    output: str
    errors: str


def status_of(main, *arguments):
    """Runs `main`, whose warnings people see instead of an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        return main([str(argument) for argument in arguments])


@pytest.fixture
def program(main, capsys, monkeypatch):
    """Runs `main` with some arguments."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("KERAS_MOE_TRACEBACK", raising=False)

    def run(*arguments):
        capsys.readouterr()
        status = status_of(main, *arguments)
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def done(program):
    """Runs a command that succeeds; returns what it prints."""

    def run(*arguments):
        status, output, errors = program(*arguments)
        assert status == 0, errors
        return output

    return run


@pytest.fixture
def mistake(program):
    """The one line with which a program refuses some arguments."""

    def refused(*arguments):
        status, output, errors = program(*arguments)
        assert status == 2, errors
        assert output == ""
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
        return errors

    return refused


@pytest.fixture(scope="module")
def tables_and_json(main, tmp_path_factory):
    """Runs `main` once for several tests: its tables, and its results as JSON."""

    def run(*arguments):
        path = tmp_path_factory.mktemp("results") / "results.json"
        output = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
            patch.setenv("COLUMNS", "160")
            status = status_of(main, *arguments, "--json", path)
        assert status == 0
        return output.getvalue(), json.loads(path.read_text())

    return run
