"""Tables of bad arguments: what is refused, and in which words."""

import re
from collections.abc import Callable

import pytest


def named_values(bad_values: dict[str, dict[str, list]]) -> list[tuple]:
    """Rows of a maker, one bad argument, and the message that names its value."""
    return [
        (maker, {name: value}, re.escape(f"{name.rpartition('.')[2]}={value!r}"))
        for maker, arguments in bad_values.items()
        for name, values in arguments.items()
        for value in values
    ]


def check_refused(make: Callable, arguments: dict, message: str) -> None:
    """Checks that a call raises a ValueError that says what was expected."""
    with pytest.raises(ValueError, match=message) as error:
        make(**arguments)
    assert "Expected" in str(error.value)


def refuses(message: str, call: Callable, /, *arguments, **options) -> None:
    """Checks that a call raises a ValueError with a message."""
    with pytest.raises(ValueError, match=message):
        call(*arguments, **options)
