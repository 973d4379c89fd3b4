"""Validates JSON files against a schema while reading them.

A schema is built from the classes below, such as

    Record({"classes": ListOf(Text(), minimum=1), "count": Integer(0)}, {"classes"})

and the errors of `read_json` name the file and the first value that does not fit.
"""

import json
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class _Fault(Exception):
    """A value that does not fit, and its location."""

    def __init__(self, expected: Any, place: str, received: Any):
        where = f" at {place}" if place else ""
        super().__init__(f"Expected {expected}{where}", reprlib.repr(received))


class Integer(NamedTuple):
    """An integer between `minimum` and `maximum`, not a boolean."""

    minimum: int
    maximum: int = 2**31 - 1

    def __str__(self):
        return f"an integer in [{self.minimum}, {self.maximum}]"

    def check(self, value: Any, place: str) -> None:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not self.minimum <= value <= self.maximum:
            raise _Fault(self, place, value)


class Text(NamedTuple):
    """A string that can name a file or a class."""

    def __str__(self):
        return "a string of Unicode characters, not empty"

    def check(self, value: Any, place: str) -> None:
        if not isinstance(value, str) or not value or "\0" in value:
            raise _Fault(self, place, value)
        try:
            value.encode()
        except UnicodeEncodeError as error:  # One half of a pair of surrogates.
            raise _Fault(self, place, value) from error


class ListOf(NamedTuple):
    """A list of at least `minimum` `item`s, optionally without duplicates."""

    item: Any
    minimum: int = 0
    unique: bool = False

    def __str__(self):
        least = f", {self.minimum} or more," if self.minimum else ""
        return f"a list{least} of items that are {self.item}"

    def check(self, value: Any, place: str) -> None:
        if not isinstance(value, list) or len(value) < self.minimum:
            raise _Fault(self, place, value)
        for index, item in enumerate(value):
            self.item.check(item, f"{place}[{index}]")
        if self.unique and len(set(value)) < len(value):
            twice = [item for item, count in Counter(value).items() if count > 1]
            raise _Fault("each item once", place, twice)


class DictOf(NamedTuple):
    """A dict with any keys and values that match `value`."""

    value: Any

    def __str__(self):
        return f"a dict of values that are {self.value}"

    def check(self, value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise _Fault(self, place, value)
        for name, item in value.items():
            Text().check(name, f"{place}[{name!r:.50}]")
            self.value.check(item, f"{place}[{name!r:.50}]")


class Record(NamedTuple):
    """A dict with a schema for each of some keys."""

    fields: Mapping[str, Any]
    required: Iterable[str] = ()
    others: bool = False

    def __str__(self):
        return f"a dict with any of {sorted(self.fields)}"

    def check(self, value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise _Fault(self, place, value)
        if missing := sorted({*self.required} - {*value}):
            raise _Fault(f"a dict with {missing}", place, sorted(value))
        if (unknown := sorted({*value} - {*self.fields})) and not self.others:
            raise _Fault(f"{self} and no others", place, unknown)
        for name, description in self.fields.items():
            if name in value:
                description.check(value[name], f"{place}[{name!r}]")


class Either(NamedTuple):
    """A value that matches one of two schemas; the second one is for lists."""

    one: Any
    several: ListOf

    def __str__(self):
        return f"{self.one}, or {self.several}"

    def check(self, value: Any, place: str) -> None:
        if isinstance(value, list):
            self.several.check(value, place)
            return
        try:
            self.one.check(value, place)
        except _Fault as error:
            raise _Fault(self, place, value) from error


def read_json(path: Path, description: Any) -> Any:
    """Reads a JSON file and validates it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"Expected a JSON file; received: {path}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Expected JSON in {path}; received: {error}") from error
    try:
        description.check(value, "")
    except _Fault as fault:
        expected, received = fault.args
        raise ValueError(f"{expected} in {path}; received: {received}") from fault
    return value
