"""The fixtures of `tests.programs`, for `python -m tools.studies`."""

import pytest

from tests.programs import done, mistake, program  # noqa: F401
from tools.studies import __main__ as studies


@pytest.fixture(scope="session")
def main():
    return studies.main
