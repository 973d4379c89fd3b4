"""`python -m tools.studies NAME` repeats the experiments of a paper on small data."""

import sys

from keras_moe.cli.main import main as run_cli
from tools.studies.arguments import make_parser


def main(argv: list[str] | None = None) -> int:
    """Runs a study, and returns the exit status."""
    return run_cli(argv, make_parser)


if __name__ == "__main__":
    sys.exit(main())
