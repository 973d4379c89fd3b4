"""A property of a class, as `classmethod` is a method of one."""

from collections.abc import Callable
from typing import Any


class ClassProperty:
    """A decorator that makes a method of a class readable as an attribute."""

    def __init__(self, function: Callable[[type], Any]):
        self.function = function

    def __get__(self, _: Any, owner: type) -> Any:
        return self.function(owner)
