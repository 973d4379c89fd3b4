"""The result of a sub-command, for people and for programs."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console


class Result(NamedTuple):
    """The result of a sub-command.

    Attributes:
        values: the result as JSON has it.
        show: function that prints it on a console.
    """

    values: Any
    show: Callable[[Console], None]


def show_all(*things: Any) -> Callable[[Console], None]:
    """The `show` of tables and lines, printed one after the other."""

    def show(console: Console) -> None:
        for thing in things:
            console.print(thing, highlight=False, soft_wrap=isinstance(thing, str))

    return show
