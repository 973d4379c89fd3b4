"""Repeat the papers' experiments on small data: `python -m tools.studies STUDY`."""

import os
import sys

# Before Keras is imported; its own default is TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "jax")

from keras_moe.cli._arguments import Parser, add_command
from keras_moe.cli.main import main as run_command
from tools.studies import (
    clip_up,
    experts,
    held_out,
    language,
    limoe,
    moepp,
    mumoe,
    routers,
)


def make_parser() -> Parser:
    """The parser of all studies."""
    parser = Parser(
        prog="python -m tools.studies",
        description="Repeat a paper's experiments on small data.\n\nEvery finished run "
        "is a file in the output folder: the same command again resumes an interrupted "
        "study, and other settings make other files. Results are tables, pictures and "
        "results.json.",
        examples="python -m tools.studies routers\n"
        "python -m tools.studies moepp --parts costs speed\n"
        "python -m tools.studies mumoe --help",
    )
    studies = parser.add_subparsers(metavar="STUDY", required=True)
    for module in (
        *(experts, routers, moepp, mumoe),
        *(limoe, clip_up, held_out, language),
    ):
        add_command(studies, module)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a study, and returns the exit status."""
    return run_command(argv, make_parser)


if __name__ == "__main__":
    sys.exit(main())
