"""The programs, called in this process."""

from typing import NamedTuple

import pytest

from keras_moe.cli.main import main


class Outcome(NamedTuple):
    """The status of a program, and the text that it printed."""

    status: int
    output: str
    errors: str


@pytest.fixture
def program(capsys, monkeypatch):
    """Runs `keras-moe` with some arguments."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("KERAS_MOE_TRACEBACK", raising=False)

    def run(*arguments):
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Outcome(status, *capsys.readouterr())

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
