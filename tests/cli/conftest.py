"""The fixtures of `tests.programs`, for `keras-moe`."""

import pytest

from keras_moe.cli import main as cli
from tests.programs import mistake, program, tables_and_json  # noqa: F401


@pytest.fixture(scope="session")
def main():
    return cli.main


@pytest.fixture
def done(program):  # noqa: F811
    """Runs a command that succeeds; returns what it prints."""

    def run(*arguments):
        status, output, errors = program(*arguments)
        assert status == 0, errors
        return output

    return run
