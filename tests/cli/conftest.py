"""The fixtures of `tests.programs`, for `keras-moe`."""

import pytest

from keras_moe.cli import main as cli
from tests.programs import done, mistake, program, tables_and_json  # noqa: F401


@pytest.fixture(scope="session")
def main():
    return cli.main
