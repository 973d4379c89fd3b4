"""A property of a class, as `classmethod` is a method of one."""

from collections.abc import Callable
from typing import Any


class ClassProperty:
    """A decorator that makes a method of a class readable as an attribute.

    Args:
        function: function of the class.

    Example:

    >>> from keras_moe.models.class_property import ClassProperty
    >>> class Model:
    ...     @ClassProperty
    ...     def presets(cls):
    ...         return [cls.__name__]
    >>> Model.presets
    ['Model']
    """

    def __init__(self, function: Callable[[type], Any]):
        self.function = function

    def __get__(self, _: Any, owner: type) -> Any:
        return self.function(owner)
