"""JSON files that are checked against a description when they are read.

A description is made of the classes below, such as

    Record({"classes": ListOf(Text(), minimum=1), "count": Integer(0)}, {"classes"})

and `read_json` refuses a file by its name and the first place that is not as described.
"""

import dataclasses
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A place in a value that is not as described."""

    place: str
    expected: str
    received: Any

    def message(self, file: Any) -> str:
        """The message of an error about the fault."""
        place = f" at {self.place}" if self.place else ""
        received = reprlib.repr(self.received)
        return f"Expected {self.expected}{place} in {file}; received: {received}"


@dataclasses.dataclass(frozen=True)
class Integer:
    """An integer between `minimum` and `maximum`, no boolean."""

    minimum: int
    maximum: int = 2**31 - 1

    def __str__(self):
        return f"an integer in [{self.minimum}, {self.maximum}]"

    def faults(self, value: Any, place: str) -> Iterator[Fault]:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not self.minimum <= value <= self.maximum:
            yield Fault(place, str(self), value)


@dataclasses.dataclass(frozen=True)
class Text:
    """A string that can be a name of a file or of a class."""

    def __str__(self):
        return "a string, not empty"

    def faults(self, value: Any, place: str) -> Iterator[Fault]:
        if not isinstance(value, str) or not value or "\0" in value:
            yield Fault(place, str(self), value)
            return
        try:
            value.encode()
        except UnicodeEncodeError:  # One half of a pair of surrogates.
            yield Fault(place, "a string of Unicode characters", value)


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list of `item`s, at least `minimum` of them, with `unique` each once."""

    item: Any
    minimum: int = 0
    unique: bool = False

    def __str__(self):
        least = f", {self.minimum} or more," if self.minimum else ""
        return f"a list{least} of items that are {self.item}"

    def faults(self, value: Any, place: str) -> Iterator[Fault]:
        if not isinstance(value, list) or len(value) < self.minimum:
            yield Fault(place, str(self), value)
            return
        for index, item in enumerate(value):
            yield from self.item.faults(item, f"{place}[{index}]")
        if self.unique and len(set(value)) < len(value):
            seen: set = set()
            twice = [x for x in value if x in seen or seen.add(x)]
            yield Fault(place, "each item once", twice)


@dataclasses.dataclass(frozen=True)
class DictOf:
    """A dict from any names to values that are `value`."""

    value: Any

    def __str__(self):
        return f"a dict of values that are {self.value}"

    def faults(self, value: Any, place: str) -> Iterator[Fault]:
        if not isinstance(value, dict):
            yield Fault(place, str(self), value)
            return
        for name, item in value.items():
            yield from Text().faults(name, f"{place}[{name!r:.50}]")
            yield from self.value.faults(item, f"{place}[{name!r:.50}]")


@dataclasses.dataclass(frozen=True)
class Record:
    """A dict with values of their own for some names."""

    fields: Mapping[str, Any]
    required: Iterable[str] = ()
    others: bool = False

    def __str__(self):
        return f"a dict with any of {sorted(self.fields)}"

    def faults(self, value: Any, place: str) -> Iterator[Fault]:
        if not isinstance(value, dict):
            yield Fault(place, str(self), value)
            return
        if missing := sorted(set(self.required) - set(value)):
            yield Fault(place, f"a dict with {missing}", sorted(value))
        unknown = sorted(set(value) - set(self.fields))
        if unknown and not self.others:
            yield Fault(place, f"{self} and no others", unknown)
        for name, description in self.fields.items():
            if name in value:
                yield from description.faults(value[name], f"{place}[{name!r}]")


@dataclasses.dataclass(frozen=True)
class Either:
    """A value of one of two descriptions; the second one is for lists."""

    one: Any
    several: ListOf

    def __str__(self):
        return f"{self.one}, or {self.several}"

    def faults(self, value: Any, place: str) -> Iterator[Fault]:
        if isinstance(value, list):
            yield from self.several.faults(value, place)
        elif any(self.one.faults(value, place)):
            yield Fault(place, str(self), value)


def find_fault(value: Any, description: Any) -> Fault | None:
    """The first place in a JSON value that is not as described, None if all is."""
    return next(description.faults(value, ""), None)


def read_json(path: Path, description: Any) -> Any:
    """The value in a JSON file, if it is as described."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"Expected a JSON file; received: {path}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Expected JSON in {path}; received: {error}") from error
    fault = find_fault(value, description)
    if fault is not None:
        raise ValueError(fault.message(path))
    return value
