"""The whole repository is formatted and passes the static checks."""

import pytest

from tests.forks import run_python


@pytest.mark.parametrize("command", [["format", "--check"], ["check"]], ids=" ".join)
def test_ruff(command):
    done = run_python("-m", "ruff", *command, ".")
    assert done.returncode == 0, done.stdout + done.stderr
