"""Reads JSON files that must match a schema of plain Python values.

In a schema, `str` is a string that is not empty, `int` an integer from 0 on, `[item]` a
list, `{str: item}` a dict with any names, and `{"name": item}` a dict with some of its
names. Of a tuple, the first is for numbers and the second for lists.
"""

import json
import reprlib
from collections.abc import Collection
from pathlib import Path
from typing import Any


def read_json(
    path: Path,
    schema: dict[str, Any],
    required: Collection[str] = (),
    others: bool = False,
) -> dict[str, Any]:
    """Reads a JSON file; errors name the file and the first value that does not fit.

    `others` allows names that the schema lacks, next to the `required` ones.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        known = value
        if others and isinstance(value, dict):
            known = {name: value[name] for name in schema if name in value}
        _check(known, schema, "")
        _expect({*required} <= {*value}, f"a dict with {sorted(required)}", value, "")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"In {path}: {error}") from error
    return value


def _check(value, schema, where):
    if schema is str:
        _expect(isinstance(value, str) and value, "a string", value, where)
    elif schema is int:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        fits = is_integer and 0 <= value < 2**63
        _expect(fits, "an integer from 0 on", value, where)
    elif isinstance(schema, tuple):
        _check(value, schema[isinstance(value, list)], where)
    elif isinstance(schema, list):
        _expect(isinstance(value, list), "a list", value, where)
        for index, item in enumerate(value):
            _check(item, schema[0], f"{where}[{index}]")
    else:
        _expect(isinstance(value, dict), "a dict", value, where)
        if str not in schema:
            known = f"a dict with any of {sorted(schema)}"
            _expect({*value} <= {*schema}, known, value, where)
        for name, item in value.items():
            _check(item, schema.get(name) or schema[str], f"{where}[{name!r:.50}]")


def _expect(fits, expected, value, where):
    if not fits:
        at = f" at {where}" if where else ""
        raise ValueError(f"Expected {expected}{at}; received: {reprlib.repr(value)}")
