"""NAME=VALUE arguments of command-line programs."""

import json


def parse_override(text: str) -> tuple[str, object]:
    """`name=value` as a name and a value; values are JSON, or else strings."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"Expected NAME=VALUE; received: {text}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
